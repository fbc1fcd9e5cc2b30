"""Metrics: JSON lines for programs, TensorBoard for people. Process 0 writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from xlpre.atomic import new_file
from xlpre.training.distributed import is_main


class MetricsLog:
    """Appends to `metrics.jsonl` and TensorBoard in a run folder.

    Args:
        folder: of the run.
        step: where the run goes on; lines of later steps, written before a stop, are dropped (all of them if it starts over).
    """

    def __init__(self, folder: Path, step: int) -> None:
        self._path = folder / "metrics.jsonl"
        self._board = None
        if is_main():
            from torch.utils.tensorboard import SummaryWriter

            kept = [line for line in read_metrics(folder) if line["step"] <= step and step]
            with new_file(self._path) as partial:
                partial.write_text("".join(json.dumps(line) + "\n" for line in kept))
            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def write(self, step: int, **values: Any) -> None:
        """One line; numbers also go to TensorBoard."""
        if self._board is not None:
            with open(self._path, "a") as file:
                file.write(json.dumps({"step": step, **values}) + "\n")
            for name, value in values.items():
                if isinstance(value, int | float):
                    self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush TensorBoard."""
        if self._board is not None:
            self._board.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl; a last line cut short by a kill is left out."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]
