"""Commands of pretraining. Most take `--config FILE key=value ...`; all have `--help`."""

from pathlib import Path

from xlpre.common.cli_main import install_interrupt_handler  # before torch starts its threads

install_interrupt_handler(Path(__file__).parent)
