"""Training, evaluation, results and inference of fine-tuning."""
