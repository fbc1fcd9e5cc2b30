"""The GPU kernels of attention, compiled and assembled for sm_90 without a GPU: no register spills."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]


OF_SCORES = ("--kernel", "attend", "differentiate_keys", "differentiate_rows")  # the others have no such variants


@pytest.mark.parametrize(
    "variant",
    [[], ["--no-dropout", *OF_SCORES], ["--same-length", *OF_SCORES]],
    ids=["dropout", "no dropout", "limited"],
)
def test_no_kernel_spills_registers_at_head_widths_64_and_128(variant):
    """In a process of its own: this one may have imported triton's interpreter."""
    pytest.importorskip("triton", reason="triton is installed with the tests on Linux (x86-64)")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(REPOSITORY)
    command = [sys.executable, REPOSITORY / "benchmarks" / "triton_aot.py", "--width", "64", "128", *variant]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    n_kernels = 3 if variant else 7
    assert len(done.stdout.splitlines()) == 1 + n_kernels * 2, done.stdout
