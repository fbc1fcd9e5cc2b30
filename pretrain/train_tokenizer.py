"""Learn a SentencePiece vocabulary from text.

python pretrain/train_tokenizer.py --config configs/pretrain/quickstart.yaml text.source='wiki/*.txt.gz'
"""

from __future__ import annotations

import time
from pathlib import Path

from pretrain.config import PretrainConfig
from xlpre.common.cli_main import run_main
from xlpre.config.cli import from_command_line
from xlpre.text.corpus import documents
from xlpre.text.learned import check_learned, write_learned
from xlpre.text.tokenizer import Tokenizer, train


def make_tokenizer(config: PretrainConfig) -> Tokenizer:
    """The vocabulary of `config`: the one that is there, or a new one.

    Raises:
        ValueError: the one that is there has another size, covers another share of characters, or says that it was learned from another
            text than the config asks for.
    """
    path, size = Path(config.tokenizer.path), config.tokenizer.vocab_size
    if path.exists():
        tokenizer = Tokenizer.named_in(config.tokenizer)
        for key, found in (("vocab_size", len(tokenizer)), ("character_coverage", tokenizer.character_coverage)):
            if found != (wanted := getattr(config.tokenizer, key)):
                raise ValueError(
                    f"{path} was learned with tokenizer.{key}={found}, not {wanted}; set tokenizer.{key}={found}, "
                    "or another tokenizer.path, or delete the file"
                )
        check_learned(path, tokenizer, config.text, config.tokenizer)
        print(f"{path}: there already, {size} pieces")
        return tokenizer
    started = time.monotonic()
    print(f"{path}: learning {size} pieces from {' '.join(config.text.sources)} ...", flush=True)
    tokenizer = train(documents(config.text), config.tokenizer)
    tokenizer.save(path)
    write_learned(path, tokenizer, config.text, config.tokenizer)
    print(f"{path}: {len(tokenizer)} pieces in {time.monotonic() - started:.0f} s")
    return tokenizer


def main() -> None:
    """The command."""
    make_tokenizer(from_command_line(PretrainConfig, __doc__ or ""))


if __name__ == "__main__":
    run_main(main)
