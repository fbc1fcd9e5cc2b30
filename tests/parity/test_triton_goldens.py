"""Triton kernels equal the originals, in Triton's interpreter on a CPU."""

from pathlib import Path

import pytest

from tests.parity.goldens import files
from tests.unit.model.kernels.cases import run_in_interpreter

HERE = Path(__file__).parent
# these cases differ from others outside of attention only, and each takes seconds in the interpreter
SAME_ATTENTION = ("adaptive", "gelu", "uniData", "reuse", "growing", "no_target_mapping")


@pytest.mark.long
@pytest.mark.parametrize("name", ["language_model", "transformer_xl", "heads"])
@pytest.mark.parametrize("path", files("xlnet_pretrain_*.npz")[:1])  # skipped if there are no goldens
def test_triton_kernels_equal_the_originals(path, name):
    pytest.importorskip("triton", reason="triton is installed with the tests on Linux (x86-64)")
    run_in_interpreter(
        str(HERE / f"test_{name}_goldens.py"), "-k", " and ".join(f"not {case}" for case in SAME_ATTENTION)
    )
