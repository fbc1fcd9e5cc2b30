"""Relative positions: a score by the distance between a query and a key (Transformer-XL section 3.3).

A row that reads backward has its distances negated. Distances of a window of T tokens and M columns of memory run from K = M + T
down to 1 - T, one row of the table each.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from xlpre.model.geometry import Geometry
from xlpre.model.terms import ScoreTerm


def distance_table(
    n_keys: int, n_tokens: int, width: int, clamp_len: int, *, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Sinusoids of all distances, for both directions.

    Returns:
        (2, R, D): forward and backward; row r is distance K - r, R = K + T; the first half of D sines, the second cosines.

    Source: Vaswani et al. section 3.5; zihangdai/xlnet modeling.py `relative_positional_encoding`.
    """
    distance = torch.arange(n_keys, -n_tokens, -1, device=device, dtype=torch.float32)
    if clamp_len > 0:
        distance = distance.clamp(-clamp_len, clamp_len)
    frequency = 10000 ** -(torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)
    angle = distance[:, None] * frequency
    sine, cosine = angle.sin(), angle.cos()
    # sin(-x) = -sin(x), cos(-x) = cos(x)
    return torch.stack([torch.cat([sine, cosine], -1), torch.cat([-sine, cosine], -1)]).to(dtype)


class PositionTerm(ScoreTerm):
    """(q + r_r) . W_r R[distance], the position term of the score."""

    def __init__(self, d_model: int, n_head: int, d_head: int, r_bias: nn.Parameter | None) -> None:
        super().__init__(n_head, d_head, r_bias)
        self.key = nn.Linear(d_model, n_head * d_head, bias=False)

    def forward(self, query: Tensor, content_key: Tensor, geometry: Geometry) -> Tensor:
        """Scores (B, H, N, K) from queries (B, N, H, E)."""
        keys = self.key(geometry.distances)  # (2, R, H*E)
        keys = keys.view(*keys.shape[:2], self.n_head, self.d_head).permute(0, 2, 3, 1)  # (2, H, E, R)
        by_distance = self.biased(query).transpose(1, 2) @ keys[geometry.direction]  # (B, H, N, R)
        return geometry.align(by_distance)
