"""TrainConfig: the `train` settings of pretraining and fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from xlpre.training.batch_schedule import BatchSchedule, split_batch


@dataclass(frozen=True)
class TrainConfig:
    """Length, batch size, precision and checkpoints of a run.

    Attributes:
        steps: number of steps (optimizer updates).
        hours: time budget. The learning rate follows the elapsed time where it is ahead of the steps. null: no budget.
        global_batch_size: rows (lanes) of a step, over all processes and micro-steps.
        micro_batch_size: rows of one process in one forward and backward pass; null: all rows of the process. The number of micro-steps
            (accumulation) is global_batch_size / (number of processes * micro_batch_size).
        batch_warmup_steps: steps during which the micro-steps of a step rise from 1 to the accumulation. The lanes of the missing
            micro-steps are not read.
        precision: `auto` is bf16 on a GPU that supports it, else fp32.
        activation_checkpointing: recompute the activations of layers in the backward pass: less memory, a third more operations.
        compile: compile the model with torch.compile, which takes a minute or more at the start.
        log_every: steps between lines of metrics.
        save_every: steps between checkpoints.
        keep_last_checkpoints: number of recent checkpoints that are kept.
        keep_checkpoints_every: keep checkpoints whose step is a multiple of this number, too; null: no others.
        max_skipped_steps: number of steps in a row without an update, because a gradient was not finite, after which the run stops.
        timeout_minutes: time after which a process that waits for another one stops the job.
        wandb: Weights & Biases project for metrics; null: do not use it.
    """

    steps: int = 100_000
    hours: float | None = None
    global_batch_size: int = 32
    micro_batch_size: int | None = None
    batch_warmup_steps: int = 0
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    activation_checkpointing: bool = False
    compile: bool = False
    log_every: int = 20
    save_every: int = 500
    keep_last_checkpoints: int = 2
    keep_checkpoints_every: int | None = None
    max_skipped_steps: int = 20
    timeout_minutes: float = 20.0
    wandb: str | None = None

    def __post_init__(self) -> None:
        counts = (
            "steps",
            "global_batch_size",
            "log_every",
            "save_every",
            "keep_last_checkpoints",
            "max_skipped_steps",
        )
        for name in counts:
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"train.{name}={value} is invalid: it must be at least 1. Set train.{name}=1.")
        for name in ("micro_batch_size", "keep_checkpoints_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"train.{name}={value} is invalid: it must be at least 1. Set train.{name}=null.")
        if self.batch_warmup_steps < 0:
            raise ValueError(
                f"train.batch_warmup_steps={self.batch_warmup_steps} is invalid: it must be at least 0. "
                "Set train.batch_warmup_steps=0 for no warm-up."
            )
        if self.batch_warmup_steps and self.micro_batch_size is None:
            raise ValueError(
                f"train.batch_warmup_steps={self.batch_warmup_steps} is invalid: it adds micro-steps, and train.micro_batch_size=null "
                "makes one. Set train.micro_batch_size, or train.batch_warmup_steps=0."
            )
        if self.timeout_minutes <= 0:
            raise ValueError(
                f"train.timeout_minutes={self.timeout_minutes} is invalid: it must be positive. Set train.timeout_minutes=20."
            )
        if self.hours is not None and self.hours <= 0:
            raise ValueError(
                f"train.hours={self.hours} is invalid: it must be positive. Set train.hours=null for no time budget."
            )

    def batch_schedule(self, world_size: int) -> BatchSchedule:
        """Divide the global batch among `world_size` processes.

        Raises:
            ValueError: the rows cannot be divided equally, or `batch_warmup_steps` is set and there is one micro-step only.
        """
        micro_batch_size, accumulation = split_batch(self.global_batch_size, self.micro_batch_size, world_size)
        if self.batch_warmup_steps and accumulation == 1:
            raise ValueError(
                f"train.batch_warmup_steps={self.batch_warmup_steps} is invalid: it adds micro-steps, and train.micro_batch_size="
                f"{micro_batch_size} with {world_size} process(es) makes one. Lower train.micro_batch_size, or set "
                "train.batch_warmup_steps=0."
            )
        return BatchSchedule(world_size, micro_batch_size, accumulation, self.batch_warmup_steps)


def check_compile(train: TrainConfig, attention_backend: str) -> None:
    """Raise ValueError if `train.compile` is set and torch.compile does not support the attention backend."""
    if train.compile and attention_backend == "cpu":
        raise ValueError(
            "train.compile=true is invalid: torch.compile does not support model.attention_backend=cpu. "
            "Set model.attention_backend=auto."
        )
