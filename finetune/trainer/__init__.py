"""Training, evaluation, results and inference for fine-tuning."""
