"""Helpers to start processes that import this repository, and to kill them with all their children."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).parents[2]
CPU_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "DS_ACCELERATOR": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
}


def make_environment(**variables: str) -> dict[str, str]:
    """Return environment variables for a process that imports this repository and prints without buffering."""
    paths = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1", **variables}


def kill_tree(process: subprocess.Popen[Any]) -> None:
    """Kill a process and all its descendants. Descendants that end meanwhile are no error."""
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()
