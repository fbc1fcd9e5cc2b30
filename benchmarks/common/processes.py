"""Processes that benchmarks start: on this repository's code, and ended with all that they started."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).parents[2]
ON_A_CPU = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}


def environment(**more: str) -> dict[str, str]:
    """Of a process that takes this repository's code, and whose output comes at once."""
    paths = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1", **more}


def kill(process: subprocess.Popen[Any]) -> None:
    """It, and all that it started, of which some may end meanwhile."""
    with suppress(psutil.NoSuchProcess):
        for one in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                one.kill()
    process.kill()
