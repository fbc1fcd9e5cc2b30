"""What all runs of a fine-tuning stand on, before processes are joined: task, weights, vocabulary, examples, what must stay the same."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from finetune.config import FinetuneConfig
from finetune.data.examples import Example, Split
from finetune.data.long_text import check_memory
from finetune.data.sources import TRAIN
from finetune.tasks.registry import build_task
from xlpre.conversion.model_folder import load_init_from
from xlpre.conversion.task_model import TaskModelFolder
from xlpre.training.distributed import world_size
from xlpre.training.run_dir import check_run_dir_writable

FORMAT = 2  # of a checkpoint: names of parameters, what a batch of a step is


class RunInputs:
    """Read and checked; nothing is written.

    Args:
        config: every setting.

    Attributes:
        config: with what the examples decide.
        task: what is learned.
        folder: weights to start from, and their vocabulary.
        shape: of the model.
        train: what is learned from.
        dev: what is measured on; the first decides.
        test: what is predicted.

    Raises:
        ValueError: settings that contradict each other, a file, an example, the folder.
    """

    def __init__(self, config: FinetuneConfig) -> None:
        if not config.task or not config.init_from:
            missing = "task" if not config.task else "init_from"
            raise ValueError(
                f"{missing} is not set; say task=NAME (such as glue/mrpc) and init_from=FOLDER (of a model)"
            )
        check_run_dir_writable(config.run_dir)
        self.task = build_task(config.task, config.data, config.model.pooling)
        examples: dict[str, Sequence[Example]] = {split: self.task.read_split(split) for split in (TRAIN, *self.task.dev_splits)}
        examples |= {split: self.task.read_split(split) for split in self.task.test_splits}
        self.folder = load_init_from(config.init_from)
        self.tokenizer = self.folder.require_tokenizer(f"init_from={config.init_from}")
        examples[TRAIN] = _drawn(examples[TRAIN], config.data.max_train_examples, config.seed)
        self.train = self.split(TRAIN, examples[TRAIN])
        self.dev, self.test = (
            [self.split(name, examples[name]) for name in names] for names in (self.task.dev_splits, self.task.test_splits)
        )
        self.config = _resolved(config, len(self.train.features), self.task.data_settings())
        config.train.batch_schedule(world_size())
        given = {"dropout": config.model.dropout, "dropatt": config.model.dropatt}
        changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        self.shape = dataclasses.replace(
            self.folder.config, **changes, attention_backend=config.model.attention_backend
        )
        check_memory(config.data, self.shape)

    def split(self, name: str, examples: Sequence[Example]) -> Split:
        """A split, encoded."""
        return Split(name, examples, self.task.encode(examples, self.tokenizer))

    def model(self, weights: dict[str, Tensor], facts: dict[str, Any]) -> TaskModelFolder:
        """What became of the weights."""
        task = {
            "task": self.task.name,
            "data": self.task.data_settings(),
            "pooling": self.config.model.pooling,
            "labels": list(self.task.label_names),
        }
        return TaskModelFolder.from_finetuned(self.folder, self.shape, weights, task, facts)

    def facts(self, seed: int) -> dict[str, Any]:
        """What must be the same for a run to go on; settings of speed and memory may change."""
        config = self.config
        model = dataclasses.asdict(self.shape)
        del model["attention_backend"]
        return {
            "format": FORMAT,
            "task": config.task,
            "labels": list(self.task.label_names),
            "data": self.task.data_settings(),
            "model": {**model, "pooling": config.model.pooling},
            "weights": self._fingerprint_of_weights,
            "examples": self._fingerprints[TRAIN],
            "measured": {split.name: self._fingerprints[split.name] for split in self.dev},
            "reading": dataclasses.asdict(self.train.features[0].chunking),
            "optim": dataclasses.asdict(config.optim),
            "schedule": dataclasses.asdict(config.schedule),
            "train": {"global_batch_size": config.train.global_batch_size, "steps": config.train.steps},
            "eval": {name: getattr(config.eval, name) for name in ("every", "keep_weights", "early_stopping_patience")},
            "seed": seed,
        }

    @cached_property
    def _fingerprint_of_weights(self) -> str:
        """Of the folder that was started from, or of having started from new ones."""
        if self.config.from_scratch:
            return "drawn"
        content = hashlib.sha256()
        for name, weight in sorted(self.folder.weights.items()):
            content.update(f"{name} {weight.double().sum().item()!r}".encode())
        return content.hexdigest()[:16]

    @cached_property
    def _fingerprints(self) -> dict[str, str]:
        """Of what is learned from, and of each split that is measured on."""
        return {split.name: _fingerprint(split) for split in (self.train, *self.dev)}


def _fingerprint(split: Split) -> str:
    """Of what is read, and what is true of it."""
    content = hashlib.sha256()
    for item in split.features:
        for row in item.rows:
            content.update(row.input_ids.tobytes())
        for answer in item.labels.values():
            content.update(np.asarray(answer).tobytes())
    for example in split.examples:
        content.update(f"{example.id} {example.label!r} {example.group}\n".encode())
    return content.hexdigest()[:16]


def _drawn(examples: Sequence[Example], limit: int | None, seed: int) -> Sequence[Example]:
    """`limit` of the examples, in their order."""
    if limit is None or limit >= len(examples):
        return examples
    chosen = np.sort(np.random.default_rng(seed).permutation(len(examples))[:limit])
    return [examples[number] for number in chosen]


def _resolved(config: FinetuneConfig, n_items: int, settings: dict[str, Any]) -> FinetuneConfig:
    """With the number of updates, the warm-up and the labels that the examples decide, and no recipe left to follow."""
    train, schedule = config.train, config.schedule
    if config.epochs is not None:
        train = dataclasses.replace(train, steps=max(1, math.ceil(config.epochs * n_items / train.global_batch_size)))
    if config.warmup_ratio is not None:
        schedule = dataclasses.replace(schedule, warmup_steps=round(config.warmup_ratio * train.steps))
    if schedule.warmup_steps >= train.steps:
        raise ValueError(
            f"schedule.warmup_steps ({schedule.warmup_steps}) must be below train.steps ({train.steps}); lower it, or set warmup_share"
        )
    data = dataclasses.replace(config.data, **settings)
    decided: dict[str, Any] = {"epochs": None, "warmup_ratio": None, "task_overrides": {}}
    return dataclasses.replace(config, train=train, schedule=schedule, data=data, **decided)
