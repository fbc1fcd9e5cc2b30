"""Folder of a fine-tuned model: a model folder, which `init_from` accepts, with two more files.

head.safetensors    fp32 weights of the head by their names in xlpre/model/task_heads.py
task.json           the task and its settings, and a checksum of the head

`save_huggingface_task_model` writes a folder for transformers, including the head.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import safetensors
import safetensors.torch
from torch import Tensor

from xlpre.common.errors import InputError
from xlpre.common.files import FileEntries, atomic_dir, write_bytes
from xlpre.common.safetensors_io import check_finite, write_tensors
from xlpre.conversion import hf, hf_heads
from xlpre.conversion.hf_tokenizer import write_tokenizer
from xlpre.conversion.model_folder import (
    ModelFolder,
    export_folder,
    load_folder,
    resolve_model_dir,
    write_native_files,
)
from xlpre.conversion.native_format import check_checksum
from xlpre.model.config import ModelConfig

HEAD, TASK, CHECKSUM = "head.safetensors", "task.json", "head_crc32c"


@dataclass(frozen=True)
class TaskModelFolder:
    """Content of the folder of a fine-tuned model.

    Attributes:
        folder: the language model. Weights that fine-tuning does not use (LM head, mask embedding) keep their pretrained values.
        head: native weights of the head.
        task: content of task.json.
    """

    folder: ModelFolder
    head: dict[str, Tensor]
    task: dict[str, Any]

    @classmethod
    def from_finetuned(
        cls,
        pretrained: ModelFolder,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        task: dict[str, Any],
        provenance: dict[str, Any],
    ) -> TaskModelFolder:
        """Return the folder content of a fine-tuned model.

        Args:
            pretrained: folder that fine-tuning started from.
            config: config of the fine-tuned model.
            weights: weights of backbone and head, with the prefixes `backbone.` and `head.`.
            task: content of task.json.
            provenance: fields for provenance.json.
        """
        backbone = {
            name: weight
            for name, weight in weights.items()
            if name.startswith("backbone.") and name != "backbone.mask_embedding"
        }
        head = {name.removeprefix("head."): weight for name, weight in weights.items() if name.startswith("head.")}
        folder = dataclasses.replace(
            pretrained,
            config=config,
            weights={**pretrained.weights, **backbone},
            provenance=provenance,
            kind="xlpre",
        )
        return cls(folder, head, task)

    @property
    def weights(self) -> dict[str, Tensor]:
        """Weights of backbone and head by their names in a model that has both."""
        return {**self.folder.weights, **{f"head.{name}": weight for name, weight in self.head.items()}}


def save_task_model(path: str | Path, model: TaskModelFolder) -> FileEntries:
    """Write the folder atomically; an existing folder is replaced. Return the sizes and checksums of its files."""
    with atomic_dir(path) as partial:
        entries = write_native_files(partial, model.folder)
        entries[HEAD] = _, crc = write_tensors(partial / HEAD, model.head)
        task = json.dumps({**model.task, CHECKSUM: crc}, indent=1, ensure_ascii=False)
        return {**entries, TASK: write_bytes(partial / TASK, task.encode())}


def load_task_model(path: str | Path) -> TaskModelFolder:
    """Read the folder of a fine-tuned model, or of a fine-tuning run.

    Raises:
        InputError: the folder does not hold a fine-tuned model, is damaged, or is refused by `load_folder`.
    """
    path = resolve_model_dir(path)
    folder = load_folder(path)
    if not (path / TASK).exists():
        raise InputError(
            f"{path} is invalid: it has no {TASK}, so the model was not fine-tuned. Run finetune/run.py first."
        )
    try:
        task = json.loads((path / TASK).read_text("utf-8"))
        if not isinstance(task, dict) or not isinstance(task.get("data"), dict):
            raise InputError(f"{TASK} must hold an object with an object `data`")
        if missing := {"task", "pooling", "labels"} - {*task}:
            raise InputError(f"{TASK} lacks {', '.join(sorted(missing))}")
        expected = task.pop(CHECKSUM, None)
        head = safetensors.torch.load_file(path / HEAD)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise InputError(
            f"{path}: {HEAD} or {TASK} cannot be read: {str(error).splitlines()[0]}. Copy the whole folder again."
        ) from None
    check_checksum(path / HEAD, expected, path / TASK, CHECKSUM)
    check_finite(path / HEAD, head)
    return TaskModelFolder(folder, head, task)


def save_huggingface_task_model(
    path: str | Path,
    model: TaskModelFolder,
    kind: str,
    labels: Sequence[str],
    pooling: str,
    padding_side: Literal["left", "right"],
    card: str | None = None,
) -> None:
    """Write a folder for transformers with the head (`XLNetForSequenceClassification` and others) atomically.

    Args:
        path: the folder.
        model: fine-tuned model.
        kind: kind of the head, a key of `hf_heads.HEADS`.
        labels: class names; empty for regression and multiple choice.
        pooling: method that reduces a row to one vector, for heads that pool.
        padding_side: side on which the tokenizer pads rows.
        card: text of the model card.

    Raises:
        InputError: a setting or a vocabulary that Hugging Face's XLNet cannot represent.
    """
    folder = model.folder
    hf.check_expressible(folder.config)
    settings, weights = hf_heads.head_to_huggingface(folder.config, model.head, kind, labels, pooling)
    with export_folder(path, folder, card, task=model.task) as (partial, tokenizer):
        hf.write_model(partial, folder.config, folder.weights, "permutation", settings, weights)
        write_tokenizer(tokenizer, partial, padding_side, model.task["data"].get("max_seq_len"))
