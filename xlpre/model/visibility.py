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


REACH = {
    "all": lambda mem_len: HIDDEN,
    "same_length": lambda mem_len: mem_len,
    "exclude_self_slot": lambda mem_len: mem_len - 1,
}


def within_reach(places: Tensor, mem_len: int, n_keys: int, attention_length: str) -> Tensor:
    """Which keys are no farther back than a query may look.

    Args:
        places: (B or 1, N) places of the queries in the window.
        mem_len: M, columns of memory before the window.
        n_keys: K.
        attention_length: of ModelConfig.

    Returns:
        (B or 1, N, K) bool.

    Source: Transformer-XL's `same_length`; its TensorFlow code keeps M + 1 keys, its PyTorch code M.
    """
    distance = mem_len + places[:, :, None] - torch.arange(n_keys, device=places.device)
    return distance <= REACH[attention_length](mem_len)
