"""A training under torchrun that starts again by itself, whose process 0 says when it has come how far."""

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

from benchmarks.common.processes import CPU_ENVIRONMENT, make_environment, kill_tree

TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
# pretrain/run.py, whose process 0 says when it has come how far
TRAIN = """
import os, time
def mark(what, more=""):
    if os.environ["RANK"] == "0":
        print(f"mark {what} {time.time():.3f} {more}", flush=True)
mark("python")
import pretrain.trainer.trainer, pretrain.trainer.loop, pretrain.run
from xlpre.common.cli_main import run_main
mark("imported")
def after(owner, name, what, step=False):
    original = getattr(owner, name)
    def marked(*args, **settings):
        since = time.time()
        result = original(*args, **settings)
        mark(what, args[0].course.step if step else f"{time.time() - since:.3f}")
        return result
    setattr(owner, name, marked)
after(pretrain.trainer.trainer.Job, "end_update", "updated", step=True)
after(pretrain.trainer.trainer.Job, "save", "saving")
after(pretrain.trainer.trainer.Job, "_publish", "saved")
after(pretrain.trainer.trainer, "start_processes", "joined")
after(pretrain.trainer.loop, "Job", "built")
run_main(pretrain.run.main)
"""
MARK = re.compile(r"mark (\w+) ([\d.]+) ?([\d.]*)")


class Training:
    """A torchrun, and what its process 0 said so far."""

    def __init__(self, words: Sequence[str], restarts: int) -> None:
        launcher = [TORCHRUN, "--standalone", "--nproc-per-node", "2", "--max-restarts", str(restarts), "--no-python"]
        self.marks: list[tuple[str, float, float]] = []  # what, when, how many seconds it took
        self.updates: list[tuple[int, float]] = []  # step, when it was done
        self.rest: list[str] = []
        self._process = subprocess.Popen(
            [*launcher, sys.executable, "-c", TRAIN, *words],
            env=make_environment(**CPU_ENVIRONMENT, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def processes(self) -> list[psutil.Process]:
        """Those that train."""
        return [p for p in psutil.Process(self._process.pid).children() if p.status() != psutil.STATUS_ZOMBIE]

    def wait(self, timeout: float) -> int:
        """Until torchrun has ended; its status."""
        status = self._process.wait(timeout)
        self._reader.join()
        return status

    @property
    def ended(self) -> bool:
        """Whether it has, unasked perhaps."""
        return self._process.poll() is not None

    def end(self) -> None:
        """Kill what is left."""
        if not self.ended:
            kill_tree(self._process)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            found = MARK.match(line)
            if found and found[1] == "updated":
                self.updates.append((int(found[3]), float(found[2])))
            elif found:
                self.marks.append((found[1], float(found[2]), float(found[3] or 0)))
            else:
                self.rest.append(line)


def kill_one(training: Training, rng: random.Random) -> tuple[float, float]:
    """Kill one; when, and when the other had ended, too."""
    victim, other = rng.sample(training.processes(), 2)
    killed = time.time()
    victim.kill()
    while other.is_running() and other.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.02)
    return killed, time.time()


def first_update(training: Training, after: float) -> tuple[int, float]:
    """The first that is made by a start after the time `after`: its step, and when it was done. Waits for it."""
    until = time.monotonic() + 300
    while time.monotonic() < until and not training.ended:
        built = [when for what, when, _ in training.marks if what == "built" and when > after]
        for step, when in training.updates:
            if built and when > built[-1]:
                return step, when
        time.sleep(0.05)
    raise RuntimeError("it did not start again:\n" + "".join(training.rest[-60:]))
