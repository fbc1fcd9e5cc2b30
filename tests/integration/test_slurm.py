"""Batch jobs whose time ends or whose machine is taken away, under a SLURM of straw."""

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

    def start(self, args, **more: str):
        self.jobs.append(start(["bash", "pretrain/slurm.sh", *args], **self._environment, **more))
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
    make_args, tmp_path, slurm, uninterrupted_losses
):
    job = slurm.start(make_args("stopped", **LONGER))
    said = read_until(job, "step 1:")
    job.send_signal(signal.SIGUSR1)
    said += job.communicate(timeout=60)[0]
    assert job.returncode == 0 and "and saved" in said and slurm.requeued() == 1, said
    stopped_at = max(losses(tmp_path / "stopped"))
    assert 1 <= stopped_at < LONGER["train__steps"]
    job = slurm.start(make_args("stopped", **LONGER), SLURM_RESTART_COUNT="1")
    said = job.communicate(timeout=90)[0]
    assert job.returncode == 0 and f"at step {stopped_at}" in said and slurm.requeued() == 1, said
    assert losses(tmp_path / "stopped") == pytest.approx(uninterrupted_losses, rel=1e-5)


@pytest.mark.long
def test_a_slurm_job_that_is_done_or_cancelled_or_has_a_wrong_setting_does_not_go_back_into_the_queue(
    make_args, tmp_path, slurm
):
    job = slurm.start(make_args("done", train__steps=3))
    said = job.communicate(timeout=90)[0]
    assert job.returncode == 0 and "finished at step 3" in said, said

    job = slurm.start(make_args("wrong", train__global_batch_size=3))
    said = job.communicate(timeout=90)[0]
    assert job.returncode == 2 and said.count("error: ") == 1 and "train.global_batch_size (3)" in said, said

    job = slurm.start(make_args("cancelled", train__steps=100000))
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
