"""Tests of the commands on a GPU."""
