"""What a person and a plot see of a fine-tuning run: its loss, its speed, its padding, its scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from finetune.data.batching import MicroStep
from finetune.trainer.trainer import Trainer
from xlpre.training.metrics import format_duration
from xlpre.training.run_logger import RunLogger


class Log(RunLogger):
    """Says and writes how the run goes."""

    def __init__(self, job: Trainer) -> None:
        name, settings = f"{job.config.name}-seed-{job.seed}", dataclasses.asdict(job.config)
        super().__init__(job.course, job.folder, name, settings, progress, f"seed {job.seed}, step")
        self._job, self._text, self._computed = job, 0, 0

    def count(self, batch: MicroStep) -> None:
        """What a micro-step read."""
        text, computed = batch.n_tokens, batch.n_padded_tokens
        self._text, self._computed = self._text + text, self._computed + computed

    def rates(self, seconds: float, steps: int) -> dict[str, Any]:
        """Examples, tokens of them, and the places that were filled up."""
        text, computed = self._job.comm.all_reduce_sum(self._text, self._computed)
        self._text = self._computed = 0
        return {
            "examples_per_second": steps * self._job.config.train.global_batch_size / seconds,
            "tokens_per_second": text / seconds,
            "padding_fraction": 1 - text / computed,
        }

    def measure(self) -> None:
        """Scores."""
        with self.paused():
            found = self._job.measure()
            self.say(shown(found), {**found, "train_seconds": self._job.course.seconds})


def progress(line: Mapping[str, Any]) -> str:
    """What a person reads of a line of metrics."""
    return (
        f"loss {line['loss']:.4f}, lr {line['lr']:.1e}, {line['tokens_per_second']:,.0f} tokens/s ({line['padding']:.0%} of places "
        f"padding), {format_duration(line['eta_seconds'])} left"
    )


def shown(found: Mapping[str, float]) -> str:
    """Scores as a person reads them."""
    return ", ".join(f"{name} {score:.4f}" for name, score in found.items())
