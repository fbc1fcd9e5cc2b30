"""Logging of a run: progress lines on the console, a progress bar, and metrics for programs. Loggers only format and write."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from xlpre.common.os_errors import is_disk_full
from xlpre.training.distributed import is_rank_zero, world_size
from xlpre.training.metrics_writer import MetricsWriter, peak_memory_bytes
from xlpre.training.progress import Progress


class RunLogger(ABC):
    """Base of the loggers of pretraining and fine-tuning. Losses and speeds are means over the steps since the last `write_metrics`.

    Args:
        progress: steps and clock of the run.
        run_dir: folder of the run.
        run_name: name of the run in Weights & Biases.
        settings: settings of the run, for Weights & Biases.
        prefix: beginning of a console line, before the number of the step.
        auxiliary_losses: names of the losses of a micro-step besides the first, without the suffix `_loss`.
        evaluation_due: see MetricsWriter.
    """

    def __init__(
        self,
        progress: Progress,
        run_dir: Path,
        run_name: str,
        settings: Mapping[str, Any],
        prefix: str = "step",
        auxiliary_losses: Iterable[str] = (),
        evaluation_due: bool = False,
    ) -> None:
        self._progress, self._prefix = progress, prefix
        self._loss_names = ("loss", *(f"{name}_loss" for name in auxiliary_losses))
        self._writer = MetricsWriter(
            run_dir, progress.step, progress.train.wandb, run_name, settings, evaluation_due=evaluation_due
        )
        self._bar = tqdm(
            total=progress.train.steps,
            initial=progress.step,
            unit="step",
            dynamic_ncols=True,
            disable=None if is_rank_zero() else True,  # None: show the bar on a terminal only
        )
        self._begin_interval()

    @abstractmethod
    def pop_throughput(self, seconds: float, n_steps: int) -> dict[str, Any]:
        """Return the metrics of speed over the last `n_steps` steps, which took `seconds`. Every process calls it once per metrics line."""

    @abstractmethod
    def format_metrics(self, metrics: Mapping[str, Any]) -> str:
        """Return the text of the console line for `metrics`, without the prefix and the step."""

    def record_losses(self, *losses: torch.Tensor) -> None:
        """Store the losses of a micro-step, without waiting for the device."""
        self._losses.append([loss.detach() for loss in losses])

    def end_step(self) -> None:
        """Advance the progress bar by one step."""
        self._bar.update()

    def write_metrics(self) -> None:
        """Write the metrics since the last call. Every process must call it."""
        progress, elapsed = self._progress, time.monotonic() - self._since
        n_steps = progress.step - self._since_step
        throughput = self.pop_throughput(elapsed, n_steps)
        means = [torch.stack(losses).mean().item() for losses in zip(*self._losses, strict=True)]
        sums = zip(self._loss_names, progress.comm.all_reduce_sum(*means), strict=True)
        (memory,) = progress.comm.all_reduce_max(float(peak_memory_bytes(progress.engine.device)))
        hours = progress.train.hours
        budget = hours * 3600 - progress.train_seconds if hours else None
        metrics = {
            **{name: total / world_size() for name, total in sums},
            "lr": max(group["lr"] for group in progress.engine.optimizer.param_groups if "matrices" not in group),
            "grad_norm": None if (norm := progress.engine.get_global_grad_norm()) is None else float(norm),
            **throughput,
            "peak_memory_bytes": int(memory),
            "skipped_steps": progress.skipped_steps,
            "train_seconds": progress.train_seconds,
            "eta_seconds": remaining_seconds(progress.train.steps - progress.step, n_steps / elapsed, budget),
        }
        self.write_line(self.format_metrics(metrics), metrics)
        self._begin_interval()

    def write_line(self, text: str, metrics: Mapping[str, Any]) -> None:
        """Print `text` on rank 0, and write `metrics` to the metrics files."""
        self._writer.write(self._progress.step, **metrics)
        if is_rank_zero():
            try:
                tqdm.write(f"{self._prefix} {self._progress.step:,}: {text}")
            except OSError as error:
                if not is_disk_full(error):  # a closed terminal, a pipe without a reader
                    self._progress.shutdown.on_broken_stdout(error)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time of the `with` block from the metrics of speed."""
        start = time.monotonic()
        yield
        self._since += time.monotonic() - start

    def close(self) -> None:
        """Close the progress bar and the metrics files."""
        self._bar.close()
        self._writer.close()

    def _begin_interval(self) -> None:
        self._losses: list[list[torch.Tensor]] = []
        self._since, self._since_step = time.monotonic(), self._progress.step


def remaining_seconds(n_steps: int, steps_per_second: float, budget: float | None) -> float:
    """Return the time that `n_steps` take at the current speed, at most the remaining `budget` in seconds."""
    seconds = n_steps / steps_per_second
    return seconds if budget is None else max(min(seconds, budget), 0.0)
