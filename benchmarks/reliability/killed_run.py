"""Start a training run with two processes and an injected fault; read what the run folder contains afterwards."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.processes import CPU_ENVIRONMENT, REPOSITORY, make_environment
from xlpre.training import checkpoint
from xlpre.training.distributed import free_port
from xlpre.training.metrics_writer import read_metrics

FAULTY = REPOSITORY / "tests" / "integration" / "faulty.py"
PATIENCE_SECONDS = 60
COMPARED_METRICS = ("loss", "grad_norm", "lr", "skipped_steps", "tokens", "val_loss", "val_accuracy")


@dataclass(frozen=True)
class StartResult:
    """The outcome of a start of a training run.

    Attributes:
        statuses: exit statuses of the processes.
        resumed_from: step of the checkpoint that was loaded; 0 if there was no checkpoint; None if the start ended before loading.
        killed_at: step at which the fault killed a process, or None if it killed none.
        seconds_to_first_step: seconds from the start until the first step was finished, or None if no step was finished.
        hung: True if process 1 was still running PATIENCE_SECONDS after process 0 had ended.
        output: standard output of process 0, then standard error of both processes.
    """

    statuses: tuple[int, ...]
    resumed_from: int | None
    killed_at: int | None
    seconds_to_first_step: float | None
    hung: bool
    output: str

    @property
    def last_lines(self) -> str:
        """The last lines of the output."""
        return " / ".join(self.output.split("\n")[-3:])[-300:]


def start(args: Sequence[str], fault: dict, folder: Path) -> StartResult:
    """Start two training processes as SLURM does, and wait until they have ended.

    Args:
        args: settings of the training run.
        fault: fault that tests/integration/faulty.py injects; an empty dictionary injects none.
        folder: folder for the file that collects standard error.
    """
    job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    variables = make_environment(**CPU_ENVIRONMENT, **job, FAULT=json.dumps(fault))
    error_file, group, processes = folder / "stderr.txt", 0, []
    start_time = time.monotonic()
    with open(error_file, "w") as stderr:
        for rank in (0, 1):
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(FAULTY), *args],
                    env={**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=subprocess.DEVNULL if rank else subprocess.PIPE,
                    stderr=stderr,
                    text=True,
                    preexec_fn=lambda: os.setpgid(0, group),  # noqa: B023, PLW1509 - one group, to kill both at once
                )
            )
            group = processes[0].pid
    lines, seconds_to_first_step = [], None
    watchdog = threading.Timer(600, os.killpg, (group, signal.SIGKILL))
    watchdog.start()
    for line in processes[0].stdout:
        lines.append(line)
        if seconds_to_first_step is None and re.match(r"step [\d,]+: loss", line):
            seconds_to_first_step = time.monotonic() - start_time
    watchdog.cancel()
    hung = False
    for process in processes:
        try:
            process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            hung = True
            process.kill()
            process.wait()
    output, errors = "".join(lines), error_file.read_text("utf-8")
    resumed = re.search(r"resumes from \S+ at step ([\d,]+)", output)
    resumed_from = int(resumed[1].replace(",", "")) if resumed else 0 if "parameters (" in output else None
    killed = re.search(r"^fault: \S+ in \S+ at step (\d+)", errors, re.MULTILINE)
    return StartResult(
        statuses=tuple(process.returncode for process in processes),
        resumed_from=resumed_from,
        killed_at=int(killed[1]) if killed else None,
        seconds_to_first_step=seconds_to_first_step,
        hung=hung,
        output=(output + errors).strip(),
    )


def read_compared_metrics(run_dir: Path) -> dict[tuple[int, bool], list]:
    """Return the metrics that a kill must not change. The key is (step, True for a training line or False for an evaluation)."""
    lines = read_metrics(run_dir)
    metrics = {(line["step"], "loss" in line): [line.get(name) for name in COMPARED_METRICS] for line in lines}
    assert len(metrics) == len(lines), f"{run_dir}/metrics.jsonl contains a step twice"
    return metrics


def newest_checkpoint_step(run_dir: Path) -> int:
    """Return the step of the newest complete checkpoint; 0 if there is none."""
    complete = checkpoint.list_complete(run_dir / checkpoint.CHECKPOINTS_DIR)
    return checkpoint.read_manifest(complete[-1])["step"] if complete else 0


def list_files(run_dir: Path) -> set[str]:
    """Return all paths in the run folder except TensorBoard's, because each start adds a file there."""
    paths = (path.relative_to(run_dir) for path in run_dir.rglob("*"))
    return {str(path) for path in paths if path.parts[0] != "tensorboard"}


def differing_tensors(run_dir: Path, other_run_dir: Path) -> list[str]:
    """Return the tensor files that differ between the last checkpoints of two runs, or are in one of them only."""
    folders = [checkpoint.list_complete(run / checkpoint.CHECKPOINTS_DIR)[-1] for run in (run_dir, other_run_dir)]
    names = [{str(path.relative_to(folder)) for path in folder.rglob("*.safetensors")} for folder in folders]
    shared = names[0] & names[1]
    differing = {name for name in shared if (folders[0] / name).read_bytes() != (folders[1] / name).read_bytes()}
    return sorted(differing | (names[0] ^ names[1]))
