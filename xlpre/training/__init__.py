"""Training that pretraining and fine-tuning share: start-up, engine, optimizer, checkpoints, progress and logging."""
