"""The GPU kernels, compiled and assembled for sm_90 without a GPU: none spills or exceeds its register budget."""

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY

pytestmark = pytest.mark.xdist_group("registers")  # on one worker, which compiles the kernels in one process
# the others have no variants
SCORE_KERNELS = ("--kernel", "attention_forward", "backward_key_value", "backward_query")
ATTENTION = {
    "dropout": [],
    "no dropout": ["--no-dropout", *SCORE_KERNELS],
    "limited distance": ["--same-length", *SCORE_KERNELS],
}
FUSED = ["768 4096", "4096 --no-dropout", "768 --dtype fp32"]
# statements that change the benchmark, and the expected exit status
ATTENTION_FAULTS = {
    "REGISTERS['draw_dropout_mask'] = (32, 32)": 0,
    "REGISTERS['draw_dropout_mask'] = (24, 24)": 1,
}
FUSED_FAULTS = ["REGISTERS['gelu_dropout_forward'] = 40", "DTYPES['bf16'] = __import__('torch').float32"]
# Runs benchmarks in one process, which imports triton once. The process of the tests may have imported triton's interpreter.
RUN_ALL = """
import contextlib, importlib, io, json, sys
from unittest import mock
results = []
for name, fault, args in json.load(sys.stdin):
    benchmark = importlib.import_module("benchmarks.gpu." + name)
    output, sys.argv = io.StringIO(), [name, *args]
    with mock.patch.dict(benchmark.REGISTERS), mock.patch.dict(benchmark.DTYPES), contextlib.redirect_stdout(output):
        exec(fault, vars(benchmark))
        try:
            benchmark.main()
        except SystemExit as end:
            results.append([int(end.code), output.getvalue()])
print(json.dumps(results))
"""


def attention_job(variant):
    return "attention_registers", "", ("--width", "64", "128", *ATTENTION[variant])


def attention_fault_job(fault):
    return "attention_registers", fault, ("--width", "64", "--kernel", "draw_dropout_mask")


def fused_job(variant):
    return "fused_ops_registers", "", ("--width", *variant.split())


def fused_fault_job(fault):
    return "fused_ops_registers", fault, ("--width", "256")


@pytest.fixture(scope="module")
def results():
    """Exit status and output of each job."""
    pytest.importorskip("triton", reason="triton is installed with the tests on Linux (x86-64)")
    jobs = [*map(attention_job, ATTENTION), *map(attention_fault_job, ATTENTION_FAULTS)]
    jobs += [*map(fused_job, FUSED), *map(fused_fault_job, FUSED_FAULTS)]
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = str(REPOSITORY)
    command = [sys.executable, "-c", RUN_ALL]
    done = subprocess.run(command, input=json.dumps(jobs), env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(zip(jobs, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("variant", ATTENTION)
def test_no_attention_kernel_spills_or_exceeds_its_registers_at_head_widths_64_and_128(results, variant):
    status, output = results[attention_job(variant)]
    assert status == 0, output
    n_kernels = 7 if variant == "dropout" else 3
    assert len(output.splitlines()) == 1 + n_kernels * 2, output


def test_dropout_computes_no_maximum_that_replaces_nan_by_a_number(results):
    """Only `attention_forward` has such maxima, those of the scores."""
    maxima = {}
    for variant in ("dropout", "no dropout"):
        _, output = results[attention_job(variant)]
        header, *lines = (line.split() for line in output.splitlines())
        # the size of a tile is three words in a line and in the header
        maxima[variant] = {(line[0], line[1]): int(line[header.index("maxima")]) for line in lines}
    assert {kernel for (kernel, _), n in maxima["dropout"].items() if n} == {"attention_forward"}
    assert maxima["no dropout"].items() <= maxima["dropout"].items()


@pytest.mark.parametrize("fault", ATTENTION_FAULTS)
def test_an_attention_kernel_that_exceeds_its_registers_fails(results, fault):
    status, output = results[attention_fault_job(fault)]
    assert status == ATTENTION_FAULTS[fault], output


@pytest.mark.parametrize("variant", FUSED)
def test_no_fused_kernel_spills_and_all_access_rows_in_vectors(results, variant):
    status, output = results[fused_job(variant)]
    assert status == 0, output
    n_norms = 2 * sum(word.isdigit() for word in variant.split())
    assert len(output.splitlines()) == 1 + n_norms + 2 * ("--no-dropout" not in variant), output


@pytest.mark.parametrize("fault", FUSED_FAULTS)
def test_a_fused_kernel_with_more_registers_or_smaller_vectors_fails(results, fault):
    status, output = results[fused_fault_job(fault)]
    assert status == 1, output
