"""Make a vocabulary from text: SentencePiece pieces, or bytes, characters or words (tokenizer.kind).

The vocabulary is written to tokenizers/NAME.model; its special tokens are those of XLNet. An existing vocabulary of the same text is kept.

Examples:
  python pretrain/train_tokenizer.py --config configs/pretrain/quickstart.yaml
  python pretrain/train_tokenizer.py --config configs/pretrain/quickstart.yaml name=mine text.source='my_texts/*.txt' text.max_chars=null
  python pretrain/train_tokenizer.py name=small text.source='my_texts/*.txt' tokenizer.vocab_size=2000

See docs/data.md for sources of text, and docs/getting_started.md for the size of a vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

from pretrain.config import PretrainConfig
from pretrain.tools.preparation import make_tokenizer
from pretrain.trainer.config_warnings import check_has_text
from xlpre.common.cli_main import run_main
from xlpre.config.cli import SettingsParser

COMMON = ("name", "text", "tokenizer")


def build_parser() -> SettingsParser[PretrainConfig]:
    """Return the parser of the command line."""
    return SettingsParser(PretrainConfig, __doc__, COMMON)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    config, explicit_keys, _ = build_parser().parse_config(argv)
    check_has_text(explicit_keys)
    make_tokenizer(config)


if __name__ == "__main__":
    run_main(main)
