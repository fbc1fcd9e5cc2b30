"""Pretraining: the training loop and its parts."""
