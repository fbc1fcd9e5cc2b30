"""Commands that fine-tune a pretrained model, and the tasks they know."""

from pathlib import Path

from xlpre.common.cli_main import hear_interrupts  # before torch, for whose threads xlpre has a word

hear_interrupts(Path(__file__).parent)
