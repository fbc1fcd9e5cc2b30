"""What goes wrong on real machines is said in a sentence, and loses nothing that was saved."""

import json
import os
import pty
import shutil
import signal
import subprocess
import sys

import psutil
import pytest

from tests.conftest import has_bf16
from tests.integration.conftest import REPOSITORY, deepspeed_launcher, environment, run, run_together
from xlpre.conversion.model_folder import load_folder, save_folder
from xlpre.training import checkpoint
from xlpre.training.metrics import read_metrics

SCRIPT = "pretrain/run.py"
FAULTY = "tests/integration/faulty.py"
STAGE = "deepspeed.zero_optimization.stage"


def processes_of(launcher) -> list[psutil.Process]:
    found = psutil.Process(launcher.pid).children(recursive=True)
    args = {p: " ".join(p.cmdline()) for p in found}
    return [p for p, line in args.items() if "run.py" in line and "launcher" not in line]


def start_two(args, wait_for="step 9:"):
    command = [*deepspeed_launcher(2), str(REPOSITORY / SCRIPT), *args]
    launcher = subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    said = []
    for line in launcher.stdout:
        said.append(line)
        if wait_for in line:
            return launcher, said
    raise AssertionError("".join(said))


def end(launcher):
    os.killpg(launcher.pid, signal.SIGKILL)
    launcher.wait()


@pytest.mark.parametrize("number", [signal.SIGSTOP, pytest.param(signal.SIGKILL, marks=pytest.mark.long)])
def test_a_process_that_hangs_or_dies_ends_the_job_in_bounded_time(make_args, tmp_path, number):
    run_words = make_args("lost", train__steps=100000, train__save_every=4, train__timeout_minutes=0.2)
    launcher, said = start_two(run_words)
    try:
        other, victim = sorted(processes_of(launcher), key=lambda process: process.pid)
        victim.send_signal(number)
        psutil.wait_procs([other], timeout=60)  # a zombie counts as gone
        assert not other.is_running() or other.status() == psutil.STATUS_ZOMBIE
        if victim.is_running():
            victim.kill()
        said += launcher.stdout.read()
        assert launcher.wait(30) != 0
    finally:
        if launcher.poll() is None:
            end(launcher)
    if number == signal.SIGSTOP:
        assert "lost another" in "".join(said), "".join(said)[-2000:]
    again = run(SCRIPT, *run_words, "--dry-run")
    assert "# goes on from" in again.stdout, again.stdout + again.stderr


def until(word, descriptor):
    """Read what is printed until `word`; then nobody reads any more."""
    said = b""
    while word not in said:
        said += os.read(descriptor, 4096)
    os.close(descriptor)


def test_a_training_whose_terminal_is_closed_saves(make_args, tmp_path):
    process, terminal = pty.fork()
    if not process:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        command = [sys.executable, str(REPOSITORY / SCRIPT), *make_args("closed", train__steps=100000)]
        os.execve(command[0], command, environment())
    until(b"step 3:", terminal)
    assert os.waitpid(process, 0)[1] == 0
    step = max(line["step"] for line in read_metrics(tmp_path / "closed"))
    assert [
        checkpoint.read_manifest(path)["step"] for path in checkpoint.list_complete(tmp_path / "closed" / "checkpoints")
    ] == [step]


def test_weights_too_large_for_numbers_stop_the_run_with_what_it_met_and_how_to_replay_it(make_args, tmp_path):
    assert run(SCRIPT, *make_args("first", train__steps=2)).returncode == 0
    folder = load_folder(tmp_path / "first" / "model")
    folder.weights["backbone.word_embedding.weight"][100:] = 3e38
    save_folder(tmp_path / "large", folder)
    done = run(SCRIPT, *make_args("second", init=tmp_path / "large", train__max_skipped_steps=5))
    assert done.returncode == 2 and "5 updates in a row, to step 5, were not finite" in done.stderr, done.stderr
    assert not (tmp_path / "second" / "checkpoints").exists()
    lines = [line for line in read_metrics(tmp_path / "second") if "skipped_steps" in line]
    assert [line["skipped_steps"] for line in lines] == [1, 2, 3, 4]
    dump = tmp_path / "second" / "nonfinite" / "step_00000004"
    assert f"`python pretrain/replay.py {dump}`" in done.stderr
    again = run("pretrain/replay.py", dump)
    assert again.returncode == 0 and "the output of backbone.layers.0.attention" in again.stdout.splitlines()[-1]


