"""The model of a task: the pretrained backbone, read from its content stream, and a head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from finetune.data.batching import Part, Parts
from finetune.tasks.base import Task
from xlpre.model.backbone import Backbone
from xlpre.model.config import ModelConfig
from xlpre.model.memory import Memory, initial_memory


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
        read = [(last, *self._memory(earlier, last)) for *earlier, last in (part.windows() for part in batch.parts)]
        ids = torch.cat([last.ids.flatten() for last, *_ in read])
        looked_up = self.backbone.embedding(ids[None])[0].split([last.ids.numel() for last, *_ in read])
        losses = [
            self.task.losses(self.head, self._hidden(last, memory, seen, vectors.view(*last.ids.shape, -1)), last)
            for (last, memory, seen), vectors in zip(read, looked_up, strict=True)
        ]
        return torch.cat(losses).sum() * batch.scale

    @torch.no_grad()
    def answer(self, part: Part) -> dict[str, Tensor]:
        """The task's outputs for each item, and `loss` (n,) where the truth is known."""
        *earlier, last = part.windows()
        hidden = self._hidden(last, *self._memory(earlier, last))
        found = self.task.outputs(self.head, hidden, last)
        if part.answers:
            found["loss"] = self.task.losses(self.head, hidden, last)
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

    @torch.no_grad()
    def _memory(self, earlier: Sequence[Part], last: Part) -> tuple[Memory, Tensor]:
        """What the `last` window remembers of the `earlier` ones, and how many tokens of each row (B,) these had.

        Memory has no gradient, as in pretraining: an update costs the graph of one window, however long the text.
        """
        wanted, like = last.reading.mem_len, self.backbone.mask_embedding
        before = sum(window.ids.size(1) for window in earlier)
        mem_len = min(self.shape.mem_len if wanted is None else wanted, before)
        memory = initial_memory(self.shape, len(last.ids), mem_len=mem_len, device=like.device, dtype=like.dtype)
        seen = last.ids.new_zeros(len(last.ids))
        for window in earlier:  # padding is on the left, so that what a row has seen are memory's last columns
            batch = window.batch(window.ids.new_zeros(len(seen), 1), seen, reuse_len=window.ids.size(1))
            _, memory = self.backbone(batch, memory)
            seen = seen + (~window.padding).sum(1)
        return memory, seen

    def _hidden(self, part: Part, memory: Memory, seen: Tensor, vectors: Tensor | None = None) -> Tensor:
        """(B, P, D) hidden states at what the head reads of a window."""
        hidden, _ = self.backbone(part.batch(self.task.positions(self.head, part), seen), memory, vectors)
        return hidden
