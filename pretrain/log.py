"""What a person and a plot see of a job: a line of progress, a line of metrics, a bar."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import torch
from tqdm import tqdm

from pretrain.cost import batch_shape, flops_per_step
from pretrain.job import Job
from xlpre.training.devices import device_named
from xlpre.training.distributed import is_main, n_processes
from xlpre.training.metrics import MetricsLog, duration, memory_bytes


class Log:
    """Says and writes how the job goes; its clock stands still while it measures and saves."""

    def __init__(self, job: Job) -> None:
        self.job, self.losses = job, []  # type: Job, list[torch.Tensor]
        config = job.resolved
        self._file = MetricsLog(job.run_dir, job.step, config.train.wandb, config.name, dataclasses.asdict(config))
        self._bar = tqdm(
            total=config.train.steps,
            initial=job.step,
            unit="step",
            dynamic_ncols=True,
            disable=None if is_main() else True,  # None: shown on a terminal only
        )
        rows = config.train.batch_size // (n_processes() * config.train.accumulation)
        shape = batch_shape(config, rows)
        self._targets_a_token = shape.targets / shape.window
        self._flops_a_token = flops_per_step(job.shape, shape) / (rows * shape.window)
        self._peak = _peak(job.device, job.engine.module.backbone.mask_embedding.dtype)
        self._begin_interval()

    def update(self) -> None:
        """One update is done."""
        self._bar.update()

    def write(self) -> None:
        """A line of metrics over the steps since the last."""
        job = self.job
        elapsed = time.monotonic() - self._since
        rate = (job.tokens - self._since_tokens) / elapsed
        flops = rate * self._flops_a_token
        (loss_sum,) = job.talk.total(torch.stack(self.losses).mean().item())
        (memory,) = job.talk.largest(float(memory_bytes(job.device)))
        line = {
            "loss": loss_sum / n_processes(),
            "lr": job.engine.optimizer.param_groups[0]["lr"],
            "grad_norm": float(job.engine.get_global_grad_norm()),
            "tokens_per_second": rate,
            "targets_per_second": rate * self._targets_a_token,
            "flops_per_second": flops,
            "mfu": flops / (self._peak * n_processes()) if self._peak else None,
            "memory_bytes": int(memory),
            "wait_seconds": job.waited_seconds - self._since_waited,
            "skipped": job.skipped,
            "tokens": job.tokens,
            "seconds": job.seconds,
            "eta_seconds": self._seconds_left((job.step - self._since_step) / elapsed),
        }
        self._file.write(job.step, **line)
        self._say(progress(line))
        self._begin_interval()

    def measure(self) -> None:
        """Held-out loss and samples."""
        paused = time.monotonic()
        got = self.job.measure()
        self._file.write(
            self.job.step,
            held_out_loss=got.loss,
            held_out_unigram=got.unigram,
            held_out_accuracy=got.accuracy,
            tokens=self.job.tokens,
            seconds=self.job.seconds,
        )
        self._say(
            f"held-out loss {got.loss:.3f} (word frequencies alone: {got.unigram:.3f}), {got.accuracy:.1%} of {got.n_targets:,} right"
        )
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

    def _seconds_left(self, steps_per_second: float) -> float:
        train = self.job.config.train
        budget = train.hours * 3600 - self.job.seconds if train.hours else None
        return seconds_left(train.steps - self.job.step, steps_per_second, budget)

    def _begin_interval(self) -> None:
        self.losses = []
        self._since, self._since_step, self._since_tokens = time.monotonic(), self.job.step, self.job.tokens
        self._since_waited = self.job.waited_seconds

    def _say(self, text: str) -> None:
        if is_main():
            tqdm.write(f"step {self.job.step:,}: {text}")


def progress(line: Mapping[str, Any]) -> str:
    """What a person reads of a line of metrics."""
    computing = (
        f"{line['flops_per_second'] / 1e9:,.1f} GFLOP/s" if line["mfu"] is None else f"MFU {line['mfu'] * 100:.1f} %"
    )
    skipped = line["skipped"]
    return (
        f"loss {line['loss']:.3f}, lr {line['lr']:.1e}, {line['tokens_per_second']:,.0f} tokens/s "
        f"({line['targets_per_second']:,.0f} targets/s), {computing}, {duration(line['eta_seconds'])} left, "
        f"{line['memory_bytes'] / 1e9:.1f} GB"
        + (f", {skipped:,} update{'s' * (skipped > 1)} skipped" if skipped else "")
    )


def seconds_left(steps: int, steps_per_second: float, budget: float | None) -> float:
    """How long `steps` take at the present rate; `budget` seconds are the most."""
    needed = steps / steps_per_second
    return needed if budget is None else max(min(needed, budget), 0.0)


def _peak(device: torch.device, dtype: torch.dtype) -> float | None:
    """Operations a second that the device could do; None where nothing states it, as for fp32."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    known = device_named(torch.cuda.get_device_name(device))
    return known.flops if known else None
