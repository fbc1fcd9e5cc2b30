"""`pretrain/ablate.py --run`: parallel runs, failures, interruption."""

import json
import re
import signal
import subprocess
import sys
import time

import pytest

from pretrain.tools.ablation import Ablation, read_results
from tests.conftest import REPOSITORY
from tests.integration.conftest import environment, run, tiny_args
from xlpre.training.metrics_writer import read_metrics

SCRIPT = "pretrain/ablate.py"


@pytest.fixture
def ablation(store, tmp_path):
    """Write an ablation with two rows on the tiny store."""
    args = [word for word in tiny_args(store, tmp_path) if word.partition("=")[0] not in ("name", "run_dir", "seed")]
    (tmp_path / "base.yaml").write_text("name: base\n")
    path = tmp_path / "tiny.yaml"
    path.write_text(
        json.dumps({"base": "base.yaml", "common": args, "rows": {"all": [], "no_memory": ["model.mem_len=0"]}})
    )
    return path


def test_a_failed_run_is_named_and_finished_runs_are_skipped(ablation, tmp_path, monkeypatch):
    blocked = tmp_path / "runs/tiny/no_memory/seed_1/.lock"
    blocked.mkdir(parents=True)
    command = (SCRIPT, ablation, "--run", "--jobs", "2", "train.steps=10")
    result = run(*command, cwd=tmp_path)
    assert result.returncode == 2
    assert "1 of 2 runs failed" in result.stderr and "runs/tiny/no_memory/seed_1/log.txt" in result.stderr
    assert (blocked.parent / "log.txt").read_text()
    lines = result.stdout.splitlines()
    assert "row all, seed 1: started (1 of 2), log in runs/tiny/all/seed_1/log.txt" in lines
    assert any(
        re.fullmatch(r"row all, seed 1: finished after [\d:]+, val loss \S+ \(unigram baseline \S+\)", line)
        for line in lines
    )
    assert any(re.match(r"row no_memory, seed 1: failed with status 2 after .*seed_1/log.txt", line) for line in lines)
    assert "difference to all" in result.stdout
    blocked.rmdir()
    written_at = (tmp_path / "runs/tiny/all/seed_1/metrics.jsonl").stat().st_mtime_ns
    result = run(*command, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "2 runs, 1 of them finished already" in result.stdout
    assert (tmp_path / "runs/tiny/all/seed_1/metrics.jsonl").stat().st_mtime_ns == written_at
    monkeypatch.chdir(tmp_path)
    results = read_results(Ablation(ablation))
    assert {row: row_results[0].last["step"] for row, row_results in results.items()} == {"all": 10, "no_memory": 10}


@pytest.mark.long
def test_an_interrupted_ablation_saves_its_runs_and_resumes_them(ablation, tmp_path):
    args = [SCRIPT, str(ablation), "--run", "--jobs", "1", "--rows", "all", "train.steps=400", "eval.every=400"]
    log = tmp_path / "runs/tiny/all/seed_1"
    with subprocess.Popen(
        [sys.executable, REPOSITORY / args[0], *args[1:]],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        deadline = time.monotonic() + 120
        while len(read_metrics(log)) < 20 and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=120)
    assert "row all, seed 1: stopped after" in output
    stopped_at = read_metrics(log)[-1]["step"]
    assert stopped_at < 400
    result = run(*args, cwd=tmp_path)
    assert result.returncode == 0 and "row all, seed 1: finished" in result.stdout
    assert f"at step {stopped_at}" in (log / "log.txt").read_text()
