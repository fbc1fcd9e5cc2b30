"""Pytest collects the tests of the kernels only on a GPU or under TRITON_INTERPRET=1. Elsewhere test_interpreter.py runs them."""

from tests.unit.model.kernels.cases import INTERPRETED, ON_GPU, TRITON_FILES

collect_ignore = [] if INTERPRETED or ON_GPU else TRITON_FILES
