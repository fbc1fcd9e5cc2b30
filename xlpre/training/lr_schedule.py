"""The learning rate, a pure function of the step (and of the clock, where a run is bounded by time).

Source: zihangdai/xlnet model_utils.py `get_train_op`: linear warm-up from 0, then a decay to `lr * min_lr_ratio`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ScheduleConfig:
    """The course of the learning rate.

    Attributes:
        warmup_steps: updates of linear rise from 0 to `optim.lr`.
        decay: the course after them: `linear`, `cosine`, `polynomial` (linear to the power `power`), `constant`, or
            `warmup_stable_decay` (constant, then linear over the last `decay_ratio` of the run).
        power: of `polynomial`.
        decay_ratio: of `warmup_stable_decay`.
        min_lr_ratio: where the decay ends, as a share of `optim.lr`.
    """

    warmup_steps: int = 0
    decay: Literal["linear", "cosine", "polynomial", "constant", "warmup_stable_decay"] = "linear"
    power: float = 2.0
    decay_ratio: float = 0.1
    min_lr_ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.warmup_steps < 0 or not 0 <= self.min_lr_ratio <= 1:
            raise ValueError(
                f"schedule.warmup_steps ({self.warmup_steps}) must be at least 0 and schedule.min_lr_ratio "
                f"({self.min_lr_ratio}) between 0 and 1"
            )
        if self.power <= 0 or not 0 < self.decay_ratio <= 1:
            raise ValueError(
                f"schedule.power ({self.power}) must be positive and schedule.decay_ratio ({self.decay_ratio}) above 0, at most 1"
            )


def learning_rate(config: ScheduleConfig, lr: float, step: int, steps: int, time_share: float = 0.0) -> float:
    """The rate of update `step` (from 0) of `steps`; `time_share` is the part of a time budget that is spent."""
    if step < config.warmup_steps:
        return lr * step / config.warmup_steps
    done = min(max((step - config.warmup_steps) / max(steps - config.warmup_steps, 1), time_share), 1.0)
    left = {
        "linear": 1 - done,
        "cosine": 0.5 * (1 + math.cos(math.pi * done)),
        "polynomial": (1 - done) ** config.power,
        "constant": 1.0,
        "warmup_stable_decay": min((1 - done) / config.decay_ratio, 1.0),
    }[config.decay]
    return lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * left)
