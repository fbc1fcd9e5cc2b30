"""Several machines, and machines that are taken away; on one machine, with agents and a SLURM of straw."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.integration.conftest import REPOSITORY, deepspeed_launcher, environment, launch, run_together, tiny_words
from xlpre.training.distributed import free_port
from xlpre.training.metrics import read_metrics

SCRIPT = "pretrain/run.py"
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
TWO = (TORCHRUN, "--standalone", "--nproc-per-node", "2")
LONGER = {"train__steps": 150, "eval__every": 1000}  # than it takes to stop

SRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys, time
if "SRUN_STATUS" in os.environ:
    sys.exit(int(os.environ["SRUN_STATUS"]))
if "SRUN_HANGS" in os.environ:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("hangs", flush=True)
    time.sleep(60)
command = sys.argv[1:]
while command[0].startswith("-"):
    del command[0]
tasks = []
for n in map(str, range(int(os.environ["SLURM_NTASKS"]))):
    tasks.append(subprocess.Popen(command, env={{**os.environ, "SLURM_PROCID": n, "SLURM_LOCALID": n}}))
signal.signal(signal.SIGTERM, lambda *_: [task.terminate() for task in tasks])
ended = [task.wait() for task in tasks]
sys.exit(max(128 - status if status < 0 else status for status in ended))
"""
SCONTROL = """#!/bin/bash
case "$1" in
show) echo 127.0.0.1 ;;
requeue) echo "$2" >> "$REQUEUED" ;;
esac
"""


def losses(folder) -> dict[int, float]:
    """By step; a step that was made again has its last value."""
    return {line["step"]: line["loss"] for line in read_metrics(folder) if "loss" in line}


def start(command, **more):
    return subprocess.Popen(
        [*map(str, command)],
        env=environment() | more,
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def end(*processes):
    """Whatever is left of what was started, its children too."""
    for process in processes:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
        process.communicate()


def read_until(process, sign) -> str:
    said = ""
    for line in process.stdout:
        said += line
        if sign in line:
            return said
    raise AssertionError(said)


def training_processes(launcher) -> list[psutil.Process]:
    """The processes of `pretrain/run.py`, without what started them."""
    found = [(p, p.cmdline()) for p in psutil.Process(launcher.pid).children(recursive=True)]
    return [p for p, line in found if "python" in line[0] and any(w.endswith(SCRIPT) for w in line[1:3])]


@pytest.fixture(scope="module")
def uninterrupted(store, tmp_path_factory) -> dict[int, float]:
    """The losses of a run of LONGER that nothing happens to."""
    folder = tmp_path_factory.mktemp("whole")
    done = run_together(2, SCRIPT, *tiny_words(store, folder, "whole", **LONGER))
    assert done.returncode == 0, done.stderr
    return losses(folder / "whole")


class Slurm:
    """A batch job of one node with two tasks."""

    def __init__(self, folder: Path) -> None:
        self._queue, self.jobs = folder / "requeued", []
        binaries = folder / "slurm"
        binaries.mkdir()
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
            (binaries / name).write_text(text)
            (binaries / name).chmod(0o755)
        job = {"SLURM_JOB_ID": str(free_port()), "SLURM_JOB_NODELIST": "n[1-1]", "REQUEUED": str(self._queue)}
        tasks = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}
        self._environment = {**job, **tasks, "PATH": f"{binaries}{os.pathsep}{environment()['PATH']}"}

    def start(self, words, **more: str):
        self.jobs.append(start(["bash", "pretrain/slurm.sh", *words], **self._environment, **more))
        return self.jobs[-1]

    def requeued(self) -> int:
        return len(self._queue.read_text().splitlines()) if self._queue.exists() else 0


@pytest.fixture
def slurm(tmp_path):
    cluster = Slurm(tmp_path)
    yield cluster
    end(*cluster.jobs)


@pytest.mark.long
def test_a_slurm_job_whose_time_ends_saves_goes_back_into_the_queue_and_then_finishes_as_if_nothing_had_been(
    words, tmp_path, slurm, uninterrupted
):
    job = slurm.start(words("stopped", **LONGER))
    said = read_until(job, "step 1:")
    job.send_signal(signal.SIGUSR1)
    said += job.communicate(timeout=60)[0]
    assert job.returncode == 0 and "and saved" in said and slurm.requeued() == 1, said
    stopped_at = max(losses(tmp_path / "stopped"))
    assert 1 <= stopped_at < LONGER["train__steps"]
    job = slurm.start(words("stopped", **LONGER), SLURM_RESTART_COUNT="1")
    said = job.communicate(timeout=90)[0]
    assert job.returncode == 0 and f"at step {stopped_at}" in said and slurm.requeued() == 1, said
    assert losses(tmp_path / "stopped") == pytest.approx(uninterrupted, rel=1e-5)