def test_weights_that_became_infinite_end_all_processes_and_are_not_saved(make_args, tmp_path):
    run_words = make_args("spoilt", optim__lr=3e38, schedule__decay="constant", train__save_every=1, **{STAGE: 3})
    done = run_together(2, SCRIPT, *run_words)
    assert done.returncode == 2 and done.stderr.count("error: ") == 1, done.stderr
    assert "the weights are not finite after step 1 (" in done.stderr and "lower optim.lr" in done.stderr
    assert not [path.name for path in (tmp_path / "spoilt").iterdir() if path.name in ("model", "best", "checkpoints")]


NOT_FINITE = {
    "stage0_nan": {STAGE: 0},
    "stage1_inf": {STAGE: 1},
    "stage2_inf_gradient": {STAGE: 2},
    "stage3_nan": {STAGE: 3},
    "stage1_nan_memory": {STAGE: 1},
    "stage0_inf_gradient": {STAGE: 0},
    **({"bf16_nan": {STAGE: 1, "train__precision": "bf16"}} if has_bf16() else {}),
}


def test_what_is_not_finite_on_one_process_is_skipped_by_all_and_counted_on_every_stage(make_args, tmp_path):
    jobs = [make_args(name, **case, train__steps=10, train__accumulation=2) for name, case in NOT_FINITE.items()]
    kinds = [name.partition("_")[2] for name in NOT_FINITE]
    fault = {"phase": "loss", "steps": [3, 4], "process": 1, "each": kinds}
    done = run_together(2, FAULTY, json.dumps(jobs), fault=fault)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    for name in NOT_FINITE:
        lines = [line for line in read_metrics(tmp_path / name) if "skipped_steps" in line]
        # a memory is met by the window after it, and begins anew after that
        expected = [0, 0, 0, 0, 1, 1] if name.endswith("memory") else [0, 0, 0, 1, 2, 2]
        assert [line["skipped_steps"] for line in lines[:6]] == expected and lines[-1]["skipped_steps"] == expected[
            -1
        ], name
        assert all(line["loss"] is not None for line in lines[5:]), name
        (last,) = checkpoint.list_complete(tmp_path / name / "checkpoints")
        assert checkpoint.read_manifest(last)["counters"]["updates"] == 10 - expected[-1]


def test_a_full_disk_while_saving_is_named_and_the_checkpoint_before_is_good(make_args, tmp_path):
    run_words = make_args("full", train__save_every=4, train__steps=12, schedule__decay="constant")
    fault = {"phase": "writing", "do": "full", "steps": [6, 99], "process": 1}
    done = run_together(2, FAULTY, *run_words, fault=fault)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "step_00000008 could not be written (process 1: [Errno 28] No space left on device)" in done.stderr
    assert "step_00000004 is good: make room" in done.stderr
    assert [path.name for path in (tmp_path / "full" / "checkpoints").iterdir()] == ["step_00000004"]
    again = run(SCRIPT, *run_words)  # on the one machine that is left
    assert again.returncode == 0 and "at step 4" in again.stdout, again.stdout + again.stderr


def test_a_store_that_changed_under_the_run_is_refused(make_args, store, tmp_path):
    shutil.copytree(store.path, tmp_path / "store")
    run_words = make_args("changed", data__store_dir=tmp_path / "store")
    assert run(SCRIPT, *run_words, "train.steps=2").returncode == 0
    largest = max((tmp_path / "store").iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    done = run(SCRIPT, *run_words)
    assert done.returncode == 2 and str(tmp_path / "store") in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.long
def test_kill_9_in_the_middle_of_saving_costs_no_more_than_the_steps_since(make_args, tmp_path):
    settings = {"train__save_every": 2, "train__keep_last_checkpoints": 1, "train__steps": 12, "model__dropout": 0.1}
    whole = run(SCRIPT, *make_args("whole", **settings))
    assert whole.returncode == 0, whole.stderr
    for number, phase in enumerate(("manifest", "removing")):
        fault = {"phase": phase, "steps": [2 * number + 3, 99], "process": 0}
        assert run(FAULTY, *make_args("killed", **settings), fault=fault).returncode == -signal.SIGKILL
    last = run(SCRIPT, *make_args("killed", **settings))
    assert last.returncode == 0 and "goes on from" in last.stdout, last.stdout + last.stderr
    numbers = [
        [(x["step"], x["loss"], x["grad_norm"]) for x in read_metrics(tmp_path / name) if "loss" in x]
        for name in ("whole", "killed")
    ]
    assert numbers[0] == numbers[1] and len(numbers[0]) == 12
    assert [path.name for path in (tmp_path / "killed" / "checkpoints").iterdir()] == ["step_00000012"]
