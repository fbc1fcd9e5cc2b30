"""Inputs of a fine-tuning run: task, pretrained weights, vocabulary and examples."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from finetune.config import FinetuneConfig
from finetune.data.examples import Example, Split
from finetune.data.long_text import check_memory
from finetune.data.row_errors import InvalidRowsError, RowError
from finetune.data.sources import TRAIN
from finetune.tasks.base import Task
from finetune.tasks.registry import build_task
from finetune.trainer.results import FORMAT
from finetune.trainer.shared_features import FeaturesOfSplits, encode_once_per_machine
from xlpre.common.errors import InputError
from xlpre.conversion.model_folder import load_init_from
from xlpre.conversion.task_model_folder import TaskModelFolder
from xlpre.model.config import ModelConfig
from xlpre.training import checkpoint
from xlpre.training.distributed import Comm, world_size
from xlpre.training.run_dir import check_run_dir_writable

FROM_SCRATCH = "from_scratch"  # value of `weights` in a manifest without pretrained weights; also an added entry


class RunInputs:
    """Inputs that the runs of all seeds share. Reading and checking them writes nothing to the run folder.

    Args:
        config: the settings.
        join: function of the ModelConfig that joins the processes of the job. It is called before the examples are encoded, which
            one process of each machine then does. None: this process encodes all examples.

    Attributes:
        config: the settings, completed by values that depend on the examples (number of steps, labels) and on the width of the model
            (learning rate).
        task: the task.
        pretrained: the model folder of `init_from`.
        tokenizer: tokenizer of the pretrained model.
        model_config: configuration of the model, with the dropout and attention backend of the settings.
        train: encoded training examples.
        dev: encoded splits to evaluate on. The first selects the best weights.
        test: encoded splits to predict.

    Raises:
        InputError: settings contradict each other, or a file, an example or the model folder is invalid.
    """

    def __init__(self, config: FinetuneConfig, join: Callable[[ModelConfig], Comm] | None = None) -> None:
        if not config.task:
            raise InputError(
                f"task={config.task or 'null'} is invalid: fine-tuning needs the name of a task. Set task=NAME, such as task=glue/mrpc."
            )
        if not config.init_from:
            raise InputError(
                f"init_from={config.init_from or 'null'} is invalid: fine-tuning needs a pretrained model. Set init_from=FOLDER, such as "
                "init_from=runs/quickstart/model."
            )
        if (Path(config.run_dir) / checkpoint.CHECKPOINTS_DIR).is_dir():
            raise InputError(
                f"run_dir={config.run_dir} is invalid: it is the folder of a pretraining run, whose model it would replace. Set another "
                "name."
            )
        check_run_dir_writable(config.run_dir)
        self.task, examples = read_examples(config)
        splits = tuple(examples)
        self.pretrained = load_init_from(config.init_from)
        self.tokenizer = self.pretrained.require_tokenizer(f"init_from={config.init_from}")
        examples[TRAIN] = _sample(examples[TRAIN], config.data.max_train_examples, config.seed)
        config.train.batch_schedule(world_size())
        optional = {"dropout": config.model.dropout, "dropatt": config.model.dropatt}
        overrides: dict[str, Any] = {name: value for name, value in optional.items() if value is not None}
        self.model_config = dataclasses.replace(
            self.pretrained.config,
            **overrides,
            attention_span="all",  # <cls> at the end of a row sees the whole text
            attention_backend=config.model.attention_backend,
        )
        check_memory(config.data, self.model_config)

        def encode() -> FeaturesOfSplits:
            return [self.task.encode(examples[split], self.tokenizer) for split in splits]

        features = encode_once_per_machine(encode, join(self.model_config)) if join else encode()
        encoded = [Split(split, examples[split], rows) for split, rows in zip(splits, features, strict=True)]
        self.train, n_dev = encoded[0], len(self.task.dev_splits)
        self.dev, self.test = encoded[1 : 1 + n_dev], encoded[1 + n_dev :]
        self.config = _resolve(
            config, len(self.train.features), self.task.data_settings(), self.pretrained.config.d_model
        )

    def build_model_folder(self, weights: dict[str, Tensor], provenance: dict[str, Any]) -> TaskModelFolder:
        """Return the content of the model folder for fine-tuned weights."""
        task = {
            "task": self.task.name,
            "data": self.task.data_settings(),
            "pooling": self.config.model.pooling,
            "labels": list(self.task.label_names),
        }
        return TaskModelFolder.from_finetuned(self.pretrained, self.model_config, weights, task, provenance)

    def manifest(self, seed: int) -> dict[str, Any]:
        """Return the settings and fingerprints that a stopped run must have in common with the command that resumes it.

        Settings that only affect speed or memory use are not included.
        """
        config = self.config
        model, optim = dataclasses.asdict(self.model_config), dataclasses.asdict(config.optim)
        del model["attention_backend"], optim["base_lr"]
        return {
            "format": FORMAT,
            "task": config.task,
            "labels": list(self.task.label_names),
            "data": self.task.data_settings(),
            "model": {**model, "pooling": config.model.pooling},
            "weights": self._weights_fingerprint,
            "train_examples": self._fingerprints[TRAIN],
            "dev_examples": {split.name: self._fingerprints[split.name] for split in self.dev},
            "chunking": dataclasses.asdict(self.train.features[0].chunking),
            "optim": optim,
            "train": {"global_batch_size": config.train.global_batch_size, "steps": config.train.steps},
            "schedule": dataclasses.asdict(config.schedule),  # after `train`, which warm-up steps may be derived from
            "eval": {name: getattr(config.eval, name) for name in ("every", "keep_weights", "early_stopping_patience")},
            "seed": seed,
        }

    def check_resumable(self, path: Path, saved: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
        """Check that a result or checkpoint was written with the current settings, weights and examples.

        Args:
            path: the result or checkpoint, for the error message.
            saved: manifest of the result or checkpoint.
            expected: manifest of the current settings, with the entries that the trainer adds.

        Raises:
            InputError: an entry differs.
        """
        saved, now = _add_from_scratch(saved), _add_from_scratch(json.loads(json.dumps(expected)))
        run_dir = self.config.run_dir
        checkpoint.check_compatible(path, saved, {key: now[key] for key in ("format", FROM_SCRATCH)})
        if saved.get("weights") != now["weights"]:
            raise InputError(
                f"init_from={self.config.init_from} is invalid: its weights are not those that {run_dir} was fine-tuned from. They have "
                f"changed since then, or this is another model. Give the run another name, or remove {run_dir}."
            )
        examples = {"train_examples": "training", "dev_examples": "dev"}
        derived = (*examples, "labels", "chunking")  # compared last, as they follow from `data` and the files
        checkpoint.check_compatible(path, saved, {key: value for key, value in now.items() if key not in derived})
        for key, kind in examples.items():
            if saved.get(key) != now[key]:
                raise InputError(
                    f"run_dir={run_dir} is invalid: it was fine-tuned with other {kind} examples. Restore them, give the run another "
                    f"name, or remove {run_dir}."
                )
        checkpoint.check_compatible(path, saved, now)

    @cached_property
    def _weights_fingerprint(self) -> str:
        if self.config.from_scratch:
            return FROM_SCRATCH
        content = hashlib.sha256()
        for name, weight in sorted(self.pretrained.weights.items()):
            content.update(name.encode())
            content.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return content.hexdigest()[:16]

    @cached_property
    def _fingerprints(self) -> dict[str, str]:
        """Fingerprints of the training examples and of each dev split, by the name of the split."""
        return {split.name: _fingerprint(split) for split in (self.train, *self.dev)}


def read_examples(config: FinetuneConfig) -> tuple[Task, dict[str, Sequence[Example]]]:
    """Return the task, and the examples of its splits: training, development and test.

    Raises:
        InputError: settings contradict each other, or a file or an example is invalid.
    """
    assert config.task is not None
    task = build_task(config.task, config.data, config.model.pooling)
    examples, invalid_rows = dict[str, Sequence[Example]](), list[RowError]()
    for split in (TRAIN, *task.dev_splits, *task.test_splits):
        try:
            examples[split] = task.read_split(split)
        except InvalidRowsError as error:  # the other splits may have invalid rows, too
            invalid_rows += error.errors
    if invalid_rows:
        raise InvalidRowsError(invalid_rows)
    return task, examples


def _add_from_scratch(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest with an added entry `from_scratch`, which follows from its entry `weights`."""
    return {**manifest, FROM_SCRATCH: manifest.get("weights") == FROM_SCRATCH}


