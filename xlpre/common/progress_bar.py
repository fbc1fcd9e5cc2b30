"""Progress bar of a long calculation."""

from __future__ import annotations

import sys
from types import TracebackType

from tqdm import tqdm

DELAY = 5.0  # seconds before the bar appears
LOG_INTERVAL = 30.0  # seconds between updates if stderr is not a terminal


class ProgressBar:
    """Progress bar on stderr that appears in long calculations only, and not at all if `is_shown` is False."""

    def __init__(self, total: int | None, unit: str, is_shown: bool = True) -> None:
        interval = 0.1 if sys.stderr.isatty() else LOG_INTERVAL
        self._bar = tqdm(
            total=total, unit=unit, unit_scale=True, delay=DELAY, mininterval=interval, disable=not is_shown
        )

    def report(self, done: int, total: int) -> None:
        """Show that `done` of `total` units are done."""
        self._bar.total = total
        self._bar.update(done - self._bar.n)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
