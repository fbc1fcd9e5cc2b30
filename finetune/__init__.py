"""Commands that fine-tune a pretrained model, and the code behind them."""

from pathlib import Path

from xlpre.common.cli_main import (
    install_interrupt_handler,  # before torch: xlpre sets the OpenMP variables that torch reads
)

install_interrupt_handler(Path(__file__).parent)
