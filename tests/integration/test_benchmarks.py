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
