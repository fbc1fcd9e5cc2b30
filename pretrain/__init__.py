"""Commands: train_tokenizer, prepare, run, fill, report, quickstart. Each takes `--config FILE key=value ...`."""

from pathlib import Path

from xlpre.common.cli_main import install_interrupt_handler  # before torch, for whose threads xlpre has a word

install_interrupt_handler(Path(__file__).parent)
