"""Encode text into a token store, which pretraining reads.

The text is split into sentences, encoded with the vocabulary of pretrain/train_tokenizer.py, and written to stores/NAME. A part of
the documents is held out for validation. An existing store of the same text is kept. An interrupted command continues where it stopped.

Examples:
  python pretrain/prepare.py --config configs/pretrain/quickstart.yaml
  python pretrain/prepare.py --config configs/pretrain/quickstart.yaml name=mine text.source='my_texts/*.txt' text.max_chars=null
  python pretrain/prepare.py name=tales text.source=hf:roneneldan/TinyStories tokenizer.path=tokenizers/mine.model

See docs/data.md for sources, file formats and mixtures.
"""

from __future__ import annotations

from collections.abc import Sequence

from pretrain.config import PretrainConfig
from pretrain.tools.preparation import make_store
from pretrain.trainer.config_warnings import check_has_text
from xlpre.common.cli_main import run_main
from xlpre.config.cli import SettingsParser

COMMON = ("name", "text", "tokenizer.path", "tokenizer.preprocess", "data.store_dir")


def build_parser() -> SettingsParser[PretrainConfig]:
    """Return the parser of the command line."""
    return SettingsParser(PretrainConfig, __doc__, COMMON)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    config, explicit_keys, _ = build_parser().parse_config(argv)
    check_has_text(explicit_keys)
    make_store(config, explicit_keys)


if __name__ == "__main__":
    run_main(main)
