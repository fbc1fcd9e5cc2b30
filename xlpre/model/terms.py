"""The score of a query and a key is a sum of terms: content + position + segment. An ablation leaves one out."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from xlpre.model.geometry import Geometry


class ScoreTerm(nn.Module):
    """One term of the sum, with a bias of its own that is added to every query.

    Args:
        n_head: H.
        d_head: E.
        r_bias: a bias shared by all layers, or None for one of this layer's own.
    """

    def __init__(self, n_head: int, d_head: int, r_bias: nn.Parameter | None) -> None:
        super().__init__()
        self.n_head, self.d_head = n_head, d_head
        self.r_bias = nn.Parameter(torch.empty(n_head, d_head)) if r_bias is None else r_bias

    def biased(self, query: Tensor) -> Tensor:
        """Queries (B, N, H, E) with the bias, scaled by 1/sqrt(E)."""
        return (query + self.r_bias) * self.d_head**-0.5

    def forward(self, query: Tensor, content_key: Tensor, geometry: Geometry) -> Tensor:
        """Scores (B, H, N, K) of queries (B, N, H, E) and content keys (B, K, H, E)."""
        raise NotImplementedError


class ContentTerm(ScoreTerm):
    """(q + r_w) . k, the content term of the score."""

    def forward(self, query: Tensor, content_key: Tensor, geometry: Geometry) -> Tensor:
        """Scores (B, H, N, K)."""
        return self.biased(query).transpose(1, 2) @ content_key.permute(0, 2, 3, 1)
