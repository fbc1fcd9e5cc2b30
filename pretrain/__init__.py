"""Commands: train_tokenizer, prepare, run, fill, report, quickstart. Each takes `--config FILE key=value ...`."""

from pathlib import Path

from xlpre.common.cli_main import hear_interrupts  # before torch, for whose threads xlpre has a word

hear_interrupts(Path(__file__).parent)
