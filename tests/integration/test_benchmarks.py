"""The benchmarks work; how fast things are is no test."""

import json
import subprocess
import sys

from tests.conftest import REPOSITORY
from tests.integration.conftest import environment, run

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


def test_the_cost_of_a_step_is_measured_as_one_size_grows_and_drawn(tmp_path):
    base = {"window": 32, "mem_len": 16, "d_model": 64, "n_layer": 1, "vocab_size": 50}
    done = run("benchmarks/scale.py", "--base", json.dumps(base), "--values", '{"rows": [8]}', "--rounds", 2)
    assert done.returncode == 0, done.stderr
    (line,) = map(json.loads, done.stdout.splitlines())
    assert 3 < line["gflop_of_base"] < 4  # keys of distances are the same for all rows
    assert min(line[name] for name in ("cpu_ms", "times_base", "step_mb", "planned_mb")) > 0
    (tmp_path / "lines.jsonl").write_text(done.stdout)
    with (tmp_path / "lines.jsonl").open() as lines:
        command = [sys.executable, "benchmarks/scale.py", "--plot", tmp_path / "scale.png"]
        subprocess.run(command, stdin=lines, cwd=REPOSITORY, env=environment(), check=True)
    assert (tmp_path / "scale.png").read_bytes().startswith(b"\x89PNG")


def test_long_windows_are_measured_with_any_attention():
    values = json.dumps({"window": [64]})
    done = run("benchmarks/scale.py", "--sweep", "window", "--attention", "cpu", "--values", values, "--rounds", 1)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["attention"] == "cpu"
