"""The GPU kernels, compiled and assembled for sm_90 without a GPU: none spills or exceeds its register budget."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[5]
# the others have no variants
SCORE_KERNELS = ("--kernel", "attention_forward", "backward_key_value", "backward_query")


def run_benchmark(name, *args, setup="pass"):
    """Run a benchmark in a separate process, because this one may have imported triton's interpreter."""
    pytest.importorskip("triton", reason="triton is installed with the tests on Linux (x86-64)")
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = str(REPOSITORY)
    code = f"import benchmarks.gpu.{name} as benchmark; {setup}; benchmark.main()"
    return subprocess.run([sys.executable, "-c", code, *args], env=env, capture_output=True, text=True)


@pytest.mark.parametrize(
    "variant",
    [[], ["--no-dropout", *SCORE_KERNELS], ["--same-length", *SCORE_KERNELS]],
    ids=["dropout", "no dropout", "limited distance"],
)
def test_no_attention_kernel_spills_or_exceeds_its_registers_at_head_widths_64_and_128(variant):
    result = run_benchmark("attention_registers", "--width", "64", "128", *variant)
    assert result.returncode == 0, result.stdout + result.stderr
    n_kernels = 3 if variant else 7
    assert len(result.stdout.splitlines()) == 1 + n_kernels * 2, result.stdout


@pytest.mark.parametrize(("registers", "status"), [(32, 0), (24, 1)])
def test_an_attention_kernel_that_exceeds_its_registers_fails(registers, status):
    setup = f"benchmark.REGISTERS['draw_dropout_mask'] = ({registers}, {registers})"
    args = ("--width", "64", "--kernel", "draw_dropout_mask")
    assert run_benchmark("attention_registers", *args, setup=setup).returncode == status


@pytest.mark.parametrize(
    "variant", [["768", "4096"], ["4096", "--no-dropout"], ["768", "--dtype", "fp32"]], ids=" ".join
)
def test_no_fused_kernel_spills_and_all_access_rows_in_vectors(variant):
    result = run_benchmark("fused_ops_registers", "--width", *variant)
    assert result.returncode == 0, result.stdout + result.stderr
    n_norms = 2 * sum(word.isdigit() for word in variant)
    assert len(result.stdout.splitlines()) == 1 + n_norms + 2 * ("--no-dropout" not in variant), result.stdout


@pytest.mark.parametrize(
    "fault", ["benchmark.REGISTERS['gelu_dropout_forward'] = 40", "benchmark.DTYPES['bf16'] = torch.float32"]
)
def test_a_fused_kernel_with_more_registers_or_smaller_vectors_fails(fault):
    setup = f"import torch; {fault}"
    assert run_benchmark("fused_ops_registers", "--width", "256", setup=setup).returncode == 1
