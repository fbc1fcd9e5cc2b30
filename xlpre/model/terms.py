"""The score of a query and a key is a sum of terms: content + position + segment. An ablation leaves one out."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from xlpre.model.geometry import Geometry


class ScoreTerm(nn.Module):
    """One term of the sum.

    Args:
        n_head: H.
        d_head: E.
    """

    def __init__(self, n_head: int, d_head: int) -> None:
        super().__init__()
        self.n_head, self.d_head = n_head, d_head

    def scaled(self, query: Tensor) -> Tensor:
        """Queries (B, N, H, E) times 1/sqrt(E)."""
        return query * self.d_head**-0.5

    def forward(self, query: Tensor, content_key: Tensor, geometry: Geometry) -> Tensor:
        """Scores (B, H, N, K) of queries (B, N, H, E) and content keys (B, K, H, E)."""
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

    def scaled(self, query: Tensor) -> Tensor:
        """Queries (B, N, H, E) with the bias, times 1/sqrt(E)."""
        return super().scaled(query + self.r_bias)


class PlainContentTerm(ScoreTerm):
    """q . k, the whole score of an absolute Transformer."""

    def forward(self, query: Tensor, content_key: Tensor, geometry: Geometry) -> Tensor:
        """Scores (B, H, N, K)."""
        return self.scaled(query).transpose(1, 2) @ content_key.permute(0, 2, 3, 1)


class ContentTerm(BiasedTerm, PlainContentTerm):
    """(q + r_w) . k, the content term of the relative score."""
