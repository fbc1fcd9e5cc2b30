"""Encode text into a token store.

python pretrain/prepare.py --config configs/pretrain/quickstart.yaml text.source='wiki/*.txt.gz'
"""

from __future__ import annotations

from pretrain.config import PretrainConfig
from pretrain.tools.preparation import make_store
from xlpre.common.cli_main import run_main
from xlpre.config.cli import parse_config


def main() -> None:
    """Run the command."""
    make_store(parse_config(PretrainConfig, __doc__ or ""))


if __name__ == "__main__":
    run_main(main)
