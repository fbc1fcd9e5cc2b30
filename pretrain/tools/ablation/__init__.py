"""Ablations: the file and its stages, statistics of paired differences, and the comparison of the rows."""
