"""The GPU kernels, compiled and assembled for sm_90 without a GPU: none spills, or has more registers than its budget."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]


OF_SCORES = ("--kernel", "attend", "differentiate_keys", "differentiate_rows")  # the others have no such variants


def benchmark(*words, name="triton_aot", before="pass"):
    """What benchmarks/triton_aot.py or another does, in a process of its own, as this one may have imported triton's interpreter."""
    pytest.importorskip("triton", reason="triton is installed with the tests on Linux (x86-64)")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "benchmarks")])
    command = [sys.executable, "-c", f"import {name}; {before}; {name}.main()", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    "variant",
    [[], ["--no-dropout", *OF_SCORES], ["--same-length", *OF_SCORES]],
    ids=["dropout", "no dropout", "limited"],
)
def test_no_kernel_spills_or_has_too_many_registers_at_head_widths_64_and_128(variant):
    done = benchmark("--width", "64", "128", *variant)
    assert done.returncode == 0, done.stdout + done.stderr
    n_kernels = 3 if variant else 7
    assert len(done.stdout.splitlines()) == 1 + n_kernels * 2, done.stdout


@pytest.mark.parametrize(("registers", "status"), [(32, 0), (24, 1)])
def test_a_kernel_of_more_registers_than_its_budget_fails(registers, status):
    before = f"triton_aot.REGISTERS['draw'] = ({registers}, {registers})"
    assert benchmark("--width", "64", "--kernel", "draw", before=before).returncode == status


@pytest.mark.parametrize(
    "variant", [["768", "4096"], ["4096", "--no-dropout"], ["768", "--dtype", "fp32"]], ids=" ".join
)
def test_kernels_between_products_do_not_spill_and_read_rows_in_whole_pieces(variant):
    done = benchmark("--width", *variant, name="triton_between_aot")
    assert done.returncode == 0, done.stdout + done.stderr
    n_norms = 2 * sum(word.isdigit() for word in variant)
    assert len(done.stdout.splitlines()) == 1 + n_norms + 2 * ("--no-dropout" not in variant), done.stdout


@pytest.mark.parametrize(
    "fault", ["triton_between_aot.REGISTERS['gelu'] = 40", "triton_between_aot.DTYPES['bf16'] = torch.float32"]
)
def test_more_registers_or_smaller_pieces_fail(fault):
    before = f"import torch; {fault}"
    assert benchmark("--width", "256", name="triton_between_aot", before=before).returncode == 1
