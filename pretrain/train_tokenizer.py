"""Train a SentencePiece vocabulary on text.

python pretrain/train_tokenizer.py --config configs/pretrain/quickstart.yaml text.source='wiki/*.txt.gz'
"""

from __future__ import annotations

from pretrain.config import PretrainConfig
from pretrain.tools.preparation import make_tokenizer
from xlpre.common.cli_main import run_main
from xlpre.config.cli import parse_config


def main() -> None:
    """Run the command."""
    make_tokenizer(parse_config(PretrainConfig, __doc__ or ""))


if __name__ == "__main__":
    run_main(main)
