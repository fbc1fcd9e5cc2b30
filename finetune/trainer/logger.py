"""Console lines and metrics of a fine-tuning run: loss, speed, padding and scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.config import FinetuneConfig
from finetune.data.batching import MicroStep
from xlpre.training.lr_schedule import format_lr
from xlpre.training.metrics_writer import format_duration
from xlpre.training.progress import Progress
from xlpre.training.run_logger import RunLogger


class TrainLogger(RunLogger):
    """Prints and writes the progress of a run.

    Args:
        config: the settings.
        seed: seed of the run.
        folder: folder of the run.
        progress: steps and clock of the run.
        evaluation_due: see MetricsWriter.
    """

    def __init__(
        self, config: FinetuneConfig, seed: int, folder: Path, progress: Progress, evaluation_due: bool = False
    ) -> None:
        run_name, settings = f"{config.name}-seed-{seed}", dataclasses.asdict(config)
        super().__init__(progress, folder, run_name, settings, f"seed {seed}, step", evaluation_due=evaluation_due)
        self._comm, self._batch_size = progress.comm, config.train.global_batch_size
        self._n_tokens = self._n_padded_tokens = 0

    def count_tokens(self, micro_step: MicroStep) -> None:
        """Count the tokens of a micro-step, with and without padding."""
        self._n_tokens += micro_step.n_tokens
        self._n_padded_tokens += micro_step.n_padded_tokens

    def pop_throughput(self, seconds: float, n_steps: int) -> dict[str, Any]:
        """Return examples and tokens per second, and the fraction of computed tokens that are padding."""
        n_tokens, n_padded_tokens = self._comm.all_reduce_sum(self._n_tokens, self._n_padded_tokens)
        self._n_tokens = self._n_padded_tokens = 0
        return {
            "examples_per_second": n_steps * self._batch_size / seconds,
            "tokens_per_second": n_tokens / seconds,
            "padding_fraction": 1 - n_tokens / n_padded_tokens,
        }

    def format_metrics(self, metrics: Mapping[str, Any]) -> str:
        """Return the console line of training metrics."""
        return (
            f"train loss {metrics['loss']:.4f}, learning rate {format_lr(metrics['lr'])}, {metrics['tokens_per_second']:,.0f} tokens/s, "
            f"{metrics['padding_fraction']:.0%} padding, {format_duration(metrics['eta_seconds'])} left"
        )

    def write_evaluation(self, metrics: Mapping[str, float]) -> None:
        """Print and write the metrics of an evaluation."""
        self.write_line(format_scores(metrics), {**metrics, "train_seconds": self._progress.train_seconds})


def format_scores(metrics: Mapping[str, float]) -> str:
    """Return the metrics of an evaluation in one line."""
    return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
