"""Helper that builds a task."""

from finetune.config import TaskDataConfig
from finetune.tasks.base import Task
from finetune.tasks.registry import build_task


def build(name: str, folder: object, **data: object) -> Task:
    """Build a task on the files in a folder, with more settings of `data`."""
    return build_task(name, TaskDataConfig(dir=str(folder), **data), "last")
