"""Helpers that start a training under a launcher, follow its output and end it."""

import subprocess

import psutil

from tests.integration.conftest import REPOSITORY, environment
from xlpre.training.metrics_writer import read_metrics

SCRIPT = "pretrain/run.py"
LONGER = {"train__steps": 500, "eval__every": 1000}  # still running when a test stops it


def losses(folder) -> dict[int, float]:
    """Return the training losses by step; a repeated step has its last value."""
    return {line["step"]: line["loss"] for line in read_metrics(folder) if "loss" in line}


def start(command, **variables):
    """Start a command with additional environment variables and both output streams in one pipe."""
    return subprocess.Popen(
        [*map(str, command)],
        env=environment() | variables,
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def end(*processes):
    """Kill the processes and their children, if they are still running."""
    for process in processes:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
        process.communicate()


def read_until(process, text) -> str:
    """Read the output of a process until a line contains `text`; return what was read."""
    output = ""
    for line in process.stdout:
        output += line
        if text in line:
            return output
    raise AssertionError(output)


def training_processes(launcher) -> list[psutil.Process]:
    """Return the processes of `pretrain/run.py`, without those of the launcher."""
    children = [(child, child.cmdline()) for child in psutil.Process(launcher.pid).children(recursive=True)]
    return [child for child, line in children if "python" in line[0] and any(arg.endswith(SCRIPT) for arg in line[1:3])]
