"""A fine-tuned model's folder: a model folder, from which training can go on like from any other, and two files more.

head.safetensors    fp32 weights of the head by their names in xlpre/model/heads.py
task.json           what the task is, for those who answer it, and a checksum of the head

`save_huggingface_task_model` writes one that transformers opens, with its head.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import safetensors
import safetensors.torch
from torch import Tensor

from xlpre.common.checksum import checksum
from xlpre.common.files import new_folder
from xlpre.common.safetensors_io import check_finite, write_tensors
from xlpre.conversion import hf, hf_heads
from xlpre.conversion.hf_tokenizer import write_tokenizer
from xlpre.conversion.model_folder import ModelFolder, export_folder, load_folder, write_files
from xlpre.conversion.native import as_readable_as_the_rest, check_whole
from xlpre.model.config import ModelConfig

HEAD, TASK, CHECKSUM = "head.safetensors", "task.json", "head_crc32c"


@dataclass(frozen=True)
class TaskModelFolder:
    """What a folder holds.

    Attributes:
        folder: the backbone; what fine-tuning has no use for (the softmax, the mask's embedding) is as it was before.
        head: weights of the head.
        task: what the task is.
    """

    folder: ModelFolder
    head: dict[str, Tensor]
    task: dict[str, Any]

    @property
    def weights(self) -> dict[str, Tensor]:
        """Of backbone and head, by their names in a model that has both."""
        return {**self.folder.weights, **{f"head.{name}": weight for name, weight in self.head.items()}}


def fine_tuned(
    before: ModelFolder, shape: ModelConfig, weights: dict[str, Tensor], task: dict[str, Any], facts: dict[str, Any]
) -> TaskModelFolder:
    """What became of the folder `before`: a model of this `shape` that has a backbone and a head with these `weights`."""
    backbone = {
        name: weight
        for name, weight in weights.items()
        if name.startswith("backbone.") and name != "backbone.mask_embedding"
    }
    head = {name.removeprefix("head."): weight for name, weight in weights.items() if name.startswith("head.")}
    folder = dataclasses.replace(
        before, config=shape, weights={**before.weights, **backbone}, facts=facts, kind="xlpre"
    )
    return TaskModelFolder(folder, head, task)


def save_task_model(path: str | Path, model: TaskModelFolder) -> None:
    """Write the folder, whole or not at all; one that is there is replaced."""
    with new_folder(path) as partial:
        write_files(partial, model.folder)
        write_tensors(partial / HEAD, model.head)
        as_readable_as_the_rest(partial / HEAD)
        task = {**model.task, CHECKSUM: checksum(partial / HEAD)}
        (partial / TASK).write_text(json.dumps(task, indent=1, ensure_ascii=False), encoding="utf-8")


def load_task_model(path: str | Path) -> TaskModelFolder:
    """Read a folder.

    Raises:
        ValueError: not that of a fine-tuned model, or something `load_folder` refuses.
    """
    path = Path(path)
    if (path / "model" / TASK).exists() and not (path / TASK).exists():
        path = path / "model"  # a run's folder
    folder = load_folder(path)
    if not (path / TASK).exists():
        raise ValueError(f"{path}: has no {TASK}; it is a model that was not fine-tuned, which finetune/run.py does")
    try:
        task = json.loads((path / TASK).read_text("utf-8"))
        if not isinstance(task, dict) or not isinstance(task.get("data"), dict):
            raise ValueError(f"{TASK} must hold an object, and so must `data` in it")
        if missing := {"task", "pooling", "labels"} - {*task}:
            raise ValueError(f"it has no {', '.join(sorted(missing))}")
        whole = task.pop(CHECKSUM, None)
        head = safetensors.torch.load_file(path / HEAD)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise ValueError(f"{path}: {HEAD} or {TASK} cannot be read: {str(error).splitlines()[0]}") from None
    check_whole(path / HEAD, whole, path / TASK, CHECKSUM)
    check_finite(path / HEAD, head)
    return TaskModelFolder(folder, head, task)


def save_huggingface_task_model(
    path: str | Path,
    model: TaskModelFolder,
    kind: str,
    labels: Sequence[str],
    summary: str,
    padding: Literal["left", "right"],
) -> None:
    """Write a folder that transformers opens with the head (`XLNetForSequenceClassification` and others), whole or not at all.

    Args:
        path: the folder.
        model: what is written.
        kind: of head, see hf_heads.KINDS.
        labels: names of the classes; of a number or of options none.
        summary: how the head reads a row, if by one vector.
        padding: the side on which rows are padded, where the head reads none.

    Raises:
        ValueError: something that Hugging Face cannot express, by the name of its key.
    """
    folder = model.folder
    hf.check_expressible(folder.config)
    settings, weights = hf_heads.to_huggingface(folder.config, model.head, kind, labels, summary)
    with export_folder(path, folder, task=model.task) as (partial, tokenizer):
        hf.write_model(partial, folder.config, folder.weights, "permutation", settings, weights)
        write_tokenizer(tokenizer, partial, padding)
        as_readable_as_the_rest(partial / "model.safetensors")
