"""`pretrain/ablate.py --run`: parallel runs, failures, interruption."""

import json
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from pretrain.tools.ablation.measures import read_results
from pretrain.tools.ablation.plan import Ablation
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
    assert "difference from all" in result.stdout
    blocked.rmdir()
    written_at = (tmp_path / "runs/tiny/all/seed_1/metrics.jsonl").stat().st_mtime_ns
    result = run(*command, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "2 runs, 1 of them finished already" in result.stdout
    assert (tmp_path / "runs/tiny/all/seed_1/metrics.jsonl").stat().st_mtime_ns == written_at
    monkeypatch.chdir(tmp_path)
    results = read_results(Ablation(ablation, ["train.steps=10"]))
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


@pytest.fixture
def all_stages(ablation, tmp_path):
    """Return the content of an ablation that also evaluates and fine-tunes its rows."""
    (tmp_path / "pairs.jsonl").write_text('{"sentence_good": "Ba di ba.", "sentence_bad": "Ba ba di."}\n')
    (tmp_path / "held_out.txt").write_text("Ba be bi bo bu da de di do du.\n" * 40)
    (tmp_path / "words.csv").write_text("text,label\n" + "ba di,a\nbe du,b\n" * 8)
    (tmp_path / "task.yaml").write_text("task: classify\nwarmup_ratio: 0.5\nepochs: 9\n")
    columns = [
        "data.train=[words.csv]",
        "data.dev=[words.csv]",
        "data.text=[text]",
        "data.label=label",
        "data.max_seq_len=32",
    ]
    content = json.loads(ablation.read_text())
    content["common"] += ["train.steps=2", "eval.every=2"]
    content["evaluate"] = {
        "pairs": {"agreement": "pairs.jsonl"},
        "text": {"books": "held_out.txt --seq-len 16 --mem-len 0,8 --consistency 0"},
    }
    content["finetune"] = {
        "base": "task.yaml",
        "common": ["train.steps=2", "train.global_batch_size=4", "optim.lr=1e-3"],
        "seeds": 2,
        "tasks": {"topics": columns},
    }
    return content


@pytest.mark.long
def test_rows_are_pretrained_evaluated_and_fine_tuned_and_only_changed_stages_run_again(ablation, all_stages, tmp_path):
    content = all_stages
    ablation.write_text(json.dumps(content))
    command = (SCRIPT, ablation, "--run", "--jobs", "1")
    result = run(*command, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "8 runs, 0 of them finished already" in result.stdout
    records = [json.loads(line) for line in (tmp_path / "runs/tiny/results.jsonl").read_text().splitlines()]
    measures = ["validation loss", "agreement", "books, loss, memory 0", "books, loss, memory 8"]
    measures += ["topics, accuracy", "topics, matthews"]
    assert [(each["measure"], each["row"]) for each in records] == [
        (measure, row) for measure in measures for row in ("all", "no_memory")
    ]
    table = (tmp_path / "runs/tiny/table.md").read_text()
    assert "| books, loss, memory 8 | all |" in table and "topics, accuracy" in result.stdout
    result = run(*command, cwd=tmp_path)
    assert "8 runs, 8 of them finished already" in result.stdout, result.stdout
    content["evaluate"]["text"]["books"] += " --batch-size 4"
    ablation.write_text(json.dumps(content))
    result = run(*command, cwd=tmp_path)
    assert "8 runs, 6 of them finished already" in result.stdout and result.returncode == 0
    content["finetune"]["common"][-1] = "optim.lr=2e-3"
    content["finetune"]["common"] += ["train.timeout_minutes=30", "eval.batch_size=4"]
    ablation.write_text(json.dumps(content))
    result = run(*command, cwd=tmp_path)
    assert "8 runs, 6 of them finished already" in result.stdout and result.returncode == 0, result.stdout
    content["finetune"]["common"].append("train.timeout_minutes=40")  # does not change results
    content["common"].append("train.max_failed_saves=9")
    ablation.write_text(json.dumps(content))
    assert "8 runs, 8 of them finished already" in run(*command, cwd=tmp_path).stdout
    renamed = ablation.rename(tmp_path / "renamed.yaml")
    (tmp_path / "runs/tiny").rename(tmp_path / "runs/renamed")
    assert "8 runs, 8 of them finished already" in run(SCRIPT, renamed, *command[2:], cwd=tmp_path).stdout
    (tmp_path / "runs/renamed").rename(tmp_path / "runs/tiny")
    content["common"].append("train.steps=4")  # other weights
    ablation.write_text(json.dumps(content))
    result = run(*command, cwd=tmp_path)
    assert "8 runs, 0 of them finished already" in result.stdout and result.returncode == 0, result.stdout
    assert "8 runs, 8 of them finished already" in run(*command, cwd=tmp_path).stdout


@pytest.mark.long
def test_a_stage_is_not_started_if_the_pretraining_before_it_fails(ablation, tmp_path):
    (tmp_path / "pairs.jsonl").write_text('{"sentence_good": "Ba di ba.", "sentence_bad": "Ba ba di."}\n')
    content = json.loads(ablation.read_text())
    content["evaluate"] = {"pairs": {"agreement": "pairs.jsonl"}}
    ablation.write_text(json.dumps(content))
    (tmp_path / "runs/tiny/no_memory/seed_1/.lock").mkdir(parents=True)
    result = run(SCRIPT, ablation, "--run", "--jobs", "1", "train.steps=2", "eval.every=2", cwd=tmp_path)
    assert result.returncode == 2 and "1 of 4 runs failed" in result.stderr
    assert "not started, because a run before them is not finished: row no_memory, seed 1, agreement" in result.stdout
    assert re.search(r"row all, seed 1, agreement: finished after [\d:]+, \S+ % of the pairs", result.stdout)


# of each stage of the row `all`: a file that shows that it works, and its result
STAGES = {
    "": ("metrics.jsonl", "checkpoints/step_00000030/manifest.json"),
    ", agreement": ("evaluate/agreement/log.txt", "evaluate/agreement/pairs.json"),
    ", books": ("evaluate/books/log.txt", "evaluate/books/text.jsonl"),
    ", topics": ("finetune/topics/seed_1/metrics.jsonl", "finetune/topics/table.csv"),
}


def kill_in_stage(ablation, stage, tmp_path):
    """Start the ablation, and kill it once a stage works. Return when its commands have ended, too."""
    command = [sys.executable, REPOSITORY / SCRIPT, str(ablation), "--run", "--jobs", "1"]
    work, result = (tmp_path / "runs" / ablation.stem / "all/seed_1" / file for file in STAGES[stage])
    with subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert any(line.startswith(f"row all, seed 1{stage}: started") for line in process.stdout)
            deadline = time.monotonic() + 120
            while not work.exists() and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.02)
            assert work.exists() and not result.exists()
        finally:
            children = psutil.Process(process.pid).children(recursive=True)
            process.kill()
    _, running = psutil.wait_procs(children, timeout=60)
    assert not running


@pytest.mark.long
def test_killed_in_any_stage_an_ablation_resumes_to_the_same_results(ablation, all_stages, tmp_path):
    results = []
    for name in ("undisturbed", "killed"):
        path = ablation.with_name(f"{name}.yaml")
        content = {**all_stages, "rows": {"all": []}, "common": [*all_stages["common"], "train.steps=30"]}
        path.write_text(json.dumps(content))
        for stage in STAGES if name == "killed" else ():
            kill_in_stage(path, stage, tmp_path)
        result = run(SCRIPT, path, "--run", "--jobs", "1", cwd=tmp_path)
        assert result.returncode == 0, result.stdout + result.stderr
        results.append((tmp_path / f"runs/{name}/results.jsonl").read_text())
    assert results[0] == results[1] and results[0].count("\n") == 6
