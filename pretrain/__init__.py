"""Commands: train_tokenizer, prepare, run, fill, report, quickstart. Each takes `--config FILE key=value ...`."""

import xlpre  # noqa: F401  before torch, whose threads it has a word for
