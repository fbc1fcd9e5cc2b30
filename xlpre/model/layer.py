"""A layer: relative attention and feed-forward, each added to its input and normalised after (post-norm, as published)."""

from __future__ import annotations

from torch import Tensor, nn

from xlpre.model.attention import RelativeAttention, SharedBiases
from xlpre.model.config import ModelConfig
from xlpre.model.feedforward import FeedForward
from xlpre.model.geometry import Geometry

NORM_EPS = 1e-12


class Layer(nn.Module):
    """Both streams share every weight of it."""

    def __init__(self, config: ModelConfig, shared: SharedBiases) -> None:
        super().__init__()
        self.attention = RelativeAttention(config, shared)
        self.attention_norm = nn.LayerNorm(config.d_model, eps=NORM_EPS)
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = nn.LayerNorm(config.d_model, eps=NORM_EPS)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, rows: Tensor, content: Tensor, memory: Tensor, geometry: Geometry) -> Tensor:
        """(B, N, D) rows -> (B, N, D); see RelativeAttention."""
        rows = self.attention_norm(rows + self.dropout(self.attention(rows, content, memory, geometry)))
        return self.feed_forward_norm(rows + self.feed_forward(rows))
