"""Several commands at a time, each on its own share of the machine."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class Command:
    """A command to run to its end.

    Attributes:
        folder: its own; what it prints is added to log.txt there.
        command: a program that is installed beside this Python, or `python`, and its words.
        finished: whether there is nothing left to do.
    """

    folder: Path
    command: Sequence[str]
    finished: Callable[[], bool]


def run_all(errands: Sequence[Command], jobs: int | None = None, processes: int = 1) -> None:
    """Run what is not finished. Asked to stop (see asked_to_stop), it asks the commands, which save, and waits for them.

    However this process ends, killed or because nobody reads what it prints, the commands are asked to stop.

    Args:
        errands: all of them.
        jobs: how many side by side; each has an equal share of the cores, and its own GPUs where there are any. None: as many as
            there are GPUs, or cores, for their processes.
        processes: of a command, each with a GPU of its own where there are any.

    Raises:
        ValueError: there are too few GPUs; or some failed, and the others were run all the same.
    """
    gpus = _gpus()
    jobs = jobs or max(1, (len(gpus) or len(os.sched_getaffinity(0))) // processes)
    if gpus and jobs * processes > len(gpus):
        raise ValueError(
            f"--jobs ({jobs}) times {processes} process(es) each must be at most the number of GPUs ({len(gpus)}), of which each "
            "process has its own; take fewer"
        )
    waiting = [errand for errand in errands if not errand.finished()]
    print(f"{len(errands)} runs, {len(errands) - len(waiting)} of them finished already", flush=True)
    going: dict[int, tuple[Command, subprocess.Popen[bytes], float]] = {}
    failed: list[Path] = []
    told = False
    with asked_to_stop() as asked:
        while going or (waiting and not asked):
            for place in range(jobs):
                if waiting and place not in going and not asked:
                    errand = waiting.pop(0)
                    going[place] = (
                        errand,
                        _start(errand, place, jobs, gpus[place * processes :][:processes]),
                        time.monotonic(),
                    )
            if asked and not told:
                told = True
                for _, child, _ in going.values():
                    os.killpg(child.pid, signal.SIGTERM)
            time.sleep(0.2)
            for place, (errand, child, since) in list(going.items()):
                if child.poll() is not None:
                    del going[place]
                    status = (
                        0 if told and child.returncode == -signal.SIGTERM else child.returncode
                    )  # before it could save
                    failed += [errand.folder] if status else []
                    ending = _ending(errand, status)
                    print(f"{errand.folder}: {ending}, {time.monotonic() - since:.0f} s", flush=True)
    if failed:
        logs = ", ".join(str(folder / "log.txt") for folder in failed)
        raise ValueError(f"{len(failed)} of {len(errands)} runs failed, see {logs}")


def _gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES may name of what this process may use: numbers, or names of whole and parted GPUs."""
    n_gpus = 0 if os.environ.get("DS_ACCELERATOR") == "cpu" else torch.cuda.device_count()
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(n_gpus))))
    return listed.split(",")[:n_gpus]


def _start(errand: Command, place: int, jobs: int, gpus: Sequence[str]) -> subprocess.Popen[bytes]:
    errand.folder.mkdir(parents=True, exist_ok=True)
    program, *words = errand.command
    path = sys.executable if program == "python" else str(Path(sys.executable).with_name(program))
    environment = dict(os.environ)
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    with open(errand.folder / "log.txt", "ab") as log:
        child = subprocess.Popen(
            [path, *words], env=environment, stdout=log, stderr=log, start_new_session=True, preexec_fn=_end_with_us
        )
    cores = sorted(os.sched_getaffinity(0))
    if share := len(cores) // jobs:
        os.sched_setaffinity(child.pid, cores[place * share : (place + 1) * share])
    return child


def _end_with_us() -> None:
    """Have the operating system ask this process to stop when the one that started it is gone."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _ending(errand: Command, status: int) -> str:
    if status:
        return f"failed with status {status}, see {errand.folder}/log.txt"
    return "finished" if errand.finished() else "stopped"


@contextmanager
def asked_to_stop() -> Iterator[list[int]]:
    """A list that is not empty once SIGINT or SIGTERM came, or SIGHUP, as a closed terminal sends it, unless it is ignored (nohup)."""
    came: list[int] = []
    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signals.append(signal.SIGHUP)
    before = [signal.signal(number, lambda *got: came.append(got[0])) for number in signals]
    try:
        yield came
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
