"""What a person and a plot see of a run: a line of progress, a line of metrics, a bar."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from xlpre.training.distributed import is_rank_zero, world_size
from xlpre.training.metrics import MetricsWriter, peak_memory_bytes
from xlpre.training.progress import Progress


class RunLogger(ABC):
    """Says and writes how a run goes; its clock stands still while it is paused.

    Args:
        course: of the run.
        folder: of the run.
        name: of the run, in Weights & Biases.
        settings: of the run, shown there.
        words: what a person reads of a line of metrics,
        title: and before the number of the step.
        auxiliary: names of the losses besides the first that a micro-step has.
    """

    def __init__(
        self,
        course: Progress,
        folder: Path,
        name: str,
        settings: Mapping[str, Any],
        words: Callable[[Mapping[str, Any]], str],
        title: str = "step",
        auxiliary: Iterable[str] = (),
    ) -> None:
        self._course, self._words, self._title = course, words, title
        self._names = ("loss", *(f"{name}_loss" for name in auxiliary))
        self._file = MetricsWriter(folder, course.step, course.train.wandb, name, settings)
        self._bar = tqdm(
            total=course.train.steps,
            initial=course.step,
            unit="step",
            dynamic_ncols=True,
            disable=None if is_rank_zero() else True,  # None: shown on a terminal only
        )
        self._begin_interval()

    def micro_step(self, *losses: torch.Tensor) -> None:
        """A micro-step is done."""
        self._losses.append([loss.detach() for loss in losses])

    def update(self) -> None:
        """One update is done."""
        self._bar.update()

    def write(self) -> None:
        """A line of metrics over the updates since the last; every process must call it."""
        course, elapsed = self._course, time.monotonic() - self._since
        steps = course.step - self._since_step
        rates = self.rates(elapsed, steps)
        means = [torch.stack(several).mean().item() for several in zip(*self._losses, strict=True)]
        sums = zip(self._names, course.comm.all_reduce_sum(*means), strict=True)
        (memory,) = course.comm.all_reduce_max(float(peak_memory_bytes(course.engine.device)))
        hours = course.train.hours
        budget = hours * 3600 - course.seconds if hours else None
        line = {
            **{name: total / world_size() for name, total in sums},
            "lr": max(group["lr"] for group in course.engine.optimizer.param_groups if "matrices" not in group),
            "grad_norm": float(course.engine.get_global_grad_norm()),
            **rates,
            "peak_memory_bytes": int(memory),
            "skipped_steps": course.skipped,
            "train_seconds": course.seconds,
            "eta_seconds": seconds_left(course.train.steps - course.step, steps / elapsed, budget),
        }
        self.say(self._words(line), line)
        self._begin_interval()

    def say(self, text: str, numbers: Mapping[str, Any]) -> None:
        """A line for a person and `numbers` for programs."""
        self._file.write(self._course.step, **numbers)
        if is_rank_zero():
            try:
                tqdm.write(f"{self._title} {self._course.step:,}: {text}")
            except OSError as error:  # a closed terminal, a pipe that nobody reads
                self._course.stopping.on_broken_stdout(error)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is done meanwhile does not count as training."""
        since = time.monotonic()
        yield
        self._since += time.monotonic() - since

    def close(self) -> None:
        """No more lines."""
        self._bar.close()
        self._file.close()

    @abstractmethod
    def rates(self, seconds: float, steps: int) -> dict[str, Any]:
        """How fast the last `steps` updates went, which took `seconds`; every process calls it once for a line of metrics."""

    def _begin_interval(self) -> None:
        self._losses: list[list[torch.Tensor]] = []
        self._since, self._since_step = time.monotonic(), self._course.step


def seconds_left(steps: int, steps_per_second: float, budget: float | None) -> float:
    """How long `steps` take at the present rate; `budget` seconds are the most."""
    needed = steps / steps_per_second
    return needed if budget is None else max(min(needed, budget), 0.0)
