"""Triton kernels equal the originals, in Triton's interpreter on a CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parity.goldens import files

HERE = Path(__file__).parent
GOLDEN_TESTS = [HERE / f"test_{name}_goldens.py" for name in ("language_model", "transformer_xl", "heads")]


@pytest.mark.long
@pytest.mark.parametrize("path", files("xlnet_pretrain_*.npz")[:1])  # skipped if there are no goldens
def test_triton_kernels_equal_the_originals(path):
    pytest.importorskip("triton", reason="triton is installed with the tests on Linux (x86-64)")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        *map(str, GOLDEN_TESTS),
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}  # before triton is first imported
    result = subprocess.run(command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-1000:]
