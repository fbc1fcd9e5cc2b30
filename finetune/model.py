"""The model of a task: the pretrained backbone, read from its content stream, and a head."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from finetune.batches import Part, Parts
from finetune.task import Task
from xlpre.model.backbone import Backbone
from xlpre.model.config import ModelConfig
from xlpre.model.memory import first_memory


class TaskModel(nn.Module):
    """Backbone and head; parameters are named `backbone.*` and `head.*`.

    Args:
        shape: of the backbone.
        task: whose head, and how it is used.
    """

    def __init__(self, shape: ModelConfig, task: Task) -> None:
        super().__init__()
        self.shape, self.task = shape, task
        self.backbone = Backbone(shape, two_streams=False)
        self.head = task.head(shape)

    def forward(self, batch: Parts) -> Tensor:
        """The loss of what one process reads in one micro-step."""
        ids = torch.cat([part.ids.flatten() for part in batch.parts])
        looked_up = self.backbone.embedding(ids[None])[0].split([part.ids.numel() for part in batch.parts])
        losses = [
            self.task.losses(self.head, self._hidden(part, vectors.view(*part.ids.shape, -1)), part)
            for part, vectors in zip(batch.parts, looked_up, strict=True)
        ]
        return torch.cat(losses).sum() * batch.scale

    @torch.no_grad()
    def answer(self, part: Part) -> dict[str, Tensor]:
        """The task's outputs for each item, and `loss` (n,) where the truth is known."""
        hidden = self._hidden(part)
        found = self.task.outputs(self.head, hidden, part)
        if part.answers:
            found["loss"] = self.task.losses(self.head, hidden, part)
        return found

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.backbone.mask_embedding.device

    @torch.no_grad()
    def put(self, weights: Mapping[str, Tensor]) -> None:
        """Copy the `weights` of parameters that have them; others stay as they are."""
        for name, parameter in self.named_parameters():
            if name in weights:
                parameter.copy_(weights[name])

    def _hidden(self, part: Part, vectors: Tensor | None = None) -> Tensor:
        like = self.backbone.mask_embedding
        memory = first_memory(self.shape, len(part.ids), mem_len=0, device=like.device, dtype=like.dtype)
        hidden, _ = self.backbone(part.batch(self.task.positions(self.head, part)), memory, vectors)
        return hidden
