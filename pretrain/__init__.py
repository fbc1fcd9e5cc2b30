"""Commands of pretraining, and the code behind them. All commands have `--help`."""

from pathlib import Path

from xlpre.common.cli_main import install_interrupt_handler

install_interrupt_handler(Path(__file__).parent)
