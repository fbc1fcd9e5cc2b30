"""What a person and a plot see of a pretraining: its loss, its speed, its use of the device, what it makes of held-out text."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from pretrain.planning.flops import batch_shape, flops_per_step
from pretrain.trainer.evaluator import EvalResult
from pretrain.trainer.trainer import Trainer
from xlpre.training.device_specs import device_named
from xlpre.training.distributed import world_size
from xlpre.training.metrics import format_duration
from xlpre.training.run_logger import RunLogger


class Log(RunLogger):
    """Says and writes how the job goes."""

    def __init__(self, job: Trainer) -> None:
        config = job.resolved
        self._job, self._tokens, self._waited = job, job.tokens, job.waited_seconds
        rows = config.train.batch_schedule(world_size()).micro_batch_size
        shape = batch_shape(config, rows)
        self._targets_a_token = shape.targets / shape.window
        self._flops_a_token = flops_per_step(job.shape, shape) / (rows * shape.window)
        self._peak = _peak(job.device, job.dtype)
        auxiliary = job.engine.module.auxiliary_heads
        super().__init__(
            job.course, job.run_dir, config.name, dataclasses.asdict(config), progress, auxiliary=auxiliary
        )

    def rates(self, seconds: float, steps: int) -> dict[str, Any]:
        """Tokens, targets, operations, and time spent waiting for batches."""
        job, tokens, waited = self._job, self._tokens, self._waited
        self._tokens, self._waited = job.tokens, job.waited_seconds
        rate = (job.tokens - tokens) / seconds
        flops = rate * self._flops_a_token
        return {
            "tokens_per_second": rate,
            "targets_per_second": rate * self._targets_a_token,
            "flops_per_second": flops,
            "mfu": flops / (self._peak * world_size()) if self._peak else None,
            "data_wait_seconds": job.waited_seconds - waited,
            "tokens": job.tokens,
        }

    def measure(self) -> EvalResult:
        """Held-out loss and samples."""
        with self.paused():
            got = self._job.measure()
            self.say(
                f"held-out loss {got.loss:.3f} (word frequencies alone: {got.unigram:.3f}), {got.accuracy:.1%} of {got.n_targets:,} right"
                + "".join(f", {name.replace('_', ' ')} {share:.1%} right" for name, share in got.auxiliary.items()),
                {
                    "val_loss": got.loss,
                    "val_unigram_loss": got.unigram,
                    "val_accuracy": got.accuracy,
                    "val_bpb": got.bits_per_byte,
                    **{f"val_{name}_accuracy": share for name, share in got.auxiliary.items()},
                    "tokens": self._job.tokens,
                    "train_seconds": self._job.course.seconds,
                },
            )
        return got


def progress(line: Mapping[str, Any]) -> str:
    """What a person reads of a line of metrics."""
    computing = (
        f"{line['flops_per_second'] / 1e9:,.1f} GFLOP/s" if line["mfu"] is None else f"MFU {line['mfu'] * 100:.1f} %"
    )
    others = "".join(
        f", {name.replace('_', ' ')} {value:.3f}" for name, value in line.items() if name.endswith("_loss")
    )
    skipped = line["skipped_steps"]
    return (
        f"loss {line['loss']:.3f}{others}, lr {line['lr']:.1e}, {line['tokens_per_second']:,.0f} tokens/s "
        f"({line['targets_per_second']:,.0f} targets/s), {computing}, {format_duration(line['eta_seconds'])} left, "
        f"{line['memory_bytes'] / 1e9:.1f} GB"
        + (f", {skipped:,} update{'s' * (skipped > 1)} skipped" if skipped else "")
    )


def _peak(device: torch.device, dtype: torch.dtype) -> float | None:
    """Operations a second that the device could do; None where nothing states it, as for fp32."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    known = device_named(torch.cuda.get_device_name(device))
    return known.flops if known else None
