"""Commands that fine-tune a pretrained model, and the tasks they know."""

import xlpre  # noqa: F401  before torch, whose threads it has a word for
