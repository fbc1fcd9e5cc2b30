"""Attention, computed in several ways with the same numbers."""
