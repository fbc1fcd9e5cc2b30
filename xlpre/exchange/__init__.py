"""Portable weights: what leaves a run and what a run can start from."""
