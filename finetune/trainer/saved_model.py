"""A fine-tuned folder, opened: what it holds, and the task that it is of; one that does not fit together is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from finetune.config import TaskDataConfig, TaskModelConfig
from finetune.tasks.base import Task
from finetune.tasks.registry import build_task
from xlpre.config.loader import from_mapping
from xlpre.conversion.task_model import HEAD, TASK, TaskModelFolder, load_task_model
from xlpre.model.config import ModelConfig


def open_task_model(path: Path) -> tuple[TaskModelFolder, Task]:
    """The model in a folder, and its task.

    Raises:
        ValueError: see load_fine_tuned; settings that are none or lacking, or a head that is not the task's.
    """
    model = load_task_model(path)
    said, origin = model.task, f"{path}: {TASK}"
    data = from_mapping(TaskDataConfig, said["data"], origin)
    summary = from_mapping(TaskModelConfig, {"pooling": said["pooling"]}, origin).pooling
    task = build_task(said["task"], data, summary)
    if missing := task.settings().keys() - said["data"].keys():
        raise ValueError(f"{origin}: its data has no {', '.join(sorted(missing))}; copy the file as it was written")
    check_head(path, model.head, task, model.folder.config)
    return model, task


def check_head(path: Path, head: Mapping[str, Tensor], task: Task, shape: ModelConfig) -> None:
    """Raise ValueError unless the `head` of a folder has the weights that the task's has for a backbone of `shape`, and no others."""
    with torch.device("meta"):
        expected = {name: tuple(weight.shape) for name, weight in task.head(shape).named_parameters()}
    found = {name: tuple(weight.shape) for name, weight in head.items()}
    for name in sorted(expected.keys() | found.keys()):
        if found.get(name) != expected.get(name):
            there, wanted = (str(shapes.get(name, "not there")) for shapes in (found, expected))
            raise ValueError(
                f"{path}: {name} in {HEAD} is {there}, and in the head of {task.name} {wanted}; copy the whole folder as it was written"
            )
