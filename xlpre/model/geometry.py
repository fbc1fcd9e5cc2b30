"""Geometry: what attention must know about places, computed once a step and shared by all layers.

Rows are queries: first the T content rows, if any, in their order, then rows at any places of the window (the query stream,
or the rows that are read out).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Geometry:
    """N queries against K = M + T keys.

    Attributes:
        hidden: (B, 1, N, K) bool, keys that a query does not see.
        sees: (B, N, 1) whether a query sees any key, 0 or 1; one that does not outputs zero.
        different: (B, N, K) 1 where query and key are in different segments, else 0; memory is segment 0.
        distances: (2, R, ...) what the position scheme makes of each distance (model/positions.py), for both directions,
            from K down to 1 - T; R = K + T.
        direction: (B,) int64, 0 forward, 1 backward.
        positions: (B, N - n_content) int64, places in the window of the rows after the content rows.
        n_content: T, or 0.
    """

    hidden: Tensor
    sees: Tensor
    different: Tensor
    distances: Tensor
    direction: Tensor
    positions: Tensor
    n_content: int

    @classmethod
    def of(cls, visible: Tensor, different: Tensor, *, dtype: torch.dtype, **places: Any) -> Geometry:
        """From who sees whom and whose segments differ, both (B, N, K) bool; `places` are the other attributes."""
        sees = visible.any(-1, keepdim=True)
        return cls(hidden=~visible[:, None], sees=sees.to(dtype), different=different.to(dtype), **places)

    def align(self, by_distance: Tensor) -> Tensor:
        """From scores by distance (B, H, N, R) to scores by key (B, H, N, K)."""
        n_keys = self.hidden.size(-1)
        content, others = by_distance.split([self.n_content, by_distance.size(2) - self.n_content], dim=2)
        aligned = [_shift(content, n_keys)] if self.n_content else []
        if others.size(2):
            aligned.append(_pick(others, self.positions, n_keys))
        return torch.cat(aligned, dim=2) if len(aligned) > 1 else aligned[0]

    def places(self) -> Tensor:
        """(2, K, ...) codes of the keys' places, which are distances to the window's last token."""
        return self.distances[:, 1 : self.hidden.size(-1) + 1]

    def of_rows(self, of_content: Tensor) -> Tensor:
        """(B, N, D) from (B, T, D): what stands at the place of each row."""
        others = of_content.gather(1, self.positions[:, :, None].expand(-1, -1, of_content.size(2)))
        return torch.cat([of_content[:, : self.n_content], others], dim=1)


def _shift(by_distance: Tensor, n_keys: int) -> Tensor:
    """Row t at column j gets distance M + t - j, which stands in column T - t + j: a view, nothing is moved.

    Source: Transformer-XL appendix B.
    """
    rows, heads, length, n_distances = by_distance.shape
    flat = by_distance.reshape(rows, heads, n_distances, length)[:, :, 1:]
    return flat.reshape(rows, heads, length, n_distances - 1)[..., :n_keys]


def _pick(by_distance: Tensor, positions: Tensor, n_keys: int) -> Tensor:
    """The same for rows at any `positions` (B, P), by index."""
    n_tokens = by_distance.size(-1) - n_keys
    column = (n_tokens - positions)[:, :, None] + torch.arange(n_keys, device=positions.device)
    return by_distance.gather(3, column[:, None].expand(-1, by_distance.size(1), -1, -1))
