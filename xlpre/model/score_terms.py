"""The score of a query and a key is a sum of terms: content + position + segment. An ablation leaves one out.

score[n, k] = scale * ((q[n] + r_w_bias) . key[k]
+ (q[n] + r_r_bias) . pos_key[d] + pos_offset[d]        d: the distance of n and k
+ (q[n] + r_s_bias) . segment_diff, where the segments of n and k differ)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from xlpre.model.attention_mask import AttentionMeta


@dataclass(frozen=True)
class ScoreTerms:
    """What the scores of N queries are made of; how they are computed is the backend's affair (model/kernels). None: left out.

    Attributes:
        query: (B, N, H, E).
        scale: 1/sqrt(E).
        r_w_bias: (H, E).
        r_r_bias: (H, E).
        pos_key: (2, R, H, E) keys of distances from K down to 1 - T, forward and backward.
        pos_offset: (2, R, H), added to what `pos_key` give.
        r_s_bias: (H, E).
        segment_diff: (H, E).
    """

    query: Tensor
    scale: float
    r_w_bias: Tensor | None = None
    r_r_bias: Tensor | None = None
    pos_key: Tensor | None = None
    pos_offset: Tensor | None = None
    r_s_bias: Tensor | None = None
    segment_diff: Tensor | None = None

    def __post_init__(self) -> None:
        alone = self.pos_offset is not None and self.pos_key is None
        assert not alone, (
            "backends add pos_offset to what pos_key give; a term of offsets alone hands over keys of zeros too"
        )

    def with_bias(self, bias: Tensor | None) -> Tensor:
        """Scaled queries (B, N, H, E) with a bias."""
        return (self.query if bias is None else self.query + bias) * self.scale


class ScoreTerm(nn.Module):
    """One term of the sum.

    Args:
        n_head: H.
        d_head: E.
    """

    def __init__(self, n_head: int, d_head: int) -> None:
        super().__init__()
        self.n_head, self.d_head = n_head, d_head

    def forward(self, attn_meta: AttentionMeta) -> dict[str, Tensor]:
        """What of Scores it decides."""
        raise NotImplementedError


class BiasedTerm(ScoreTerm):
    """A term with a bias of its own that is added to every query.

    Args:
        n_head: H.
        d_head: E.
        r_bias: a bias shared by all layers, or None for one of this layer's own.
    """

    def __init__(self, n_head: int, d_head: int, r_bias: nn.Parameter | None) -> None:
        super().__init__(n_head, d_head)
        self.r_bias = nn.Parameter(torch.empty(n_head, d_head)) if r_bias is None else r_bias


class PlainContentTerm(ScoreTerm):
    """q . k, the whole score of an absolute Transformer."""

    def forward(self, attn_meta: AttentionMeta) -> dict[str, Tensor]:
        """Nothing but the query."""
        return {}


class ContentTerm(BiasedTerm):
    """(q + r_w) . k, the content term of the relative score."""

    def forward(self, attn_meta: AttentionMeta) -> dict[str, Tensor]:
        """Its bias."""
        return {"r_w_bias": self.r_bias}
