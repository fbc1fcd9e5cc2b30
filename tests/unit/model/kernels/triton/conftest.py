"""Without a GPU and outside the interpreter, the tests of the kernels are not collected: test_interpreter.py runs them."""

from tests.unit.model.kernels.cases import INTERPRETED, ON_GPU, TRITON_FILES

collect_ignore = [] if INTERPRETED or ON_GPU else TRITON_FILES
