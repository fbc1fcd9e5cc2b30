"""Faults of real machines are reported in one sentence, and nothing that was saved is lost."""

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
from tests.integration.conftest import REPOSITORY, call, deepspeed_launcher, environment, run, run_together
from xlpre.conversion.model_folder import load_folder, save_folder
from xlpre.training import checkpoint
from xlpre.training.metrics_writer import read_metrics

SCRIPT = "pretrain/run.py"
FAULTY = "tests/integration/faulty.py"
STAGE = "deepspeed.zero_optimization.stage"


def training_processes(launcher) -> list[psutil.Process]:
    children = psutil.Process(launcher.pid).children(recursive=True)
    commands = {p: " ".join(p.cmdline()) for p in children}
    return [p for p, command in commands.items() if "run.py" in command and "launcher" not in command]


def start_two(args, wait_for="step 9:"):
    command = [*deepspeed_launcher(2), str(REPOSITORY / SCRIPT), *args]
    launcher = subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    lines = []
    for line in launcher.stdout:
        lines.append(line)
        if wait_for in line:
            return launcher, lines
    kill_all(launcher)
    raise AssertionError("".join(lines))


def kill_all(launcher):
    os.killpg(launcher.pid, signal.SIGKILL)
    launcher.wait()


@pytest.mark.parametrize("number", [signal.SIGSTOP, pytest.param(signal.SIGKILL, marks=pytest.mark.long)])
def test_a_process_that_hangs_or_dies_ends_the_job_in_bounded_time(make_args, tmp_path, number):
    args = make_args("lost", train__steps=100000, train__save_every=4, train__timeout_minutes=0.1)
    launcher, lines = start_two(args)
    try:
        other, victim = sorted(training_processes(launcher), key=lambda process: process.pid)
        victim.send_signal(number)
        psutil.wait_procs([other], timeout=60)  # a zombie counts as gone
        assert not other.is_running() or other.status() == psutil.STATUS_ZOMBIE
        if victim.is_running():
            victim.kill()
        lines.append(launcher.communicate(timeout=60)[0])
        assert launcher.returncode == 3 if number == signal.SIGSTOP else launcher.returncode
    finally:
        if launcher.poll() is None:
            kill_all(launcher)
    if number == signal.SIGSTOP:
        assert "lost the connection" in "".join(lines), "".join(lines)[-2000:]
    again = call(SCRIPT, *args, "--dry-run")
    assert "# resumes from" in again.stdout, again.stdout + again.stderr


def read_until(word, descriptor):
    """Read the output until `word`, then close the reading end."""
    output = b""
    while word not in output:
        output += os.read(descriptor, 4096)
    os.close(descriptor)


def test_a_training_saves_when_its_terminal_is_closed(make_args, tmp_path):
    process, terminal = pty.fork()
    if not process:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        command = [sys.executable, str(REPOSITORY / SCRIPT), *make_args("closed", train__steps=100000)]
        os.execve(command[0], command, environment())
    read_until(b"step 3:", terminal)
    assert os.waitpid(process, 0)[1] == 0
    step = max(line["step"] for line in read_metrics(tmp_path / "closed"))
    assert [
        checkpoint.read_manifest(path)["step"] for path in checkpoint.list_complete(tmp_path / "closed" / "checkpoints")
    ] == [step]


def test_a_training_saves_when_the_reader_of_its_output_ends(make_args, tmp_path):
    command = [sys.executable, str(REPOSITORY / SCRIPT), *make_args("broken", train__steps=100000)]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert any(line.startswith("step 3:") for line in process.stdout)
            process.stdout.close()
            assert process.wait(60) == 0
        finally:
            process.kill()
    step = max(line["step"] for line in read_metrics(tmp_path / "broken"))
    (saved,) = checkpoint.list_complete(tmp_path / "broken" / "checkpoints")
    assert checkpoint.read_manifest(saved)["step"] == step


def test_infinite_gradients_stop_the_run_with_a_dump_and_a_replay_command(make_args, tmp_path):
    assert run(SCRIPT, *make_args("first", train__steps=2)).returncode == 0
    folder = load_folder(tmp_path / "first" / "model")
    folder.weights["backbone.word_embedding.weight"][100:] = 3e38
    save_folder(tmp_path / "large", folder)
    done = run(SCRIPT, *make_args("second", init_from=tmp_path / "large", train__max_skipped_steps=5))
    assert done.returncode == 2 and "5 steps in a row, up to step 5 were not finite" in done.stderr, done.stderr
    assert not (tmp_path / "second" / "checkpoints").exists()
    lines = [line for line in read_metrics(tmp_path / "second") if "skipped_steps" in line]
    assert [line["skipped_steps"] for line in lines] == [1, 2, 3, 4]
    dump = tmp_path / "second" / "nonfinite" / "step_00000005"
    assert f"`python pretrain/replay.py {dump}`" in done.stderr
    again = run("pretrain/replay.py", dump)
    assert again.returncode == 0 and "the output of backbone.layers.0.attention" in again.stdout.splitlines()[-1]


def test_infinite_weights_stop_all_processes_and_are_not_saved(make_args, tmp_path):
    args = make_args("spoilt", optim__lr=3e38, schedule__decay="constant", train__save_every=1, **{STAGE: 3})
    done = run_together(2, SCRIPT, *args)
    assert done.returncode == 2 and done.stderr.count("error: ") == 1, done.stderr
    assert "the weights are not finite after step 1 (" in done.stderr and "Lower optim.lr" in done.stderr
    assert not [path.name for path in (tmp_path / "spoilt").iterdir() if path.name in ("model", "best", "checkpoints")]


