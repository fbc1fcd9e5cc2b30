"""Terms of the attention score: content + position + segment. An ablation leaves a term out of the sum.

    score[n, k] = scale * ((q[n] + r_w_bias) . key[k]
                         + (q[n] + r_r_bias) . pos_key[d] + pos_offset[d]        d: distance from n to k
                         + (q[n] + r_s_bias) . segment_diff)                     if n and k are in different segments

The biases have the names of the XLNet code. Attention backends (model/kernels) compute the sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class ScoreTerms:
    """Inputs of the attention scores of N query rows. Fields that are None are left out of the sum.

    Attributes:
        query: (B, N, H, E).
        scale: 1/sqrt(E).
        r_w_bias: (H, E), bias of the content term.
        r_r_bias: (H, E), bias of the position term.
        pos_key: (2, R, H, E) keys of the distances from K down to 1 - T, for sequences that are read forward and backward.
        pos_offset: (2, R, H), added to the scores of the distances.
        r_s_bias: (H, E), bias of the segment term.
        segment_diff: (H, E), embedding of "different segment" minus the embedding of "same segment".
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
        offset_only = self.pos_offset is not None and self.pos_key is None
        assert not offset_only, "pos_offset needs pos_key; pass zeros as pos_key for a term of offsets alone"

    def with_bias(self, bias: Tensor | None) -> Tensor:
        """Add a bias to the queries and scale them: (B, N, H, E)."""
        return (self.query if bias is None else self.query + bias) * self.scale


class ScoreTerm(nn.Module):
    """Base class of the terms of the score.

    Args:
        n_head: H.
        d_head: E.
    """

    def __init__(self, n_head: int, d_head: int) -> None:
        super().__init__()
        self.n_head, self.d_head = n_head, d_head

    def forward(self, pos_encoding: Tensor, n_keys: int) -> dict[str, Tensor]:
        """Return the fields of `ScoreTerms` that this term sets.

        Args:
            pos_encoding: (2, R, ...) encodings of all distances.
            n_keys: K.
        """
        raise NotImplementedError


class BiasedTerm(ScoreTerm):
    """Base class of the terms that add a learned bias to every query.

    Args:
        n_head: H.
        d_head: E.
        r_bias: (H, E) bias that all layers share. None creates a bias for this layer only.
    """

    def __init__(self, n_head: int, d_head: int, r_bias: nn.Parameter | None) -> None:
        super().__init__(n_head, d_head)
        self.r_bias = nn.Parameter(torch.empty(n_head, d_head)) if r_bias is None else r_bias


class ContentTerm(BiasedTerm):
    """(q + r_w) . k, the content term of the relative score."""

    def forward(self, pos_encoding: Tensor, n_keys: int) -> dict[str, Tensor]:
        """Return the bias, `r_w_bias`."""
        return {"r_w_bias": self.r_bias}
