"""Portable weights: what leaves a run."""
