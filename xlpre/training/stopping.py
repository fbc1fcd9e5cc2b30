"""Being asked to stop: a signal sets a mark, the loop looks at it, saves and ends."""

from __future__ import annotations

import signal
from typing import Any


class Stopping:
    """Hears SIGTERM and SIGINT from now on.

    Attributes:
        asked: whether one came.
    """

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._hear)

    def _hear(self, number: int, frame: Any) -> None:
        self.asked = True
