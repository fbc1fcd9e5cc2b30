"""pretrain/slurm.sh with stubs of `srun` and `scontrol`: time limits, crashes and requeueing."""

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.integration.clusters import LONGER, end, losses, read_until, start
from tests.integration.conftest import environment
from xlpre.training.distributed import free_port

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
for n in map(str, range(2)):
    step = {{"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}}
    tasks.append(subprocess.Popen(command, env={{**os.environ, **step, "SLURM_PROCID": n, "SLURM_LOCALID": n}}))
open(os.environ["TASKS"], "w").write(" ".join(str(task.pid) for task in tasks))
signal.signal(signal.SIGTERM, lambda *_: [task.kill() for task in tasks])  # as srun: "forcing job termination"
statuses = [task.wait() for task in tasks]
sys.exit(max(128 - status if status < 0 else status for status in statuses))
"""
SCONTROL = """#!/bin/bash
case "$1" in
show) echo 127.0.0.1 ;;
requeue) echo "$2" >> "$REQUEUED" ;;
esac
"""
SCANCEL = """#!/bin/bash
[ "$1 $2" = "--signal=TERM $SLURM_JOB_ID" ] && [ -f "$TASKS" ] && kill -TERM $(cat "$TASKS")
"""


class Slurm:
    """Batch jobs of one node with two tasks."""

    def __init__(self, folder: Path) -> None:
        self._queue, self.jobs = folder / "requeued", []
        binaries = folder / "slurm"
        binaries.mkdir()
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("scancel", SCANCEL)):
            (binaries / name).write_text(text)
            (binaries / name).chmod(0o755)
        job = {"SLURM_JOB_ID": str(free_port()), "SLURM_JOB_NODELIST": "n[1-1]", "REQUEUED": str(self._queue)}
        tasks = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "TASKS": str(folder / "tasks")}
        self._environment = {**job, **tasks, "PATH": f"{binaries}{os.pathsep}{environment()['PATH']}"}

    def start(self, args, **variables: str):
        self.jobs.append(start(["bash", "pretrain/slurm.sh", *args], **self._environment, **variables))
        return self.jobs[-1]

    def requeued(self) -> int:
        return len(self._queue.read_text().splitlines()) if self._queue.exists() else 0


@pytest.fixture
def slurm(tmp_path):
    cluster = Slurm(tmp_path)
    yield cluster
    end(*cluster.jobs)


@pytest.mark.long
@pytest.mark.xdist_group("uninterrupted")  # on one worker, which trains the uninterrupted run once
def test_a_job_at_its_time_limit_saves_requeues_and_finishes_with_equal_losses(
    make_args, tmp_path, slurm, uninterrupted_losses
):
    job = slurm.start(make_args("stopped", **LONGER))
    output = read_until(job, "step 1:")
    job.send_signal(signal.SIGUSR1)
    output += job.communicate(timeout=60)[0]
    assert job.returncode == 0 and "and saved" in output and slurm.requeued() == 1, output
    stopped_at = max(losses(tmp_path / "stopped"))
    assert 1 <= stopped_at < LONGER["train__steps"]
    job = slurm.start(make_args("stopped", **LONGER), SLURM_RESTART_COUNT="1")
    output = job.communicate(timeout=90)[0]
    assert job.returncode == 0 and f"at step {stopped_at}" in output and slurm.requeued() == 1, output
    assert losses(tmp_path / "stopped") == pytest.approx(uninterrupted_losses, rel=1e-5)


@pytest.mark.long
def test_a_finished_cancelled_or_invalid_job_is_not_requeued(make_args, tmp_path, slurm):
    job = slurm.start(make_args("done", train__steps=3))
    output = job.communicate(timeout=90)[0]
    assert job.returncode == 0 and "finished at step 3" in output, output

    job = slurm.start(make_args("wrong", train__global_batch_size=3))
    output = job.communicate(timeout=90)[0]
    assert job.returncode == 2 and output.count("error: ") == 1 and "train.global_batch_size=3" in output, output

    job = slurm.start(make_args("cancelled", train__steps=100000))
    output = read_until(job, "step 5:")
    job.terminate()
    output += job.communicate(timeout=60)[0]
    assert job.returncode == 0 and "and saved" in output, output
    assert slurm.requeued() == 0


def test_a_crashing_job_is_restarted_then_requeued_a_limited_number_of_times(slurm):
    for requeues_so_far, requeued in ((0, 1), (2, 1)):
        job = slurm.start([], SRUN_STATUS="139", SLURM_RESTART_COUNT=str(requeues_so_far), XLPRE_REQUEUES="2")
        output = job.communicate(timeout=60)[0]
        assert output.count("ended with status 139") == 3 and slurm.requeued() == requeued, output
    assert job.returncode == 139


def test_a_job_that_cannot_save_in_time_is_requeued(slurm):
    job = slurm.start([], SRUN_HANGS="yes", XLPRE_SAVE_SECONDS="1")
    output = read_until(job, "hangs")
    job.send_signal(signal.SIGUSR1)
    output += job.communicate(timeout=30)[0]
    assert slurm.requeued() == 1, output
