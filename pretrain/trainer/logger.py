"""Logging of a pretraining run: loss, speed, use of the device, and evaluations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from pretrain.config import PretrainConfig
from pretrain.planning.flops import batch_shape, flops_per_step
from pretrain.trainer.evaluator import EvalResult
from xlpre.common.messages import counted
from xlpre.training.device_specs import find_device_spec
from xlpre.training.distributed import world_size
from xlpre.training.metrics_writer import format_duration
from xlpre.training.progress import Progress
from xlpre.training.run_logger import RunLogger
from xlpre.training.startup import TrainingContext


class TrainLogger(RunLogger):
    """Logger of a pretraining run.

    Args:
        config: resolved settings of the run.
        context: device and precision of this process.
        progress: steps and clock of the run.
        auxiliary_heads: names of the auxiliary heads of the model.
        read_totals: returns the window tokens that all processes have read, and the seconds that this process has waited for batches.
        evaluation_due: see MetricsWriter.
    """

    def __init__(
        self,
        config: PretrainConfig,
        context: TrainingContext,
        progress: Progress,
        auxiliary_heads: Iterable[str],
        read_totals: Callable[[], tuple[int, float]],
        evaluation_due: bool = False,
    ) -> None:
        rows = context.batch.micro_batch_size
        shape = batch_shape(config, rows)
        self._targets_per_token = shape.n_targets / shape.seq_len
        self._flops_per_token = flops_per_step(config.model, shape) / (rows * shape.seq_len)
        self._peak_flops = peak_flops(context.device, context.dtype)
        self._read_totals = read_totals
        self._tokens, self._wait_seconds = read_totals()
        super().__init__(
            progress,
            Path(config.run_dir),
            config.name,
            dataclasses.asdict(config),
            auxiliary_losses=auxiliary_heads,
            evaluation_due=evaluation_due,
        )

    def pop_throughput(self, seconds: float, n_steps: int) -> dict[str, Any]:
        """Return tokens, targets and FLOPs per second, and the seconds spent waiting for batches."""
        previous_tokens, previous_wait = self._tokens, self._wait_seconds
        self._tokens, self._wait_seconds = self._read_totals()
        tokens_per_second = (self._tokens - previous_tokens) / seconds
        flops_per_second = tokens_per_second * self._flops_per_token
        return {
            "tokens_per_second": tokens_per_second,
            "targets_per_second": tokens_per_second * self._targets_per_token,
            "flops_per_second": flops_per_second,
            "mfu": flops_per_second / (self._peak_flops * world_size()) if self._peak_flops else None,
            "data_wait_seconds": self._wait_seconds - previous_wait,
            "tokens": self._tokens,
        }

    def format_metrics(self, metrics: Mapping[str, Any]) -> str:
        """Format a line of metrics.jsonl for the console."""
        return format_metrics(metrics, self._progress.engine.device.type)

    def write_evaluation(self, result: EvalResult, warning: str = "") -> None:
        """Write the result of an evaluation, and a warning for the console."""
        auxiliary = result.auxiliary_accuracy
        self.write_line(
            f"val loss {result.loss:.3f} (unigram baseline {result.unigram_loss:.3f}), "
            f"accuracy {result.accuracy * 100:.1f} % of {result.n_targets:,} targets, {result.bits_per_byte:.3f} bits per byte"
            + "".join(f", {name.replace('_', ' ')} accuracy {value * 100:.1f} %" for name, value in auxiliary.items())
            + (f", {result.order_std:.3f} nats per token between orders" if result.order_std is not None else "")
            + (f", {result.minimal_pairs:.1f} % of minimal pairs" if result.minimal_pairs is not None else "")
            + (f"\n{warning}" if warning else ""),
            {
                "val_loss": result.loss,
                "val_unigram_loss": result.unigram_loss,
                "val_accuracy": result.accuracy,
                "val_bpb": result.bits_per_byte,
                **{f"val_{name}_accuracy": value for name, value in auxiliary.items()},
                **({"val_order_std": result.order_std} if result.order_std is not None else {}),
                **({"val_minimal_pairs": result.minimal_pairs} if result.minimal_pairs is not None else {}),
                "tokens": self._read_totals()[0],
                "train_seconds": self._progress.train_seconds,
            },
        )


def format_metrics(metrics: Mapping[str, Any], device_type: str) -> str:
    """Format a line of metrics.jsonl for the console.

    Args:
        metrics: values of the line by name.
        device_type: device whose memory was measured, `cpu` or `cuda`.
    """
    memory = "RAM" if device_type == "cpu" else "VRAM"
    compute = f"{metrics['flops_per_second'] / 1e9:,.1f} GFLOP/s"
    if metrics["mfu"] is not None:
        compute = f"MFU {metrics['mfu'] * 100:.1f} %"
    auxiliary = "".join(
        f", {name.replace('_', ' ')} {value:.3f}" for name, value in metrics.items() if name.endswith("_loss")
    )
    skipped = metrics["skipped_steps"]
    return (
        f"loss {metrics['loss']:.3f}{auxiliary}, lr {metrics['lr']:.1e}, {metrics['tokens_per_second']:,.0f} tokens/s "
        f"({metrics['targets_per_second']:,.0f} targets/s), {compute}, {format_duration(metrics['eta_seconds'])} left, "
        f"{metrics['peak_memory_bytes'] / 1e9:.1f} GB {memory}"
        + (f", {counted(skipped, 'step')} skipped" if skipped else "")
    )


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the peak FLOPs per second of the device in 16 bits; None if the peak is unknown or `dtype` is fp32."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    spec = find_device_spec(torch.cuda.get_device_name(device))
    return spec.flops if spec else None
