"""Graceful shutdown on signals: a handler sets a flag, and the training loop stops at the end of the step and saves.

A second Ctrl-C ends the process at once. A thread does this, because Python calls no signal handler while the main thread waits in a
collective operation.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import psutil

from xlpre.training.distributed import is_rank_zero

PARENT_PID_VARIABLE = "XLPRE_PARENT_PID"
# a launcher passes on a Ctrl-C that the terminal has sent to its processes already
SAME_INTERRUPT_SECONDS = 1.0


class ShutdownHandler:
    """Flag that is set by SIGTERM, SIGINT, and SIGHUP (a closed terminal). A second SIGINT ends the process with status 130.

    SIGHUP is not handled if it is ignored, as under nohup. If the environment variable XLPRE_PARENT_PID names a process, the end of
    that process sets the flag, too. A launcher between the two processes keeps running then, so it does not report the end.

    Attributes:
        is_requested: True after a signal.
    """

    def __init__(self) -> None:
        self.is_requested = False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        received, sent = socket.socketpair()
        sent.setblocking(False)
        signal.set_wakeup_fd(sent.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=_abort_on_second_interrupt, args=(received, sent), daemon=True).start()
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


def _abort_on_second_interrupt(received: socket.socket, sent: socket.socket) -> None:
    """Abort the process on the second SIGINT. Signal numbers arrive in `received`; `sent`, its other end, is only kept open."""
    first: float | None = None
    while numbers := received.recv(64):
        if signal.SIGINT not in numbers:
            continue
        now = time.monotonic()
        if first is None:
            first = now
            _report("Stopping after this step. Press Ctrl-C again to abort without saving.")
        elif now - first > SAME_INTERRUPT_SECONDS:
            _report("Aborted. The same command resumes from the last checkpoint.")
            os._exit(130)


def _report(message: str) -> None:
    if is_rank_zero():
        with suppress(OSError):
            print(message, file=sys.stderr, flush=True)
