"""Being asked to stop: a signal, or a terminal that is gone, sets a mark; the loop looks at it, saves and ends."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from typing import Any


class Stopping:
    """Hears SIGTERM and SIGINT from now on, and SIGHUP, which a closed terminal sends, unless it is ignored as under nohup.

    Attributes:
        asked: whether one came.
    """

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._hear)

    def nobody_reads(self, error: OSError) -> None:
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
