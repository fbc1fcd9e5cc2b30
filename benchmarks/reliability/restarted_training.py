"""Run a training under torchrun, which restarts it after a kill. Rank 0 prints the time of events, such as the end of a step."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmarks.common.processes import CPU_ENVIRONMENT, kill_tree, make_environment

TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
# runs pretrain/run.py; rank 0 prints a line after each event: the name of the event, the time, and a step or a duration
TRAIN = """
import os, time
def mark(event, value=""):
    if os.environ["RANK"] == "0":
        print(f"mark {event} {time.time():.3f} {value}", flush=True)
mark("python")
import pretrain.run, pretrain.trainer.trainer as trainer, xlpre.training.startup as startup
from xlpre.common.cli_main import run_main
mark("imported")
def mark_calls(owner, name, event, step=False):
    original = getattr(owner, name)
    def marked(*args, **kwargs):
        start = time.time()
        result = original(*args, **kwargs)
        mark(event, args[0].progress.step if step else f"{time.time() - start:.3f}")
        return result
    setattr(owner, name, marked)
mark_calls(trainer.Trainer, "end_step", "step", step=True)
mark_calls(trainer.Trainer, "save", "saving")
mark_calls(trainer.Trainer, "_publish", "saved")
mark_calls(startup, "init_process_group", "joined")
mark_calls(trainer.Trainer, "__init__", "built")
run_main(pretrain.run.main)
"""
MARK = re.compile(r"mark (\w+) ([\d.]+) ?([\d.]*)")


class Training:
    """A torchrun process with two workers, and the events that its rank 0 has printed.

    Args:
        args: arguments of pretrain/run.py.
        restarts: maximum number of restarts.

    Attributes:
        marks: events other than steps, as (name, time, duration in seconds).
        steps: finished steps, as (step, time).
        other_lines: lines of the output that are not events.
    """

    def __init__(self, args: Sequence[str], restarts: int) -> None:
        launcher = [TORCHRUN, "--standalone", "--nproc-per-node", "2", "--max-restarts", str(restarts), "--no-python"]
        self.marks: list[tuple[str, float, float]] = []
        self.steps: list[tuple[int, float]] = []
        self.other_lines: list[str] = []
        self._process = subprocess.Popen(
            [*launcher, sys.executable, "-c", TRAIN, *args],
            env=make_environment(**CPU_ENVIRONMENT, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read_output, daemon=True)
        self._reader.start()

    def workers(self) -> list[psutil.Process]:
        """Return the training processes that are alive."""
        return [p for p in psutil.Process(self._process.pid).children() if p.status() != psutil.STATUS_ZOMBIE]

    def wait(self, timeout: float) -> int:
        """Wait until torchrun has ended. Returns its exit status."""
        status = self._process.wait(timeout)
        self._reader.join()
        return status

    @property
    def has_ended(self) -> bool:
        """True if torchrun has ended."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """Kill torchrun and its workers, if they are running."""
        if not self.has_ended:
            kill_tree(self._process)

    def _read_output(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            match = MARK.match(line)
            if match and match[1] == "step":
                self.steps.append((int(match[3]), float(match[2])))
            elif match:
                self.marks.append((match[1], float(match[2]), float(match[3] or 0)))
            else:
                self.other_lines.append(line)


def kill_worker(training: Training, rng: random.Random) -> tuple[float, float]:
    """Kill a random worker. Returns the time of the kill, and the time at which the other worker had ended, too."""
    victim, other = rng.sample(training.workers(), 2)
    kill_time = time.time()
    victim.kill()
    while other.is_running() and other.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.02)
    return kill_time, time.time()


def wait_for_first_step(training: Training, since: float) -> tuple[int, float]:
    """Wait until the training has started after the time `since` and finished a step. Returns that step and its time."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and not training.has_ended:
        built = [when for event, when, _ in training.marks if event == "built" and when > since]
        for step, when in training.steps:
            if built and when > built[-1]:
                return step, when
        time.sleep(0.05)
    raise RuntimeError(
        "The training ended, or finished no step within 300 s. Its last output:\n" + "".join(training.other_lines[-60:])
    )
