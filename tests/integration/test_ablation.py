"""`pretrain/ablate.py --run`: real runs side by side, what fails, what is stopped."""

import json
import signal
import subprocess
import sys
import time

import pytest

from pretrain.tools.ablation import Ablation, outcomes
from tests.conftest import REPOSITORY
from tests.integration.conftest import environment, run, tiny_args
from xlpre.training.metrics import read_metrics

SCRIPT = "pretrain/ablate.py"


@pytest.fixture
def ablation(store, tmp_path):
    """A file of two rows, on the tiny store."""
    args = [word for word in tiny_args(store, tmp_path) if word.partition("=")[0] not in ("name", "run_dir", "seed")]
    (tmp_path / "base.yaml").write_text("name: base\n")
    path = tmp_path / "tiny.yaml"
    path.write_text(
        json.dumps({"base": "base.yaml", "common": args, "rows": {"all": [], "no_memory": ["model.mem_len=0"]}})
    )
    return path


def test_what_failed_is_named_the_rest_is_made_and_what_is_done_is_not_done_again(ablation, tmp_path, monkeypatch):
    blocked = tmp_path / "runs/tiny/no_memory/seed_1/.lock"
    blocked.mkdir(parents=True)
    command = (SCRIPT, ablation, "--run", "--jobs", "2", "train.steps=10")
    done = run(*command, cwd=tmp_path)
    assert done.returncode == 2
    assert "1 of 2 runs failed" in done.stderr and "runs/tiny/no_memory/seed_1/log.txt" in done.stderr
    assert (blocked.parent / "log.txt").read_text()
    assert "| all | none | 1 |" in done.stdout
    blocked.rmdir()
    made = (tmp_path / "runs/tiny/all/seed_1/metrics.jsonl").stat().st_mtime_ns
    done = run(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 runs, 1 of them finished already" in done.stdout
    assert (tmp_path / "runs/tiny/all/seed_1/metrics.jsonl").stat().st_mtime_ns == made
    monkeypatch.chdir(tmp_path)
    reached = outcomes(Ablation(ablation))
    assert {row: several[0].last["step"] for row, several in reached.items()} == {"all": 10, "no_memory": 10}


@pytest.mark.long
def test_stopped_it_stops_its_runs_which_save_and_go_on(ablation, tmp_path):
    args = [SCRIPT, str(ablation), "--run", "--jobs", "1", "--rows", "all", "train.steps=400", "eval.every=400"]
    log = tmp_path / "runs/tiny/all/seed_1"
    with subprocess.Popen(
        [sys.executable, REPOSITORY / args[0], *args[1:]],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    ) as going:
        until = time.monotonic() + 120
        while len(read_metrics(log)) < 20 and time.monotonic() < until:
            time.sleep(0.1)
        going.send_signal(signal.SIGTERM)
        said, _ = going.communicate(timeout=120)
    assert "runs/tiny/all/seed_1: stopped" in said
    stopped_at = read_metrics(log)[-1]["step"]
    assert stopped_at < 400
    done = run(*args, cwd=tmp_path)
    assert done.returncode == 0 and "runs/tiny/all/seed_1: finished" in done.stdout
    assert f"at step {stopped_at}" in (log / "log.txt").read_text()
