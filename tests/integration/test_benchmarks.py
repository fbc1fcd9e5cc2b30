"""The benchmarks work; how fast things are is no test."""

import json

from tests.integration.conftest import run

TINY = {
    "n_layer": 2,
    "d_model": 32,
    "window": 32,
    "mem_len": 16,
    "reuse_len": 16,
    "rows": 2,
    "vocab_size": 100,
    "d_inner": 64,
}


def test_a_step_is_timed_against_hugging_faces_once_their_losses_agree():
    done = run("benchmarks/step.py", "--config", json.dumps(TINY), "--vs", "hf", "--rounds", 2)
    assert done.returncode == 0, done.stderr
    ours, theirs = map(json.loads, done.stdout.splitlines())
    assert abs(ours["loss"] - theirs["loss"]) < 1e-4 and ours["times_as_fast"] > 0


def test_reading_with_a_cache_is_timed_against_a_sliding_window_once_their_losses_agree():
    sizes = ("--lengths", 8, 20, "--window", 8, "--layers", 2, "--width", 32, "--rounds", 3)
    done = run("benchmarks/evaluation.py", *sizes)
    assert done.returncode == 0, done.stderr
    short, long = map(json.loads, done.stdout.splitlines())
    assert max(long["losses_differ_by"].values()) < 1e-4
    assert long["flop_ratio"] > short["flop_ratio"] > 1 and long["times_as_fast"] > 1
