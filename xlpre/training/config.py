"""The `train` and `optim` settings of pretraining and fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from xlpre.common.errors import InputError, check_minimum
from xlpre.training.batch_schedule import BatchSchedule, split_batch

# `train` settings that do not influence the result of a run
OPERATIONAL_SETTINGS = frozenset(
    {
        "micro_batch_size",
        "compile",
        "cuda_graphs",
        "activation_checkpointing",
        "log_every",
        "save_every",
        "keep_last_checkpoints",
        "keep_checkpoints_every",
        "max_failed_saves",
        "max_skipped_steps",
        "timeout_minutes",
        "wandb",
    }
)


@dataclass(frozen=True)
class TrainConfig:
    """Length, batch size, precision and checkpoints of a run.

    Attributes:
        steps: number of optimizer steps.
        hours: time budget in hours; null: no budget. The run ends after `steps` or `hours`, whichever comes first. The learning rate
            decays with the steps or the elapsed time, whichever is further ahead.
        global_batch_size: batch size, the number of rows of a step, summed over all processes and micro-steps. In pretraining, each row is
            a lane, which reads consecutive windows of the text.
        micro_batch_size: rows of one process in one forward and backward pass; null: all rows of the process. The number of micro-steps
            (accumulation) is global_batch_size / (number of processes * micro_batch_size).
        precision: `auto` is bf16 on a GPU that supports it, else fp32. On a CPU with bf16 instructions (AVX512-BF16 or AMX), `bf16`
            is 1.3 to 3.5 times as fast as fp32.
        activation_checkpointing: recompute the activations of layers in the backward pass, which saves memory but adds a third more
            operations.
        compile: compile the model with torch.compile, which takes a minute or more at the start.
        log_every: steps between lines of metrics.
        save_every: steps between checkpoints.
        keep_last_checkpoints: number of recent checkpoints that are kept.
        max_failed_saves: the run stops after this number of checkpoints in a row that could not be written, for example because the
            disk is full.
        max_skipped_steps: the run stops after this number of steps in a row that were skipped because a gradient was not finite.
        timeout_minutes: a process that waits for another process for longer than this stops the job.
        wandb: Weights & Biases project for metrics; null: do not use it.
    """

    steps: int = 100_000
    hours: float | None = None
    global_batch_size: int = 32
    micro_batch_size: int | None = None
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    activation_checkpointing: bool = False
    compile: bool = False
    log_every: int = 20
    save_every: int = 500
    keep_last_checkpoints: int = 2
    max_failed_saves: int = 3
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
            "max_failed_saves",
            "max_skipped_steps",
        )
        for name in counts:
            check_minimum(f"train.{name}", getattr(self, name), 1, f"Set train.{name}=1.")
        check_minimum("train.micro_batch_size", self.micro_batch_size, 1, "Set train.micro_batch_size=null.")
        if not 0 < self.timeout_minutes <= 1e6:
            raise InputError(
                f"train.timeout_minutes={self.timeout_minutes} is invalid: it must be above 0 and at most 1e6. Set "
                "train.timeout_minutes=20."
            )
        if self.hours is not None and self.hours <= 0:
            raise InputError(
                f"train.hours={self.hours} is invalid: it must be positive. Set train.hours=null for no time budget."
            )

    def is_over(self, step: int, train_seconds: float) -> bool:
        """Return True after the last step, or when the time budget is spent."""
        return step >= self.steps or (self.hours is not None and train_seconds >= self.hours * 3600)

    def batch_schedule(self, world_size: int) -> BatchSchedule:
        """Divide the global batch among `world_size` processes.

        Raises:
            InputError: the rows cannot be divided equally.
        """
        return BatchSchedule(world_size, *split_batch(self.global_batch_size, self.micro_batch_size, world_size))


@dataclass(frozen=True)
class OptimConfig:
    """Settings of AdamW.

    Attributes:
        lr: peak learning rate.
        beta1: decay rate of Adam's first moment.
        beta2: decay rate of Adam's second moment.
        eps: constant added to the square root of the second moment.
        weight_decay: decoupled weight decay, multiplied by the learning rate.
        max_grad_norm: gradients with a larger global norm are scaled down to this norm; null: no clipping.
    """

    lr: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-6
    weight_decay: float = 0.01
    max_grad_norm: float | None = 1.0

    def __post_init__(self) -> None:
        rules = {
            "lr": (self.lr is None or self.lr > 0, "positive", 1e-4),  # None in fine-tuning: lr is derived later
            "eps": (self.eps > 0, "positive", 1e-6),
            "weight_decay": (self.weight_decay >= 0, "at least 0", 0),
            "max_grad_norm": (self.max_grad_norm is None or self.max_grad_norm > 0, "positive", "null (no clipping)"),
            "beta1": (0 <= self.beta1 < 1, "at least 0 and below 1", 0.9),
            "beta2": (0 <= self.beta2 < 1, "at least 0 and below 1", 0.999),
        }
        for name, (is_valid, rule, usual) in rules.items():
            if not is_valid:
                raise InputError(
                    f"optim.{name}={getattr(self, name)} is invalid: it must be {rule}. Set optim.{name}={usual}."
                )

    @property
    def muon(self) -> bool:
        """True if Muon updates the matrices of layers."""
        return False


@dataclass(frozen=True)
class PretrainOptimConfig(OptimConfig):
    """Settings of AdamW, or of Muon for the matrices of layers and AdamW for the other parameters.

    Attributes:
        name: `adamw`, as published; or `muon`: orthogonalized updates for the matrices of layers (Jordan, 2024), AdamW for the rest.
        matrix_lr: peak learning rate of the matrices that Muon updates; null: `lr`. Muon's updates are about as large as those of AdamW.
        momentum: momentum of the matrices that Muon updates.
    """

    name: Literal["adamw", "muon"] = "adamw"
    matrix_lr: float | None = None
    momentum: float = 0.95

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.matrix_lr is not None and self.matrix_lr <= 0:
            raise InputError(
                f"optim.matrix_lr={self.matrix_lr} is invalid: it must be positive. Set optim.matrix_lr=null to use optim.lr."
            )
        if not 0 <= self.momentum < 1:
            raise InputError(
                f"optim.momentum={self.momentum} is invalid: it must be at least 0 and below 1. Set optim.momentum=0.95."
            )

    @property
    def muon(self) -> bool:
        """True if Muon updates the matrices of layers."""
        return self.name == "muon"


@dataclass(frozen=True)
class LayerwiseOptimConfig(OptimConfig):
    """Settings of AdamW with smaller updates for lower layers.

    Attributes:
        layer_decay: scales layer m of 1 to L by layer_decay^(L - m); 1.0 scales no layer. Embeddings and heads are not scaled.
        layer_decay_mode: what `layer_decay` scales. `lr`: the learning rate, as in the paper (XLNet, Table 8). `grad_scale`: the
            clipped gradient, as in the published code; Adam mostly undoes this scaling. The published code keeps attention biases and
            segment embeddings outside of layers, so `grad_scale` does not scale them.
    """

    layer_decay: float = 1.0
    layer_decay_mode: Literal["lr", "grad_scale"] = "lr"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.layer_decay <= 1:
            raise InputError(
                f"optim.layer_decay={self.layer_decay} is invalid: it must be above 0 and at most 1. "
                "Set optim.layer_decay=1 for no decay."
            )
        if self.layer_decay == 1 and self.layer_decay_mode != "lr":
            raise InputError(
                f"optim.layer_decay_mode={self.layer_decay_mode} is invalid: it has no effect with optim.layer_decay=1. "
                "Set optim.layer_decay below 1, or leave optim.layer_decay_mode out."
            )


def check_compile(train: TrainConfig, attention_backend: str) -> None:
    """Raise InputError if `train.compile` is set and torch.compile does not support the attention backend."""
    if train.compile and attention_backend == "cpu":
        raise InputError(
            "train.compile=true is invalid: torch.compile does not support model.attention_backend=cpu. "
            "Set model.attention_backend=auto."
        )