NONFINITE = {
    "stage0_nan": {STAGE: 0},
    "stage1_inf": {STAGE: 1},
    "stage2_inf_gradient": {STAGE: 2},
    "stage3_nan": {STAGE: 3},
    "stage1_nan_memory": {STAGE: 1},
    "stage0_inf_gradient": {STAGE: 0},
    **({"bf16_nan": {STAGE: 1, "train__precision": "bf16"}} if has_bf16() else {}),
}


def test_a_nonfinite_value_of_one_process_is_skipped_by_all_in_every_stage(make_args, tmp_path):
    jobs = [make_args(name, **case, train__steps=10, train__micro_batch_size=1) for name, case in NONFINITE.items()]
    kinds = [name.partition("_")[2] for name in NONFINITE]
    fault = {"phase": "loss", "steps": [3, 4], "process": 1, "each": kinds}
    done = run_together(2, FAULTY, json.dumps(jobs), fault=fault)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    for name in NONFINITE:
        lines = [line for line in read_metrics(tmp_path / name) if "skipped_steps" in line]
        # a memory is read by the next window, and then reset
        expected = [0, 0, 0, 0, 1, 1] if name.endswith("memory") else [0, 0, 0, 1, 2, 2]
        assert [line["skipped_steps"] for line in lines[:6]] == expected and lines[-1]["skipped_steps"] == expected[
            -1
        ], name
        assert all(line["loss"] is not None for line in lines[5:]), name
        (last,) = checkpoint.list_complete(tmp_path / name / "checkpoints")
        assert checkpoint.read_manifest(last)["counters"]["updates"] == 10 - expected[-1]


def test_a_full_disk_is_reported_and_the_previous_checkpoint_is_valid(make_args, tmp_path):
    args = make_args(
        "full", train__save_every=4, train__steps=12, schedule__decay="constant", train__max_failed_saves=1
    )
    fault = {"phase": "writing", "do": "ENOSPC", "steps": [6, 99], "process": 1}
    done = run_together(2, FAULTY, *args, fault=fault)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "step_00000008 could not be written (process 1: [Errno 28] No space left on device)" in done.stderr
    assert "latest valid checkpoint is step_00000004. Free disk space" in done.stderr
    assert [path.name for path in (tmp_path / "full" / "checkpoints").iterdir()] == ["step_00000004"]
    again = run(SCRIPT, *args)  # on one process
    assert again.returncode == 0 and "at step 4" in again.stdout, again.stdout + again.stderr


def test_a_store_that_changed_after_the_start_is_refused(make_args, store, tmp_path):
    shutil.copytree(store.path, tmp_path / "store")
    args = make_args("changed", data__store_dir=tmp_path / "store")
    assert run(SCRIPT, *args, "train.steps=2").returncode == 0
    largest = max((tmp_path / "store").iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    done = call(SCRIPT, *args)
    assert done.returncode == 2 and str(tmp_path / "store") in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1


def test_a_run_survives_a_file_system_that_fails_for_a_while(make_args, tmp_path):
    settings = {"train__save_every": 3, "train__steps": 12, "train__max_failed_saves": 3, "model__dropout": 0.1}
    fault = {"phase": "writing", "do": "EIO", "steps": [6, 11], "process": 1}  # the saves of steps 6 and 9
    done = run_together(2, FAULTY, *make_args("flaky", **settings), fault=fault)
    assert done.returncode == 0 and "finished at step 12" in done.stdout, done.stderr
    warnings = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 2 and all("(process 1: [Errno 5] Input/output error)" in line for line in warnings)
    assert "The latest valid checkpoint is step_00000003. Training continues" in warnings[1]
    assert [path.name for path in sorted((tmp_path / "flaky" / "checkpoints").iterdir())] == [
        "step_00000003",
        "step_00000012",
    ]


def test_a_last_save_that_fails_ends_the_run_with_the_status_that_is_retried(make_args, tmp_path):
    args = make_args("last", train__save_every=4, train__steps=8, schedule__decay="constant")
    fault = {"phase": "writing", "do": "ESTALE", "steps": [6, 99], "process": 0}
    done = run(FAULTY, *args, fault=fault)
    assert done.returncode == 3 and done.stderr.count("error: ") == 1 and "finished" not in done.stdout, done.stderr
    assert "step_00000008 could not be written" in done.stderr and "run the same command again" in done.stderr
    assert [path.name for path in (tmp_path / "last" / "checkpoints").iterdir()] == ["step_00000004"]
    assert run(SCRIPT, *args).returncode == 0


@pytest.mark.long
def test_a_kill_during_saving_loses_only_the_steps_since_the_last_checkpoint(make_args, tmp_path):
    settings = {"train__save_every": 2, "train__keep_last_checkpoints": 1, "train__steps": 12, "model__dropout": 0.1}
    whole = run(SCRIPT, *make_args("whole", **settings))
    assert whole.returncode == 0, whole.stderr
    for number, phase in enumerate(("manifest", "removing")):
        fault = {"phase": phase, "steps": [2 * number + 3, 99], "process": 0}
        assert run(FAULTY, *make_args("killed", **settings), fault=fault).returncode == -signal.SIGKILL
    last = run(SCRIPT, *make_args("killed", **settings))
    assert last.returncode == 0 and "resumes from" in last.stdout, last.stdout + last.stderr
    numbers = [
        [(x["step"], x["loss"], x["grad_norm"]) for x in read_metrics(tmp_path / name) if "loss" in x]
        for name in ("whole", "killed")
    ]
    assert numbers[0] == numbers[1] and len(numbers[0]) == 12
    assert [path.name for path in (tmp_path / "killed" / "checkpoints").iterdir()] == ["step_00000012"]