@pytest.mark.long
def test_a_slurm_job_that_is_done_or_cancelled_or_has_a_wrong_setting_does_not_go_back_into_the_queue(
    words, tmp_path, slurm
):
    job = slurm.start(words("done", train__steps=3))
    said = job.communicate(timeout=90)[0]
    assert job.returncode == 0 and "finished at step 3" in said, said

    job = slurm.start(words("wrong", train__batch_size=3))
    said = job.communicate(timeout=90)[0]
    assert job.returncode == 2 and said.count("error: ") == 1 and "train.batch_size (3)" in said, said

    job = slurm.start(words("cancelled", train__steps=100000))
    said = read_until(job, "step 5:")
    job.terminate()
    said += job.communicate(timeout=60)[0]
    assert job.returncode == 0 and "and saved" in said, said
    assert slurm.requeued() == 0


def test_a_slurm_job_that_crashes_is_tried_again_then_requeued_but_not_for_ever(slurm):
    for requeues_so_far, requeued in ((0, 1), (2, 1)):
        job = slurm.start([], SRUN_STATUS="139", SLURM_RESTART_COUNT=str(requeues_so_far), XLPRE_REQUEUES="2")
        said = job.communicate(timeout=60)[0]
        assert said.count("ended with status 139") == 3 and slurm.requeued() == requeued, said
    assert job.returncode == 139


def test_a_slurm_job_that_cannot_save_in_time_goes_back_into_the_queue_nevertheless(slurm):
    job = slurm.start([], SRUN_HANGS="yes", XLPRE_SAVE_SECONDS="1")
    said = read_until(job, "hangs")
    job.send_signal(signal.SIGUSR1)
    said += job.communicate(timeout=30)[0]
    assert slurm.requeued() == 1, said


@pytest.mark.long
def test_torchrun_goes_on_by_itself_after_one_of_its_processes_was_killed(words, tmp_path, uninterrupted):
    run_words = words("killed", train__save_every=4, **LONGER)
    command = [*TWO, "--max-restarts", 3, SCRIPT, *run_words]
    job = start(command, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    try:
        said = read_until(job, "step 6:")
        training_processes(job)[1].kill()
        said += job.communicate(timeout=90)[0]
    finally:
        end(job)
    assert job.returncode == 0 and "goes on from" in said and "warning: torchrun" not in said, said
    assert losses(tmp_path / "killed") == pytest.approx(uninterrupted, rel=1e-5)


@pytest.mark.long
def test_two_agents_of_one_process_each_train_as_one_machine_with_two(words, tmp_path):
    port = free_port()
    nodes = []
    for rank in (0, 1):
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "two"]
        command = [TORCHRUN, "--nnodes", 2, "--nproc-per-node", 1, *meeting, SCRIPT, *words("two", train__steps=6)]
        nodes.append(start(command))
    try:
        said = [node.communicate(timeout=120)[0] for node in nodes]
    finally:
        end(*nodes)
    assert [node.returncode for node in nodes] == [0, 0], said
    assert run_together(2, SCRIPT, *words("one", train__steps=6)).returncode == 0
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


@pytest.mark.long
def test_deepspeed_reads_a_file_of_hosts(words, tmp_path):
    (tmp_path / "machines").write_text("localhost slots=2\n")
    deepspeed, address = deepspeed_launcher(2)[0], ("--master_addr", "127.0.0.1", "--master_port", str(free_port()))
    launcher = (deepspeed, "-q", "--hostfile", str(tmp_path / "machines"), "--no_ssh_check", *address)
    done = launch(SCRIPT, *words("hosts", train__steps=6), launcher=launcher)
    assert done.returncode == 0 and "2 process(es)" in done.stdout, done.stdout + done.stderr
    assert len(losses(tmp_path / "hosts")) == 6


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_a_signal_to_one_training_process_stops_all_of_them_saved_and_its_launcher_ends_well(words, launcher):
    launchers = {
        "deepspeed": deepspeed_launcher(2),
        "torchrun": (*TWO, "--max-restarts", 3),
    }
    job = start([*launchers[launcher], SCRIPT, *words("one", train__steps=100000)])
    try:
        said = read_until(job, "step 5:")
        training_processes(job)[1].terminate()
        said += job.communicate(timeout=60)[0]
    finally:
        end(job)
    assert job.returncode == 0 and said.count("and saved") == 1, said
    assert ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in said) == (launcher == "torchrun")


@pytest.mark.long
def test_torchrun_asked_to_stop_lets_its_processes_save_and_ends_with_status_1(words):
    command = [*TWO, "--max-restarts", 3, "--shutdown-timeout", 600]
    job = start([*command, SCRIPT, *words("asked", train__steps=100000)])
    try:
        said = read_until(job, "step 5:")
        asked = time.monotonic()
        job.terminate()
        said += job.communicate(timeout=60)[0]
    finally:
        end(job)
    assert time.monotonic() - asked < 60
    assert job.returncode == 1 and said.count("and saved") == 1 and said.count("parameters (") == 1, said
