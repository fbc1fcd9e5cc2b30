"""Model of a task: the pretrained backbone, without the query stream, and the head of the task."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from finetune.config import TaskDataConfig, TaskModelConfig
from finetune.data.batching import MicroStep, PaddedBatch
from finetune.tasks.base import Task
from finetune.tasks.registry import build_task
from xlpre.common.errors import InputError
from xlpre.config.loader import config_from_mapping
from xlpre.conversion.task_model_folder import HEAD, TASK, TaskModelFolder, load_task_model
from xlpre.model.backbone import Backbone
from xlpre.model.config import ModelConfig
from xlpre.model.kernels.backend import resolve_backend
from xlpre.model.memory import Memory
from xlpre.training.startup import TrainingContext


class TaskModel(nn.Module):
    """Backbone and head. Parameters are named `backbone.*` and `head.*`.

    Args:
        model_config: configuration of the backbone.
        task: the task, which builds the head and computes losses and outputs with it.
    """

    def __init__(self, model_config: ModelConfig, task: Task) -> None:
        super().__init__()
        self.model_config, self.task = model_config, task
        self.backbone = Backbone(model_config, two_streams=False)
        self.head = task.build_head(model_config)

    def forward(self, micro_step: MicroStep) -> Tensor:
        """Return the loss of a micro-step: the sum over its features, times `micro_step.loss_scale`."""
        windows = [batch.windows() for batch in micro_step.batches]
        inputs = [(last, *self._read_memory(earlier, last)) for *earlier, last in windows]
        # one embedding lookup for all batches, so that the gradient of the embedding is computed once
        ids = torch.cat([last.input_ids.flatten() for last, *_ in inputs])
        embeddings = self.backbone.word_embedding(ids[None])[0].split([last.input_ids.numel() for last, *_ in inputs])
        losses = []
        for (last, memory, n_seen), embedding in zip(inputs, embeddings, strict=True):
            hidden = self._hidden(last, memory, n_seen, embedding.view(*last.input_ids.shape, -1))
            losses.append(self.task.compute_losses(self.head, hidden, last))
        return torch.cat(losses).sum() * micro_step.loss_scale

    @torch.no_grad()
    def predict(self, batch: PaddedBatch) -> dict[str, Tensor]:
        """Return the outputs of the task, one entry per feature, and `loss` (n,) if the labels are known."""
        *earlier, last = batch.windows()
        hidden = self._hidden(last, *self._read_memory(earlier, last))
        outputs = self.task.compute_outputs(self.head, hidden, last)
        if batch.labels:
            outputs["loss"] = self.task.compute_losses(self.head, hidden, last)
        return outputs

    @torch.no_grad()
    def load_available(self, weights: Mapping[str, Tensor]) -> None:
        """Copy `weights` into the parameters of the same name. Parameters without a weight keep their values."""
        for name, parameter in self.named_parameters():
            if name in weights:
                parameter.copy_(weights[name])

    @torch.no_grad()
    def _read_memory(self, earlier: Sequence[PaddedBatch], last: PaddedBatch) -> tuple[Memory, Tensor]:
        """Read the `earlier` windows. Return the memory after them, and the number of tokens of each row in them, (B,), without padding.

        Memory has no gradient, as in pretraining. So an optimizer step stores the graph of the last window only, for texts of any
        length.
        """
        requested = last.chunking.mem_len
        n_positions = sum(window.input_ids.size(1) for window in earlier)
        mem_len = min(self.model_config.mem_len if requested is None else requested, n_positions)
        memory = self.backbone.initial_memory(len(last.input_ids), mem_len)
        n_seen = last.input_ids.new_zeros(len(last.input_ids))
        for window in earlier:  # padding is on the left, so the tokens are at the last positions of memory
            inputs = window.model_batch(
                window.input_ids.new_zeros(len(n_seen), 1), n_seen, reuse_len=window.input_ids.size(1)
            )
            _, memory = self.backbone(inputs, memory)
            n_seen = n_seen + (~window.padding_mask).sum(1)
        return memory, n_seen

    def _hidden(self, window: PaddedBatch, memory: Memory, n_seen: Tensor, embedding: Tensor | None = None) -> Tensor:
        """Return the hidden states (B, P, D) at the positions that the head reads."""
        inputs = window.model_batch(self.task.head_positions(self.head, window), n_seen)
        hidden, _ = self.backbone(inputs, memory, embedding)
        return hidden


def open_task_model(path: Path) -> tuple[TaskModelFolder, Task]:
    """Read a fine-tuned model folder and build its task.

    Args:
        path: the model folder, or the folder of its run.

    Raises:
        InputError: the folder cannot be read, its settings are incomplete or invalid, or its head does not fit the task.
    """
    model = load_task_model(path)
    saved, origin = model.task, f"{path}: {TASK}"
    data = config_from_mapping(TaskDataConfig, saved["data"], origin)
    pooling = config_from_mapping(TaskModelConfig, {"pooling": saved["pooling"]}, origin).pooling
    task = build_task(saved["task"], data, pooling)
    if missing := task.data_settings().keys() - saved["data"].keys():
        raise InputError(f"{origin} is incomplete: `data` has no {', '.join(sorted(missing))}. Copy the original file.")
    check_head(path, model.head, task, model.folder.config)
    return model, task


def check_head(path: Path, head: Mapping[str, Tensor], task: Task, model_config: ModelConfig) -> None:
    """Raise InputError unless the weights of a `head` have the names and shapes of the task's head for `model_config`."""
    with torch.device("meta"):
        expected = {name: tuple(weight.shape) for name, weight in task.build_head(model_config).named_parameters()}
    actual = {name: tuple(weight.shape) for name, weight in head.items()}
    for name in sorted(expected.keys() | actual.keys()):
        if actual.get(name) != expected.get(name):
            saved, required = (str(shapes.get(name, "missing")) for shapes in (actual, expected))
            raise InputError(
                f"{path}: {name} in {HEAD} is {saved}, but the head of {task.name} needs {required}. Copy the whole original folder."
            )


def resolve_shared_backend(
    model_config: ModelConfig, dtype: torch.dtype, context: TrainingContext, saved: str | None = None
) -> ModelConfig:
    """Return `model_config` with a concrete attention backend. Rank 0 chooses it for its device, and all processes use it.

    Args:
        model_config: configuration of the backbone.
        dtype: data type of activations.
        context: device and communication of this process.
        saved: backend that computed the checkpoint to resume from. None: a new run.
    """
    backend: Any = context.comm.call_on_rank_zero(
        lambda: resolve_backend(model_config.attention_backend, context.device, dtype, model_config.head_width, saved)
    )
    return dataclasses.replace(model_config, attention_backend=backend)
