"""What a person and a plot see of a run: a line of progress, a line of metrics, a bar."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping

import torch
from tqdm import tqdm

from finetune.batches import Parts
from finetune.job import Job
from xlpre.training.distributed import is_main, n_processes
from xlpre.training.metrics import MetricsLog, duration, memory_bytes


class Log:
    """Says and writes how the run goes; its clock stands still while it measures and saves."""

    def __init__(self, job: Job) -> None:
        self.job, self._file = job, _file(job)
        self._bar = tqdm(
            total=job.config.train.steps,
            initial=job.step,
            unit="step",
            dynamic_ncols=True,
            disable=None if is_main() else True,  # None: shown on a terminal only
        )
        self._losses: list[torch.Tensor] = []
        self._text = self._computed = 0
        self._since, self._since_step = time.monotonic(), job.step

    def read(self, batch: Parts, loss: torch.Tensor) -> None:
        """A micro-step is done."""
        text, computed = batch.n_tokens
        self._text, self._computed = self._text + text, self._computed + computed
        self._losses.append(loss.detach())

    def update(self) -> None:
        """One update is done."""
        self._bar.update()

    def write(self) -> None:
        """A line of metrics over the updates since the last."""
        job, elapsed = self.job, time.monotonic() - self._since
        mean = torch.stack(self._losses).mean().item()
        loss, text, computed = job.talk.total(mean / n_processes(), self._text, self._computed)
        (memory,) = job.talk.largest(float(memory_bytes(job.device)))
        steps = job.step - self._since_step
        line = {
            "loss": loss,
            "lr": max(group["lr"] for group in job.engine.optimizer.param_groups),
            "grad_norm": float(job.engine.get_global_grad_norm()),
            "examples_per_second": steps * job.config.train.batch_size / elapsed,
            "tokens_per_second": text / elapsed,
            "padding": 1 - text / computed,
            "memory_bytes": int(memory),
            "skipped": job.skipped,
            "seconds": job.seconds,
            "eta_seconds": (job.config.train.steps - job.step) * elapsed / steps,
        }
        self._file.write(job.step, **line)
        self._say(
            f"loss {loss:.4f}, lr {line['lr']:.1e}, {line['tokens_per_second']:,.0f} tokens/s ({line['padding']:.0%} of places "
            f"padding), {duration(line['eta_seconds'])} left"
        )
        self._begin_interval()

    def measure(self) -> None:
        """Scores."""
        paused = time.monotonic()
        found = self.job.measure()
        self._file.write(self.job.step, **found, seconds=self.job.seconds)
        self._say(shown(found))
        self._since += time.monotonic() - paused

    def save(self) -> None:
        """Begin a checkpoint."""
        paused = time.monotonic()
        self.job.save()
        self._since += time.monotonic() - paused

    def close(self) -> None:
        """No more lines."""
        self._bar.close()
        self._file.close()

    def _begin_interval(self) -> None:
        self._losses, self._text, self._computed = [], 0, 0
        self._since, self._since_step = time.monotonic(), self.job.step

    def _say(self, text: str) -> None:
        if is_main():
            tqdm.write(f"seed {self.job.seed}, step {self.job.step:,}: {text}")


def shown(found: Mapping[str, float]) -> str:
    """Scores as a person reads them."""
    return ", ".join(f"{name} {score:.4f}" for name, score in found.items())


def _file(job: Job) -> MetricsLog:
    name = f"{job.config.name}-seed-{job.seed}"
    return MetricsLog(job.folder, job.step, job.config.train.wandb, name, dataclasses.asdict(job.config))
