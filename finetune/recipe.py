"""What a file of settings says for a task and what was typed: how the two become one FinetuneConfig."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from finetune.config import FinetuneConfig

INSTEAD = {"epochs": "train.steps", "warmup_ratio": "schedule.warmup_steps"}


def apply_cli_precedence(config: FinetuneConfig, typed: Collection[str]) -> FinetuneConfig:
    """Without a share that a file sets in place of a number which was given as a word.

    Raises:
        ValueError: both were given as words.
    """
    for share, number in INSTEAD.items():
        if number in typed and getattr(config, share) is not None:
            if share in typed:
                raise ValueError(f"{share} and {number} say the same; give one of them")
            nothing: dict[str, Any] = {share: None}
            config = dataclasses.replace(config, **nothing)
    return config


def task_overrides(config: FinetuneConfig) -> Sequence[str]:
    """The words that a file of settings has for the task."""
    return config.task_overrides.get(config.task, [])
