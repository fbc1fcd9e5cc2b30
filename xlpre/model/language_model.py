"""Language model: backbone and softmax. It computes the losses of a batch."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from xlpre.batch import Batch
from xlpre.common.errors import InputError
from xlpre.model.backbone import Backbone
from xlpre.model.config import ModelConfig
from xlpre.model.lm_head import build_lm_head
from xlpre.model.memory import BaseMemory
from xlpre.model.next_sentence import NextSentence


class LanguageModel(nn.Module):
    """Model that predicts `batch.targets` and, optionally, `batch.pair_label`.

    Args:
        config: shape of the model.
        two_streams: see Backbone.
        next_sentence: also predict `batch.pair_label` (segment B follows segment A).

    Attributes:
        auxiliary_heads: heads that read <cls>, by name.
    """

    def __init__(self, config: ModelConfig, two_streams: bool, next_sentence: bool = False) -> None:
        super().__init__()
        self.config = config
        self.backbone = Backbone(config, two_streams, reads_cls=next_sentence)
        self.lm_head = build_lm_head(config, self.backbone.word_embedding)
        self.auxiliary_heads = nn.ModuleDict({"next_sentence": NextSentence(config)} if next_sentence else {})

    def forward(self, batch: Batch, memory: BaseMemory) -> tuple[Any, ...]:
        """Compute the losses of a batch. Training minimizes their sum.

        Args:
            batch: B windows.
            memory: see Backbone.

        Returns:
            Mean loss over the targets in nats, weighted by `batch.target_weights`; memory for the next window; then the mean loss of each
            auxiliary head.

        Raises:
            InputError: memory does not fit the model or the batch; or, on a CPU, a token id is outside the vocabulary (on a GPU, such an id
                aborts the process).
        """
        self.backbone.check_inputs(batch, memory)
        embeddings, table = self.backbone.word_embedding(batch.input_ids, with_table=True)
        hidden, memory = self.backbone(batch, memory, embeddings)
        loss, *auxiliary_losses = self.losses(hidden, batch, table)
        return loss, memory, *auxiliary_losses

    def losses(self, hidden: Tensor, batch: Batch, table: Tensor | None = None) -> tuple[Tensor, ...]:
        """Compute the losses from hidden states.

        Args:
            hidden: (B, n_cls + P, D) output of the backbone for `batch`.
            batch: B windows.
            table: second result of `word_embedding(..., with_table=True)`, see TokenEmbedding.

        Returns:
            Mean loss over the targets, weighted by `batch.target_weights`, then for each auxiliary head its mean loss over the batch rows.

        Raises:
            InputError: targets, weights and positions of targets differ in shape.
        """
        if not batch.targets.shape == batch.target_weights.shape == batch.target_positions.shape:
            raise InputError(
                f"Batch.targets of shape {tuple(batch.targets.shape)} with target_weights of shape {tuple(batch.target_weights.shape)} is "
                f"invalid: both need the shape of target_positions, {tuple(batch.target_positions.shape)}. Replace all three together."
            )
        losses = self.lm_head(hidden[:, self.backbone.n_cls :], batch.targets, table)
        mean = (losses * batch.target_weights).sum() / batch.target_weights.sum()
        return mean, *(head(hidden[:, 0], batch.pair_label).mean() for head in self.auxiliary_heads.values())

    def logits(self, batch: Batch, memory: BaseMemory) -> tuple[Any, ...]:
        """Compute the logits of a batch.

        Args:
            batch: B windows.
            memory: see Backbone.

        Returns:
            (B, P, V) logits at the targets (log-probabilities with an adaptive softmax), memory for the next window, then (B, classes)
            logits of each auxiliary head.
        """
        hidden, memory = self.backbone(batch, memory)
        auxiliary_logits = (head(hidden[:, 0]) for head in self.auxiliary_heads.values())
        return self.lm_head(hidden[:, self.backbone.n_cls :]), memory, *auxiliary_logits


def meta_model(config: ModelConfig, two_streams: bool, next_sentence: bool = False) -> LanguageModel:
    """Build a model on torch's meta device: parameters have names and shapes but no data."""
    # the cpu backend reads values, which meta tensors do not have
    attention_backend = "sdpa" if config.attention_backend == "cpu" else config.attention_backend
    with torch.device("meta"):
        shape = dataclasses.replace(config, attention_backend=attention_backend)
        return LanguageModel(shape, two_streams, next_sentence)
