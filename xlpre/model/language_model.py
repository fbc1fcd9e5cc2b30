"""A language model: backbone and softmax, from a batch to its loss."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from xlpre.batch import Batch
from xlpre.model.backbone import Backbone
from xlpre.model.config import ModelConfig
from xlpre.model.memory import Past
from xlpre.model.output import build_output


class LanguageModel(nn.Module):
    """Predicts `batch.targets`. See Backbone for `two_streams`."""

    def __init__(self, config: ModelConfig, two_streams: bool) -> None:
        super().__init__()
        self.config = config
        self.backbone = Backbone(config, two_streams)
        self.output = build_output(config, self.backbone.embedding)

    def forward(self, batch: Batch, memory: Past) -> tuple[Tensor, Past]:
        """The mean loss over targets, in nats, and memory for the next window."""
        hidden, memory = self.backbone(batch, memory)
        losses = self.output(hidden, batch.targets)
        return (losses * batch.target_weights).sum() / batch.target_weights.sum(), memory

    def logits(self, batch: Batch, memory: Past) -> tuple[Tensor, Past]:
        """(B, P, V) scores at the targets, whose softmax is the distribution, and memory for the next window."""
        hidden, memory = self.backbone(batch, memory)
        return self.output(hidden), memory


def without_data(config: ModelConfig, two_streams: bool) -> LanguageModel:
    """A model on torch's meta device: names and shapes, no numbers, no memory and no time."""
    attention = "sdpa" if config.attention == "cpu" else config.attention  # that one looks at numbers
    with torch.device("meta"):
        return LanguageModel(dataclasses.replace(config, init="published", attention=attention), two_streams)
