"""The benchmark that kills a training again and again holds its promises, in small."""

import json

import pytest

from tests.integration.conftest import run


@pytest.mark.long
def test_a_training_killed_again_and_again_ends_as_one_that_was_not_and_leaves_nothing_behind(tmp_path):
    lines = tmp_path / "kills.jsonl"
    phases = ("backward", "half_removed", "meeting", "start")
    done = run("benchmarks/reliability/kills.py", "--stages", 1, "--phases", *phases, "--out", lines, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    *kills, whole = map(json.loads, lines.read_text().splitlines())
    assert {kill["phase"] for kill in kills} == set(phases) and len(kills) == 5
    assert whole["steps_equal"] and whole["tensors_equal"] and whole["left_behind"] == whole["broken"] == []
