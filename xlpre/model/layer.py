"""A layer: relative attention and feed-forward, each added to its input; normalised after the sum (as published) or before it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from xlpre.model.attention import RelativeAttention
from xlpre.model.attention_mask import AttentionMeta
from xlpre.model.config import ModelConfig
from xlpre.model.dropout import Dropout
from xlpre.model.feedforward import build_feed_forward
from xlpre.model.memory import Attended
from xlpre.model.norm import AddNorm, layer_norm
from xlpre.model.positions import SCHEMES, SharedBiases


class PostNormLayer(nn.Module):
    """Both streams share every weight of it.

    Args:
        config: the model's shape.
        shared: see RelativeAttention.
        index: which layer it is, from 0.
    """

    _norm: Callable[[ModelConfig], nn.LayerNorm] = AddNorm

    def __init__(self, config: ModelConfig, shared: SharedBiases, index: int) -> None:
        super().__init__()
        self.position_embedding = SCHEMES[config.positions].places(config, index)
        self.attention = RelativeAttention(config, shared)
        self.attention_norm = self._norm(config)
        self.feed_forward = build_feed_forward(config)
        self.feed_forward_norm = self._norm(config)

    def keys_values(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, (B, M, H, E) each, of hidden states (B, M, D) with their places."""
        return self.attention.keys_values(states)

    def forward(self, rows: Tensor, attended: Attended, attn_meta: AttentionMeta) -> Tensor:
        """(B, N, D) rows -> (B, N, D); see RelativeAttention."""
        rows, attended = self.position_embedding(rows, attended, attn_meta)
        key, value = attended.keys_values(self.keys_values)
        rows = self.attention_norm(rows, self.attention(rows, key, value, attn_meta))
        return self.feed_forward_norm(rows, self.feed_forward(rows))


class PreNormLayer(PostNormLayer):
    """Norms come before attention and feed-forward; nothing is normalised after the last layer (Transformer-XL's `pre_lnorm`)."""

    _norm = staticmethod(layer_norm)

    def __init__(self, config: ModelConfig, shared: SharedBiases, index: int) -> None:
        super().__init__(config, shared, index)
        self.dropout = Dropout(config.dropout)

    def keys_values(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, (B, M, H, E) each, of hidden states (B, M, D) with their places."""
        return self.attention.keys_values(self.attention_norm(states))

    def forward(self, rows: Tensor, attended: Attended, attn_meta: AttentionMeta) -> Tensor:
        """(B, N, D) rows -> (B, N, D); see RelativeAttention."""
        rows, attended = self.position_embedding(rows, attended, attn_meta)
        key, value = attended.keys_values(self.keys_values)
        rows = rows + self.dropout(self.attention(self._queries(rows), key, value, attn_meta))
        return rows + self.dropout(self.feed_forward(self.feed_forward_norm(rows)))

    def _queries(self, rows: Tensor) -> Tensor:
        return self.attention_norm(rows)


class PreNormKeysLayer(PreNormLayer):
    """The same, but queries are made of what was not normalised."""

    def _queries(self, rows: Tensor) -> Tensor:
        return rows


LAYERS: dict[str, type[PostNormLayer]] = {
    "post": PostNormLayer,
    "pre": PreNormLayer,
    "pre_keys": PreNormKeysLayer,
}
