"""Attention backends: implementations of relative attention with the same results."""
