"""Who sees whom: one comparison of two integer vectors (docs/design.md, "a query sees the keys ranked below it")."""

from __future__ import annotations

import torch
from torch import Tensor

HIDDEN = torch.iinfo(torch.int32).max  # the rank of padding and of memory that does not belong to the row


def visible(query_rank: Tensor, key_rank: Tensor) -> Tensor:
    """Which keys each query may attend to: those ranked strictly below it.

    Causal, permuted and bidirectional attention differ only in the ranks handed in.

    Args:
        query_rank: (B, N) int32.
        key_rank: (B, K) int32, memory first.

    Returns:
        (B, N, K) bool.

    Source: XLNet section 2.2; docs/objectives.md derives the ranks.
    """
    return query_rank[:, :, None] > key_rank[:, None, :]


def content_visible(query_rank: Tensor, key_rank: Tensor) -> Tensor:
    """The same for the content stream, whose T tokens are the last keys: they also see themselves. (B, T, K)."""
    length = query_rank.size(1)
    itself = torch.eye(length, dtype=torch.bool, device=query_rank.device)
    itself = torch.nn.functional.pad(itself, (key_rank.size(1) - length, 0))
    return visible(query_rank, key_rank) | itself
