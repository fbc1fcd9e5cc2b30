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


def reach_of(attention_length: str, mem_len: int, columns: int) -> int | None:
    """The largest distance at which a key is seen; None if there is no limit.

    Args:
        attention_length: of ModelConfig. `same_length`: every query looks back equally far, to M + 1 keys with itself, as
            Transformer-XL's TensorFlow code has it; `exclude_self_slot`: to one fewer, as its PyTorch code.
        mem_len: M of the model.
        columns: of the memory at hand, which reaches farther if it is longer.
    """
    fewer = {"same_length": 0, "exclude_self_slot": 1}
    return max(mem_len, columns) - fewer[attention_length] if attention_length in fewer else None
