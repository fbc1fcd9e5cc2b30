"""Being asked to stop: a signal, or a terminal that is gone, sets a mark; the loop looks at it, saves and ends."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import psutil

STARTED_BY = "XLPRE_STARTED_BY"


class ShutdownHandler:
    """Hears SIGTERM and SIGINT from now on, and SIGHUP, which a closed terminal sends, unless it is ignored as under nohup.

    Where the environment's XLPRE_STARTED_BY is the number of a process, its end is heard, too: a launcher, which stands between that and
    this one, would live on.

    Attributes:
        asked: whether one came.
    """

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._hear)
        if starter := os.environ.get(STARTED_BY):
            threading.Thread(target=self._outlive, args=(int(starter),), daemon=True).start()

    def on_broken_stdout(self, error: OSError) -> None:
        """What is printed cannot be written, because the terminal or the pipe's reader is gone: stop, and print nothing more."""
        self.asked = True
        with suppress(OSError):
            print(
                f"warning: nothing can be printed ({error}); the training saves and stops", file=sys.stderr, flush=True
            )
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)

    def _hear(self, number: int, frame: Any) -> None:
        self.asked = True

    def _outlive(self, starter: int) -> None:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(starter)
            while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                time.sleep(1)
        self.asked = True
