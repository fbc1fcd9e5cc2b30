"""Run several commands in parallel, each on its own CPU cores and GPUs."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from xlpre.common.errors import InputError
from xlpre.common.files import write_text
from xlpre.common.messages import counted

SHUTDOWN_SECONDS = 600  # time that torchrun gives its processes to save
FAILURE = "failed.txt"  # in the folder of a command that failed: the reason in one line
PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class Command:
    """A command and its folder.

    Attributes:
        folder: folder of the command. Its output is appended to log.txt in this folder. If it fails, failed.txt has the reason until the
            command is started again.
        argv: program and arguments. The program is `python` or a script installed next to this interpreter.
        is_finished: returns True if the command has nothing left to do.
        name: name of the command in progress lines. Empty: the path of its folder.
        describe_result: returns the result of the finished command for its last progress line.
        needs: folders of commands that must be finished before this one starts. If one of them fails, this command is not started.
        prepare: called before the command is started.
    """

    folder: Path
    argv: Sequence[str]
    is_finished: Callable[[], bool]
    name: str = ""
    describe_result: Callable[[], str] = str
    needs: Sequence[Path] = ()
    prepare: Callable[[], object] = str


def run_all(commands: Sequence[Command], jobs: int | None = None, processes: int = 1) -> None:
    """Run all unfinished commands. Print a line when a command starts and when it ends.

    On a signal (see `stop_on_signal`), SIGTERM is sent to the running commands, which save and exit.
    They also receive SIGTERM if this process is killed or its output is closed.

    Args:
        commands: commands to run. Finished ones are skipped.
        jobs: number of commands that run at a time, each with an equal share of the cores and its own GPUs.
            None: as many as the GPUs allow or, on a machine without GPUs, the cores.
        processes: number of processes of one command. On a machine with GPUs, each has its own GPU.

    Raises:
        InputError: there are too few GPUs, or a command failed. A failure is raised after all commands have ended.
    """
    gpus = _visible_gpus()
    if gpus and processes > len(gpus):
        raise InputError(
            f"--processes={processes} is invalid: each process of a run needs a GPU, and this machine has {len(gpus)}. "
            f"Set --processes={len(gpus)} or less."
        )
    jobs = jobs or max(1, (len(gpus) or len(os.sched_getaffinity(0))) // processes)
    if gpus and jobs * processes > len(gpus):
        raise InputError(
            f"--jobs={jobs} is invalid: {counted(jobs, 'run')} of {counted(processes, 'process')} need {jobs * processes} GPUs, and this "
            f"machine has {len(gpus)}. Set --jobs={len(gpus) // processes} or less."
        )
    waiting = _unfinished(commands)
    missing = {command.folder for command in waiting}  # folders of commands that are not finished yet
    n_finished = len(commands) - len(waiting)
    print(f"{len(commands)} runs, {n_finished} of them finished already; {jobs} at a time", flush=True)
    running: dict[int, tuple[Command, subprocess.Popen[bytes], float]] = {}
    failed: list[Path] = []
    stop_sent = False
    with stop_on_signal() as signals:
        while running or (waiting and not signals):
            for slot in range(jobs):
                if slot in running or signals:
                    continue
                command = _pop_unfinished(waiting, missing)
                if command is None:
                    break
                command.prepare()
                child = _start(command, slot, jobs, gpus[slot * processes :][:processes])
                running[slot] = (command, child, time.monotonic())
                number, log = len(commands) - len(waiting), command.folder / "log.txt"
                print(f"{_name(command)}: started ({number} of {len(commands)}), log in {log}", flush=True)
            if waiting and not running and not signals:
                break  # the others need commands that have failed
            if signals and not stop_sent:
                stop_sent = True
                for _, child, _ in running.values():
                    os.killpg(child.pid, signal.SIGTERM)
            time.sleep(0.2)
            for slot, (command, child, started) in list(running.items()):
                if child.poll() is not None:
                    del running[slot]
                    status = 0 if stop_sent and _is_stopped(command, child.returncode) else child.returncode
                    elapsed = timedelta(seconds=round(time.monotonic() - started))
                    finished = not status and command.is_finished()
                    if status:
                        failed.append(command.folder)
                        write_text(command.folder / FAILURE, f"status {status}: {_last_line(command.folder)}\n")
                    elif finished:
                        missing.discard(command.folder)
                    print(f"{_name(command)}: {_outcome(command, status, finished, elapsed)}", flush=True)
    if waiting and not signals:
        print(f"not started, because a run before them is not finished: {'; '.join(map(_name, waiting))}", flush=True)
    if failed:
        logs = ", ".join(str(folder / "log.txt") for folder in failed)
        raise InputError(f"{len(failed)} of {len(commands)} runs failed. Their output is in {logs}.")


def read_failure(folder: Path) -> str:
    """Return why the last start of the command of this folder failed; empty if it did not fail."""
    with suppress(FileNotFoundError):
        return (folder / FAILURE).read_text("utf-8").strip()
    return ""


@contextmanager
def stop_on_signal() -> Iterator[list[int]]:
    """Yield a list to which the numbers of received stop signals are appended. The process does not exit on these signals.

    They are SIGINT, SIGTERM, and SIGHUP (the terminal was closed) unless the process ignores it, as under nohup.
    """
    received: list[int] = []
    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signals.append(signal.SIGHUP)
    previous = [signal.signal(number, lambda number, _: received.append(number)) for number in signals]
    try:
        yield received
    finally:
        for number, handler in zip(signals, previous, strict=True):
            signal.signal(number, handler)


def _is_stopped(command: Command, status: int) -> bool:
    """Return True if SIGTERM ended a command before it installed its handler, or ended torchrun after its processes had stopped."""
    return status == -signal.SIGTERM or (status == 1 and "SignalException" in _last_line(command.folder))


def _visible_gpus() -> list[str]:
    """List the GPUs of this process as CUDA_VISIBLE_DEVICES names them: numbers, UUIDs or MIG instances."""
    import torch

    n_gpus = 0 if os.environ.get("DS_ACCELERATOR") == "cpu" else torch.cuda.device_count()
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(n_gpus))))
    return listed.split(",")[:n_gpus]


def _start(command: Command, slot: int, jobs: int, gpus: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a command on `gpus` and on part `slot` of the cores, which are divided into `jobs` equal parts."""
    command.folder.mkdir(parents=True, exist_ok=True)
    (command.folder / FAILURE).unlink(missing_ok=True)
    program, *args = command.argv
    path = sys.executable if program == "python" else str(Path(sys.executable).with_name(program))
    environment = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_SECONDS), **os.environ}
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    with open(command.folder / "log.txt", "ab") as log:
        child = subprocess.Popen(
            [path, *args], env=environment, stdout=log, stderr=log, start_new_session=True, preexec_fn=stop_with_parent
        )
    cores = sorted(os.sched_getaffinity(0))
    if share := len(cores) // jobs:
        os.sched_setaffinity(child.pid, cores[slot * share : (slot + 1) * share])
    return child


