"""Commands: train_tokenizer, prepare, run, fill, report, quickstart. Each takes `--config FILE key=value ...`."""