def _fingerprint(split: Split) -> str:
    """Return a hash of the tokens, labels, ids and groups of a split."""
    content = hashlib.sha256()
    for features in split.features:
        for row in features.rows:
            content.update(row.input_ids.tobytes())
        for label in features.labels.values():
            content.update(np.asarray(label).tobytes())
    for example in split.examples:
        content.update(f"{example.id} {example.label!r} {example.group}\n".encode())
    return content.hexdigest()[:16]


def _sample(examples: Sequence[Example], n_examples: int | None, seed: int) -> Sequence[Example]:
    """Return `n_examples` random examples in their original order, or all examples if it is None."""
    if n_examples is None or n_examples >= len(examples):
        return examples
    chosen = np.sort(np.random.default_rng(seed).permutation(len(examples))[:n_examples])
    return [examples[number] for number in chosen]


def _resolve(config: FinetuneConfig, n_train: int, data_settings: dict[str, Any], d_model: int) -> FinetuneConfig:
    """Replace epochs, warm-up ratio and a learning rate of null by numbers, and add the settings that the task read from its files.

    Args:
        config: the settings.
        n_train: number of encoded training examples.
        data_settings: `data` settings that the task has read from its files, such as the labels.
        d_model: width of the model.
    """
    train, schedule, optim = config.train, config.schedule, config.optim
    if optim.lr is None:
        optim = dataclasses.replace(optim, lr=optim.derive_lr(d_model))
    if config.epochs is not None:
        train = dataclasses.replace(train, steps=max(1, math.ceil(config.epochs * n_train / train.global_batch_size)))
    if config.warmup_ratio is not None:
        warmup_steps = min(round(config.warmup_ratio * train.steps), train.steps - 1)
        schedule = dataclasses.replace(schedule, warmup_steps=warmup_steps)
    if schedule.warmup_steps >= train.steps:
        raise InputError(
            f"schedule.warmup_steps={schedule.warmup_steps} is invalid: it must be below train.steps={train.steps}. "
            "Lower it, or set warmup_ratio."
        )
    data = dataclasses.replace(config.data, **data_settings)
    resolved: dict[str, Any] = {"epochs": None, "warmup_ratio": None, "task_overrides": {}}
    return dataclasses.replace(config, train=train, schedule=schedule, optim=optim, data=data, **resolved)
