"""A language model: backbone and softmax, from a batch to its losses."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from xlpre.batch import Batch
from xlpre.model.backbone import Backbone
from xlpre.model.config import ModelConfig
from xlpre.model.lm_head import build_lm_head
from xlpre.model.memory import Past
from xlpre.model.next_sentence import NextSentence


class LanguageModel(nn.Module):
    """Predicts `batch.targets` and, if asked to, whether segment B follows A.

    Args:
        config: its shape.
        two_streams: see Backbone.
        next_sentence: it also learns `batch.pair_label`.

    Attributes:
        auxiliary: by name, the heads that read <cls>.
    """

    def __init__(self, config: ModelConfig, two_streams: bool, next_sentence: bool = False) -> None:
        super().__init__()
        self.config = config
        self.backbone = Backbone(config, two_streams, reads_cls=next_sentence)
        self.lm_head = build_lm_head(config, self.backbone.word_embedding)
        self.auxiliary_heads = nn.ModuleDict({"next_sentence": NextSentence(config)} if next_sentence else {})

    def forward(self, batch: Batch, memory: Past) -> tuple[Any, ...]:
        """The mean loss over targets, in nats, memory for the next window, then the losses of `auxiliary`.

        What is minimised is the sum of all losses.

        Raises:
            ValueError: see Backbone; ids that are none of the vocabulary's (on a GPU they end the process).
        """
        self.backbone.check(batch, memory)
        vectors, table = self.backbone.word_embedding(batch.input_ids, with_table=True)
        hidden, memory = self.backbone(batch, memory, vectors)
        loss, *others = self.losses(hidden, batch, table)
        return loss, memory, *others

    def losses(self, hidden: Tensor, batch: Batch, table: Tensor | None = None) -> tuple[Tensor, ...]:
        """The mean loss over targets, then those of `auxiliary` over rows, of what the backbone made of `batch`, with the table that
        the embedding gave for the softmax, if it did.
        """
        if not batch.targets.shape == batch.target_weights.shape == batch.target_positions.shape:
            raise ValueError(
                f"Batch.targets {tuple(batch.targets.shape)} and target_weights {tuple(batch.target_weights.shape)} must have one for each "
                f"of target_positions {tuple(batch.target_positions.shape)}; replace them together"
            )
        losses = self.lm_head(hidden[:, self.backbone.n_cls :], batch.targets, table)
        mean = (losses * batch.target_weights).sum() / batch.target_weights.sum()
        return mean, *(head(hidden[:, 0], batch.pair_label).mean() for head in self.auxiliary_heads.values())

    def logits(self, batch: Batch, memory: Past) -> tuple[Any, ...]:
        """(B, P, V) scores at the targets, whose softmax is the distribution, memory for the next window, then the scores of
        `auxiliary`, (B, classes) each.
        """
        hidden, memory = self.backbone(batch, memory)
        others = (head(hidden[:, 0]) for head in self.auxiliary_heads.values())
        return self.lm_head(hidden[:, self.backbone.n_cls :]), memory, *others


def meta_model(config: ModelConfig, two_streams: bool, next_sentence: bool = False) -> LanguageModel:
    """A model on torch's meta device: names and shapes, no numbers, no memory and no time."""
    attention = "sdpa" if config.attention_backend == "cpu" else config.attention_backend  # that one looks at numbers
    with torch.device("meta"):
        shape = dataclasses.replace(config, init_scheme="published", attention_backend=attention)
        return LanguageModel(shape, two_streams, next_sentence)
