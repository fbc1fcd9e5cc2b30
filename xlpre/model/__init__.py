"""Tensors. Knows no text, no objective, no DeepSpeed."""
