"""Trainings that something is done to while they run: how they are started, followed and ended."""

import subprocess

import psutil

from tests.integration.conftest import REPOSITORY, environment
from xlpre.training.metrics import read_metrics

SCRIPT = "pretrain/run.py"
LONGER = {"train__steps": 150, "eval__every": 1000}  # than it takes to stop


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
