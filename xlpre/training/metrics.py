"""Metrics: JSON lines for programs, TensorBoard and Weights & Biases for people. Process 0 writes."""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from xlpre.common.files import with_filename, write_text
from xlpre.training.distributed import is_rank_zero
from xlpre.training.jsonl import read_lines, rewrite

BOARD = "tensorboard"


class MetricsWriter:
    """Appends to `metrics.jsonl` and TensorBoard in a run folder, and to a project of Weights & Biases.

    Args:
        folder: of the run.
        step: where the run goes on; lines of later steps, written before a stop, are dropped (all of them if it starts over).
        project: of Weights & Biases; empty: none. `check_wandb_installed` has passed it.
        name: of the run, there.
        settings: of the run, shown there.
    """

    def __init__(
        self, folder: Path, step: int, project: str = "", name: str = "", settings: Mapping[str, Any] | None = None
    ) -> None:
        self._path = folder / "metrics.jsonl"
        self._board = self._chart = None
        if is_rank_zero():
            from torch.utils.tensorboard import SummaryWriter

            rewrite(self._path, lambda written: step > 0 and written <= step, _json)
            self._board = SummaryWriter(str(folder / BOARD), purge_step=step + 1)
            if project:
                self._chart = _chart(folder, step, project, name, settings)

    def write(self, step: int, **values: Any) -> None:
        """One line; numbers also go to TensorBoard and Weights & Biases, as they are."""
        if self._board is None:
            return
        with with_filename(self._path), open(self._path, "a", encoding="utf-8") as file:
            file.write(_json({"step": step, **values}) + "\n")
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        with with_filename(self._path.with_name(BOARD)):
            for name, value in numbers.items():
                self._board.add_scalar(name, value, step)
        if self._chart is not None:
            self._chart.log(numbers, step=step)

    def close(self) -> None:
        """Write out what is not yet written."""
        if self._board is not None:
            with with_filename(self._path.with_name(BOARD)):
                self._board.close()
        if self._chart is not None:
            self._chart.finish()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl, None for a number that is not finite; a last line cut short by a kill is left out.

    Raises:
        ValueError: another line is damaged.
    """
    return read_lines(folder / "metrics.jsonl")


def format_duration(seconds: float) -> str:
    """In words, the two largest units."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days:,} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def peak_memory_bytes(device: torch.device) -> int:
    """Bytes of this process: the most that tensors took on a GPU so far, what it holds on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return psutil.Process().memory_info().rss


def check_wandb_installed(project: str) -> None:
    """Raise ValueError if there is a `project` of Weights & Biases, and its library is not there."""
    if not project:
        return
    try:
        from wandb import init  # noqa: F401 - a mere folder of that name can be imported, too
    except ImportError:
        raise ValueError(
            f"train.wandb={project} needs the library of Weights & Biases: `pip install wandb`, or leave train.wandb empty"
        ) from None


def _chart(folder: Path, step: int, project: str, name: str, settings: Mapping[str, Any] | None) -> Any:
    """The run's chart; its id is kept in the folder, so that a run that goes on continues it, and one that starts over does not."""
    import wandb

    kept = folder / "wandb_id"
    if not (step and kept.exists()):
        write_text(kept, uuid.uuid4().hex)
    return wandb.init(
        project=project,
        name=name,
        id=kept.read_text("utf-8"),
        resume="allow",
        dir=str(folder.absolute()),
        config=settings,
    )


def _json(values: Mapping[str, Any]) -> str:
    """What any parser of JSON reads: a number that is not finite is null."""
    return json.dumps({name: _finite(value) for name, value in values.items()}, allow_nan=False)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
