"""A small run of the benchmark that kills a training again and again."""

import json

import pytest

from tests.integration.conftest import run


@pytest.mark.long
def test_a_run_that_is_killed_repeatedly_ends_like_an_uninterrupted_one(tmp_path):
    lines = tmp_path / "kills.jsonl"
    phases = ("backward", "half_removed", "meeting", "start")
    done = run("benchmarks/reliability/kills.py", "--stages", 1, "--phases", *phases, "--out", lines, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    *kills, whole = map(json.loads, lines.read_text().splitlines())
    assert {kill["phase"] for kill in kills} == set(phases) and len(kills) == 5
    assert whole["steps_equal"] and whole["tensors_equal"] and whole["left_behind"] == whole["broken"] == []
