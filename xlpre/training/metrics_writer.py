"""Metrics files of a run: metrics.jsonl for programs, TensorBoard and Weights & Biases for people. Rank 0 writes."""

from __future__ import annotations

import json
import math
import os
import sys
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from xlpre.common.errors import InputError
from xlpre.common.files import with_filename, write_text
from xlpre.common.os_errors import is_disk_full, is_transient
from xlpre.training.distributed import is_rank_zero
from xlpre.training.jsonl import read_records, rewrite_records

TENSORBOARD_DIR = "tensorboard"


class MetricsWriter:
    """Append metrics to `metrics.jsonl` and TensorBoard in a run folder, and to a Weights & Biases project.

    Args:
        run_dir: folder of the run.
        step: step at which the run resumes. Lines of later steps are removed; at step 0, all lines are removed.
        evaluation_due: the evaluation of this step takes place after the run has resumed. Its line, if there is one, is removed, too.
        project: Weights & Biases project, checked by `check_wandb_installed`; None: do not use it.
        run_name: name of the run in Weights & Biases.
        settings: settings of the run, for Weights & Biases.
    """

    def __init__(
        self,
        run_dir: Path,
        step: int,
        project: str | None = None,
        run_name: str = "",
        settings: Mapping[str, Any] | None = None,
        evaluation_due: bool = False,
    ) -> None:
        self._path = run_dir / "metrics.jsonl"
        self._waiting: list[str] = []  # lines for which the disk had no room
        self._tensorboard: Any = None
        self._wandb_run: Any = None
        if is_rank_zero():
            from torch.utils.tensorboard import SummaryWriter

            def keep(record: Mapping[str, Any]) -> bool:
                is_repeated = evaluation_due and record["step"] == step and "lr" not in record
                return step > 0 and record["step"] <= step and not is_repeated

            rewrite_records(self._path, keep, _to_json)
            self._tensorboard = SummaryWriter(str(run_dir / TENSORBOARD_DIR), purge_step=step + 1)
            if project:
                self._wandb_run = _init_wandb(run_dir, step, project, run_name, settings)

    def write(self, step: int, **values: Any) -> None:
        """Write one line. Values that are numbers also go to TensorBoard and Weights & Biases.

        If the disk is full or the error may be temporary, the line waits for the next call.
        """
        if not is_rank_zero():
            return
        self._waiting.append(_to_json({"step": step, **values}) + "\n")
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        try:
            self._append_waiting()
        except OSError as error:
            if not (is_disk_full(error) or is_transient(error)):
                raise
            print(f"warning: {error}. The metrics of step {step:,} are written later.", file=sys.stderr, flush=True)
        self._use_tensorboard(lambda writer: [writer.add_scalar(name, value, step) for name, value in numbers.items()])
        if self._wandb_run is not None:
            self._wandb_run.log(numbers, step=step)

    def close(self) -> None:
        """Flush and close the files.

        Raises:
            OSError: the waiting lines cannot be written.
        """
        self._append_waiting()
        self._use_tensorboard(lambda writer: writer.close())
        if self._wandb_run is not None:
            self._wandb_run.finish()

    def _use_tensorboard(self, action: Callable[[Any], object]) -> None:
        """Call `action` with TensorBoard's writer. After an error, TensorBoard is not used any more: its thread has ended."""
        if self._tensorboard is None:
            return
        try:
            with with_filename(self._path.with_name(TENSORBOARD_DIR)):
                action(self._tensorboard)
        except OSError as error:
            self._tensorboard = None
            text = f"warning: {error}. TensorBoard gets no more values until the run is started again; {self._path.name} does."
            print(text, file=sys.stderr, flush=True)

    def _append_waiting(self) -> None:
        """Append the waiting lines to metrics.jsonl, completely or not at all."""
        if not self._waiting:
            return
        size = self._path.stat().st_size if self._path.exists() else 0
        try:
            with with_filename(self._path), open(self._path, "a", encoding="utf-8") as file:
                file.writelines(self._waiting)
        except OSError:
            with suppress(OSError):
                os.truncate(self._path, size)
            raise
        self._waiting = []


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Read the metrics.jsonl of a run. A number that was not finite is None. An incomplete last line is ignored.

    Raises:
        InputError: a line is damaged.
    """
    return read_records(run_dir / "metrics.jsonl")


def format_duration(seconds: float) -> str:
    """Format a duration with its two largest units, such as `3 h 20 min`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days:,} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak of the memory that tensors used on a GPU; on a CPU, the current memory of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return psutil.Process().memory_info().rss


def check_wandb_installed(project: str | None) -> None:
    """Raise InputError if a Weights & Biases project is set and its library is not installed."""
    if not project:
        return
    try:
        from wandb import init  # noqa: F401 - `import wandb` would also accept a folder called wandb
    except ImportError:
        raise InputError(
            f"train.wandb={project} is invalid: the library of Weights & Biases is not installed. Run `pip install wandb`, or set "
            "train.wandb=null."
        ) from None


def _init_wandb(run_dir: Path, step: int, project: str, run_name: str, settings: Mapping[str, Any] | None) -> Any:
    """Start a Weights & Biases run. Its id is stored in the run folder, so that a resumed run continues the same charts."""
    import wandb

    id_file = run_dir / "wandb_id"
    if not (step and id_file.exists()):
        write_text(id_file, uuid.uuid4().hex)
    return wandb.init(
        project=project,
        name=run_name,
        id=id_file.read_text("utf-8"),
        resume="allow",
        dir=str(run_dir.absolute()),
        config=settings,
    )


def _to_json(values: Mapping[str, Any]) -> str:
    """Serialize to strict JSON: a number that is not finite becomes null."""
    return json.dumps({name: _finite_or_none(value) for name, value in values.items()}, allow_nan=False)


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
