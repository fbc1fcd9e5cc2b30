"""The benchmarks of stores and batches work; how fast things are is no test."""

import json

from tests.integration.conftest import run


def test_batches_are_timed():
    done = run(
        "benchmarks/data/batches.py", "--tokens", 50_000, "--window", 64, "--rows", 2, "--batches", 1, "--turns", 2
    )
    assert done.returncode == 0, done.stderr
    rates = json.loads(done.stdout)["tokens_per_cpu_second"]
    assert rates["permutation"] > 0 and "permutation with dense masks" in rates


def test_opening_a_store_is_timed():
    done = run("benchmarks/data/open_store.py", "--tokens", 50_000, "--batches", 1)
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout)
    assert line["tokens"] == 50_000 and line["seconds_to_open"] > 0
