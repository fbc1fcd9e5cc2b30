"""Graceful shutdown on signals: a handler sets a flag, and the training loop saves and stops at the end of the step."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import psutil

PARENT_PID_VARIABLE = "XLPRE_PARENT_PID"


class ShutdownHandler:
    """Flag that is set by SIGTERM, SIGINT, and SIGHUP (a closed terminal).

    SIGHUP is not handled if it is ignored, as under nohup. If the environment variable XLPRE_PARENT_PID names a process, the end of
    that process sets the flag, too: a launcher between the two processes would outlive it.

    Attributes:
        is_requested: True after a signal.
    """

    def __init__(self) -> None:
        self.is_requested = False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        if parent := os.environ.get(PARENT_PID_VARIABLE):
            threading.Thread(target=self._wait_for_exit, args=(int(parent),), daemon=True).start()

    def on_broken_stdout(self, error: OSError) -> None:
        """Request a shutdown because stdout is closed (terminal gone, pipe without reader), and discard all further output."""
        self.is_requested = True
        with suppress(OSError):
            print(
                f"warning: stdout cannot be written ({error}). The training saves a checkpoint and stops.",
                file=sys.stderr,
                flush=True,
            )
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)

    def _on_signal(self, number: int, frame: Any) -> None:
        self.is_requested = True

    def _wait_for_exit(self, pid: int) -> None:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                time.sleep(1)
        self.is_requested = True
