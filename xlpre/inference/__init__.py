"""Inference from token ids or text: batches without an objective, and predictions for blanks."""
