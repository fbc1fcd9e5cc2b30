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


class EveryKey:
    """Queries look back as far as there are keys."""

    def __call__(self, seen: Tensor, places: Tensor, mem_len: int) -> Tensor:
        """`seen` (B, N, K) as it is."""
        return seen


class SameLength:
    """Every query looks back equally far (Transformer-XL's `same_length`).

    Args:
        mem_len: M of the model, the largest distance, so that M + 1 keys are seen, as in its TensorFlow code; a longer memory at
            hand reaches farther.
        fewer: keys fewer than that; 1 in its PyTorch code.
    """

    def __init__(self, mem_len: int, fewer: int) -> None:
        self._mem_len, self._fewer = mem_len, fewer

    def __call__(self, seen: Tensor, places: Tensor, mem_len: int) -> Tensor:
        """Hide the keys that are too far back.

        Args:
            seen: (B, N, K) bool.
            places: (B or 1, N) places of the queries in the window.
            mem_len: columns of memory before the window.
        """
        distance = mem_len + places[:, :, None] - torch.arange(seen.size(2), device=places.device)
        return seen & (distance <= max(self._mem_len, mem_len) - self._fewer)


def build_reach(attention_length: str, mem_len: int) -> EveryKey | SameLength:
    """What limits how far back queries look, by `attention_length` of ModelConfig."""
    fewer = {"same_length": 0, "exclude_self_slot": 1}
    return SameLength(mem_len, fewer[attention_length]) if attention_length in fewer else EveryKey()
