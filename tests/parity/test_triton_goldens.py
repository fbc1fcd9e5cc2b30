"""The kernels for GPUs equal the originals' own numbers, in Triton's interpreter, on a processor."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parity.goldens import files

HERE = Path(__file__).parent
OTHERS = [HERE / f"test_{name}_goldens.py" for name in ("language_model", "transformer_xl", "heads")]


@pytest.mark.long
@pytest.mark.parametrize("path", files("xlnet_pretrain_*.npz")[:1])  # skipped, with the reason, where there is none
def test_the_kernels_for_gpus_equal_the_originals(path):
    pytest.importorskip("triton", reason="triton is installed with the tests on Linux (x86-64)")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *map(str, OTHERS)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}  # before triton is first imported
    done = subprocess.run(command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
