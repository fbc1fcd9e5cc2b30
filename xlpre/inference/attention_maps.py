"""Attention probabilities of a model by layer and head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from xlpre.batch import Batch
from xlpre.model.attention import RelativeAttention
from xlpre.model.dropout import without_dropout
from xlpre.model.kernels.reference import ReferenceBackend
from xlpre.model.language_model import LanguageModel
from xlpre.model.memory import BaseMemory


def attention_maps(model: LanguageModel, batch: Batch, memory: BaseMemory) -> Tensor:
    """Compute the attention probabilities of the rows that predict the targets.

    These are rows of the query stream in a permutation model, and of the content stream in other models. The model runs with its own
    backend. A hook computes the probabilities of each layer with the reference backend, from the same inputs.

    Args:
        model: language model.
        batch: B windows with P targets each, on the device of the model.
        memory: see Backbone.

    Returns:
        (L, B, H, P, K) float32 on the CPU. The keys are memory, then the window. Rows sum to 1, or to 0 if a target sees no key.
    """
    rows: list[Tensor] = []

    def record(module: RelativeAttention, args: tuple[Any, ...]) -> None:
        hidden, key, _, backend, score_terms = args
        reference = ReferenceBackend.prepare(backend.attn_meta, key.dtype)
        probabilities = reference.probabilities(module.scores(hidden, key, backend.attn_meta, score_terms), key)
        is_content = not model.backbone.two_streams and backend.attn_meta.n_content > 0
        rows.append(_target_rows(probabilities.float(), batch, is_content).cpu())

    layers: Any = model.backbone.layers
    hooks = [layer.attention.register_forward_pre_hook(record) for layer in layers]
    try:
        with without_dropout(model), torch.no_grad():
            model.backbone(batch, memory)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(rows)


def _target_rows(probabilities: Tensor, batch: Batch, is_content: bool) -> Tensor:
    """Return the rows of the targets: (B, H, N, K) -> (B, H, P, K).

    Args:
        probabilities: attention probabilities.
        batch: the batch.
        is_content: the N rows are the T content rows. False: the last P rows are those of the targets.
    """
    B, H, N, K = probabilities.shape
    P = batch.target_positions.size(1)
    if not is_content:
        return probabilities[:, :, N - P :]
    return probabilities.gather(2, batch.target_positions[:, None, :, None].expand(B, H, P, K))
