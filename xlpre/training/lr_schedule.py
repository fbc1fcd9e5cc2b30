"""Learning-rate schedule: a pure function of the step, and of the elapsed time if the run has a time budget.

Source: zihangdai/xlnet model_utils.py `get_train_op`: linear warm-up from 0, then a decay to `lr * min_lr_ratio`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from xlpre.common.errors import InputError, check_minimum


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning-rate schedule.

    Attributes:
        warmup_steps: number of steps at the start, in which the learning rate rises linearly from 0 to `optim.lr`.
        decay: decay after the warm-up: `linear`, `cosine`, `polynomial` (the factor of `linear`, raised to the power of
            `power`), `constant`, or `warmup_stable_decay` (constant, then linear in the last part; see `decay_ratio`).
        power: exponent of `polynomial`.
        decay_ratio: `warmup_stable_decay` decays in the last `decay_ratio` of the steps after the warm-up.
        min_lr_ratio: learning rate at the end, as a fraction of `optim.lr`.
    """

    warmup_steps: int = 0
    decay: Literal["linear", "cosine", "polynomial", "constant", "warmup_stable_decay"] = "linear"
    power: float = 2.0
    decay_ratio: float = 0.1
    min_lr_ratio: float = 0.0

    def __post_init__(self) -> None:
        check_minimum("schedule.warmup_steps", self.warmup_steps, 0, "Set schedule.warmup_steps=0 for no warm-up.")
        if not 0 <= self.min_lr_ratio <= 1:
            raise InputError(
                f"schedule.min_lr_ratio={self.min_lr_ratio} is invalid: it must be between 0 and 1. "
                "Set schedule.min_lr_ratio=0 to decay to zero."
            )
        if self.power <= 0:
            raise InputError(f"schedule.power={self.power} is invalid: it must be positive. Set schedule.power=2.")
        if not 0 < self.decay_ratio <= 1:
            raise InputError(
                f"schedule.decay_ratio={self.decay_ratio} is invalid: it must be above 0 and at most 1. "
                "Set schedule.decay_ratio=0.1."
            )


def learning_rate(
    config: ScheduleConfig, peak_lr: float, step: int, total_steps: int, time_fraction: float = 0.0
) -> float:
    """Return the learning rate of a step.

    Args:
        config: the schedule.
        peak_lr: learning rate at the end of the warm-up.
        step: index of the step, from 0.
        total_steps: number of steps of the run.
        time_fraction: fraction of the time budget that has passed. The decay follows the steps or the time, whichever is further ahead.
            The time of the warm-up is estimated from the time of all steps so far.
    """
    if step < config.warmup_steps:
        return peak_lr * step / config.warmup_steps
    time_of_warmup = time_fraction * config.warmup_steps / max(step, 1)
    by_time = (time_fraction - time_of_warmup) / (1 - time_of_warmup) if time_fraction < 1 else 1.0
    done = min(max((step - config.warmup_steps) / max(total_steps - config.warmup_steps, 1), by_time), 1.0)
    factor = {
        "linear": 1 - done,
        "cosine": 0.5 * (1 + math.cos(math.pi * done)),
        "polynomial": (1 - done) ** config.power,
        "constant": 1.0,
        "warmup_stable_decay": min((1 - done) / config.decay_ratio, 1.0),
    }[config.decay]
    return peak_lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * factor)


def format_lr(lr: float) -> str:
    """Format a learning rate as in settings, such as 2e-5, with up to three significant digits."""
    mantissa, _, exponent = f"{lr:.2e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}" if lr else "0"
