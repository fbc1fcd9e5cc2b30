"""Triton kernels equal the originals, in Triton's interpreter on a CPU."""

from pathlib import Path

import pytest

from tests.parity.goldens import files
from tests.unit.model.kernels.cases import run_in_interpreter

HERE = Path(__file__).parent
GOLDEN_TESTS = [HERE / f"test_{name}_goldens.py" for name in ("language_model", "transformer_xl", "heads")]


@pytest.mark.long
@pytest.mark.parametrize("path", files("xlnet_pretrain_*.npz")[:1])  # skipped if there are no goldens
def test_triton_kernels_equal_the_originals(path):
    pytest.importorskip("triton", reason="triton is installed with the tests on Linux (x86-64)")
    run_in_interpreter(*map(str, GOLDEN_TESTS))