def stop_with_parent() -> None:
    """Have Linux send SIGTERM to this process when its parent exits."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _unfinished(commands: Sequence[Command]) -> list[Command]:
    """Return the commands that are not finished, or that need one that is not finished."""
    unfinished: dict[Path, Command] = {}
    for command in commands:
        if any(folder in unfinished for folder in command.needs) or not command.is_finished():
            unfinished[command.folder] = command
    return list(unfinished.values())


def _pop_unfinished(waiting: list[Command], missing: set[Path]) -> Command | None:
    """Remove the first command that can start from `waiting`, and return it; None if none can.

    Commands that another process has finished in the meantime are removed from `waiting` and `missing`.
    """
    while command := next((command for command in waiting if missing.isdisjoint(command.needs)), None):
        waiting.remove(command)
        if not command.is_finished():
            return command
        missing.discard(command.folder)
        print(f"{_name(command)}: finished already", flush=True)
    return None


def _last_line(folder: Path) -> str:
    """Return the last line of log.txt."""
    lines = (folder / "log.txt").read_text("utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "no output")


def _name(command: Command) -> str:
    return command.name or str(command.folder)


def _outcome(command: Command, status: int, finished: bool, elapsed: timedelta) -> str:
    """Describe how a command ended after `elapsed` (hours:minutes:seconds), with its result if it has finished."""
    if status:
        return f"failed with status {status} after {elapsed}, see {command.folder}/log.txt"
    if not finished:
        return f"stopped after {elapsed}"
    return ", ".join(filter(None, (f"finished after {elapsed}", command.describe_result())))
