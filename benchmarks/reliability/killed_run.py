"""A training with two processes that is to be killed: how a start of it goes, and what it leaves in its folder."""

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
from xlpre.training.metrics import read_metrics

FAULTY = REPOSITORY / "tests" / "integration" / "faulty.py"
PATIENCE_SECONDS = 60
COMPARED = ("loss", "grad_norm", "lr", "skipped_steps", "tokens", "val_loss", "val_accuracy")


@dataclass(frozen=True)
class Started:
    """How a start went."""

    statuses: tuple[int, ...]
    went_on_from: int | None  # None: it did not come so far
    killed_at: int | None
    first_update_seconds: float | None
    hung: bool
    said: str

    @property
    def last_words(self) -> str:
        """The end of what was said."""
        return " / ".join(self.said.split("\n")[-3:])[-300:]


def start(words: Sequence[str], fault: dict, folder: Path) -> Started:
    """Start both processes, as SLURM would, and wait until they have ended."""
    job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    variables = make_environment(**CPU_ENVIRONMENT, **job, FAULT=json.dumps(fault))
    errors, group, processes = folder / "stderr.txt", 0, []
    since = time.monotonic()
    with open(errors, "w") as stderr:
        for rank in (0, 1):
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(FAULTY), *words],
                    env={**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=subprocess.DEVNULL if rank else subprocess.PIPE,
                    stderr=stderr,
                    text=True,
                    preexec_fn=lambda: os.setpgid(0, group),  # noqa: B023, PLW1509 - one group, for both to be killed at once
                )
            )
            group = processes[0].pid
    said, first_update = [], None
    watch = threading.Timer(600, os.killpg, (group, signal.SIGKILL))
    watch.start()
    for line in processes[0].stdout:
        said.append(line)
        if first_update is None and re.match(r"step [\d,]+: loss", line):
            first_update = time.monotonic() - since
    watch.cancel()
    hung = False
    for process in processes:
        try:
            process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            hung = True
            process.kill()
            process.wait()
    text, complaints = "".join(said), errors.read_text("utf-8")
    opened = re.search(r"goes on from \S+ at step ([\d,]+)", text)
    went_on_from = int(opened[1].replace(",", "")) if opened else 0 if "parameters (" in text else None
    killed = re.search(r"^fault: \S+ in \S+ at step (\d+)", complaints, re.MULTILINE)
    return Started(
        tuple(process.returncode for process in processes),
        went_on_from,
        int(killed[1]) if killed else None,
        first_update,
        hung,
        (text + complaints).strip(),
    )


def numbers(run_dir: Path) -> dict[tuple[int, bool], list]:
    """What is promised to be equal, of each step and of each measurement."""
    lines = read_metrics(run_dir)
    found = {(line["step"], "loss" in line): [line.get(name) for name in COMPARED] for line in lines}
    assert len(found) == len(lines), f"{run_dir}/metrics.jsonl has a step twice"
    return found


def newest_on_disk(run_dir: Path) -> int:
    """The step of the newest checkpoint that is whole; 0 if there is none."""
    found = checkpoint.list_complete(run_dir / "checkpoints")
    return checkpoint.read_manifest(found[-1])["step"] if found else 0


def names_in(run_dir: Path) -> set[str]:
    """Of everything but TensorBoard's files, of which every start writes one."""
    paths = (path.relative_to(run_dir) for path in run_dir.rglob("*"))
    return {str(path) for path in paths if path.parts[0] != "tensorboard"}


def differing(one: Path, other: Path) -> list[str]:
    """Of the tensors' files of two runs' last checkpoints, those that are not the same to the last bit."""
    folders = [checkpoint.list_complete(run / "checkpoints")[-1] for run in (one, other)]
    names = [{str(path.relative_to(folder)) for path in folder.rglob("*.safetensors")} for folder in folders]
    shared = names[0] & names[1]
    unequal = {name for name in shared if (folders[0] / name).read_bytes() != (folders[1] / name).read_bytes()}
    return sorted(unequal | (names[0] ^ names[1]))
