"""Metrics of predictions against labels."""
