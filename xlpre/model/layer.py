"""Transformer layer: relative attention and feed-forward, with normalization after each residual sum (as published) or before each part."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from xlpre.model.attention import RelativeAttention
from xlpre.model.attention_mask import AttentionMeta
from xlpre.model.config import ModelConfig
from xlpre.model.dropout import Dropout
from xlpre.model.feedforward import build_feed_forward
from xlpre.model.kernels.base import AttentionBackend
from xlpre.model.memory import KeyValue, LayerContext
from xlpre.model.norm import AddNorm, layer_norm
from xlpre.model.positions import SCHEMES, SharedBiases


class PostNormLayer(nn.Module):
    """Layer with normalization after each residual sum. The content and the query stream share all weights.

    Args:
        config: shape of the model.
        shared: by term, the biases that all layers share; None for a term without them.
        index: index of the layer, from 0.
    """

    _norm: Callable[[ModelConfig], nn.LayerNorm] = AddNorm

    def __init__(self, config: ModelConfig, shared: SharedBiases, index: int) -> None:
        super().__init__()
        self.position_embedding = SCHEMES[config.positions].embedding(config, index)
        self.attention = RelativeAttention(config, shared)
        self.attention_norm = self._norm(config)
        self.feed_forward = build_feed_forward(config)
        self.feed_forward_norm = self._norm(config)

    def keys_values(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Project hidden states (B, n, D), of memory or of content, to keys and values, (B, n, H, E) each."""
        return self.attention.keys_values(hidden)

    def forward(
        self,
        rows: Tensor,
        context: LayerContext,
        backend: AttentionBackend,
        score_terms: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """Compute N query rows.

        Args:
            rows: (B, N, D).
            context: hidden states, or keys and values, of memory and content.
            backend: attention backend, prepared for these rows.
            score_terms: see RelativeAttention.

        Returns:
            (B, N, D).
        """
        rows, key, value = self._attention_inputs(rows, context, backend.attn_meta)
        fused = backend.has_fused_ops
        rows = self.attention_norm(rows, self.attention(rows, key, value, backend, score_terms), fused)
        return self.feed_forward_norm(rows, self.feed_forward(rows, fused), fused)

    def _attention_inputs(
        self, rows: Tensor, context: LayerContext, attn_meta: AttentionMeta
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return query rows with their positions added (B, N, D), and keys and values (B, K, H, E)."""
        rows, context = self.position_embedding(rows, context, attn_meta)
        if isinstance(context, KeyValue):
            return rows, context.key, context.value
        # memory is projected separately from content, because no gradient with respect to it is needed
        memory, content = self.keys_values(context.memory), self.keys_values(context.content)
        key, value = (torch.cat(both, dim=1) for both in zip(memory, content, strict=True))
        return rows, key, value


class PreNormLayer(PostNormLayer):
    """Layer with normalization before attention and feed-forward (Transformer-XL's `pre_lnorm`). Its output is not normalized."""

    _norm = staticmethod(layer_norm)

    def __init__(self, config: ModelConfig, shared: SharedBiases, index: int) -> None:
        super().__init__(config, shared, index)
        self.dropout = Dropout(config.dropout)

    def keys_values(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Normalize hidden states (B, n, D), of memory or of content, and project them to keys and values, (B, n, H, E) each."""
        return self.attention.keys_values(self.attention_norm(hidden))

    def forward(
        self,
        rows: Tensor,
        context: LayerContext,
        backend: AttentionBackend,
        score_terms: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """Compute N query rows, (B, N, D) -> (B, N, D). See PostNormLayer."""
        rows, key, value = self._attention_inputs(rows, context, backend.attn_meta)
        rows = rows + self.dropout(self.attention(self._query_input(rows), key, value, backend, score_terms))
        return rows + self.dropout(self.feed_forward(self.feed_forward_norm(rows), backend.has_fused_ops))

    def _query_input(self, rows: Tensor) -> Tensor:
        return self.attention_norm(rows)


class PreNormKeysLayer(PreNormLayer):
    """PreNormLayer in which keys and values are computed from normalized states, but queries from states that are not normalized."""

    def _query_input(self, rows: Tensor) -> Tensor:
        return rows


LAYERS: dict[str, type[PostNormLayer]] = {
    "post": PostNormLayer,
    "pre": PreNormLayer,
    "pre_keys": PreNormKeysLayer,
}
