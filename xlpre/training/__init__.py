"""Optimisation: processes, schedule, optimizer, engine, checkpoints, metrics."""
