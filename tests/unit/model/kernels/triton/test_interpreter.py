"""Runs the other tests of this folder in Triton's interpreter, on a CPU.

TRITON_INTERPRET=1 must be set before triton is first imported, so each file runs in a separate process. bf16 runs on GPUs only, because
the interpreter multiplies its bits as integers. fp16 stands in for it. On a machine with a GPU, `make test-gpu` runs the other tests.
"""

from pathlib import Path

import numpy as np
import pytest

from tests.unit.model.kernels.cases import INTERPRETED, ON_GPU, TRITON_FILES, run_in_interpreter


@pytest.mark.skipif(INTERPRETED or ON_GPU, reason="the tests run in this process")
@pytest.mark.parametrize("marker", ["not long", pytest.param("long", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", TRITON_FILES)
def test_the_kernels_pass_their_tests_in_the_interpreter(name, marker):
    pytest.importorskip("triton", reason="triton is installed with the tests on Linux (x86-64)")
    # a failure, because a skip would hide that no kernel is tested
    assert np.lib.NumpyVersion(np.__version__) < "2.4.0", "triton's interpreter needs numpy < 2.4, see constraints.txt"
    run_in_interpreter("-m", marker, str(Path(__file__).with_name(name)))
