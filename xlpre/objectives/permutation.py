"""Permutation language modeling: a factorization order, expressed as ranks (XLNet, sections 2.2 and 2.3).

A query sees the keys with a lower rank. Ranks are assigned separately in the reused part of a window (base 0) and in the rest (base
`reuse_len + 1`). Context tokens are those that are neither targets nor special; `order` is the index of a token in the factorization order:

    token           key rank          query rank
    context         base - 1          base
    target          base + order      base + order, so it does not see itself
    <sep>, <cls>    base + order      base + order + 1

A share of the windows can have a fixed order instead of a random one. In windows that are predicted from left to right, `order` is the
position, and context tokens have the ranks of <sep>. Where targets are independent, their `order` is 0, so no target sees another.
"""

from __future__ import annotations

import numpy as np

from xlpre.data.rng import RowRng
from xlpre.data.window_layout import Windows
from xlpre.objectives.objective import ModelInputs, ObjectiveConfig
from xlpre.objectives.target_sampling import SpanSampler, positions_of_targets, window_parts


class Permutation:
    """Objective where targets are predicted in a random order, each from the context and the targets before it."""

    two_streams, sees_ahead = True, True
    description = (
        "Targets are predicted in a random order, each from the context and the targets before it in that order."
    )

    def __init__(self, config: ObjectiveConfig, starts_word: np.ndarray) -> None:
        self._config = config
        self._spans = SpanSampler(config, starts_word)

    def n_targets(self, seq_len: int, reuse_len: int) -> int:
        """Return P, the number of targets of a row."""
        return sum(self._spans.n_targets_per_part(seq_len, reuse_len))

    def build_inputs(self, windows: Windows, rng: RowRng) -> ModelInputs:
        """Sample targets and a factorization order for each row."""
        is_target, parts = self._spans.sample_targets(windows, rng), window_parts(windows)
        orders = [self._random_order(part.stop - part.start, rng) for part in parts]
        left_to_right, independent = self._rows_with_fixed_order(len(is_target), rng)
        is_ordered = is_target | windows.special_mask | left_to_right[:, None]
        ranks = []
        for part, order in zip(parts, orders, strict=True):
            order[left_to_right] = np.arange(order.shape[1])
            order[independent] = 0
            base = 0 if part.start == 0 else windows.reuse_len + 1
            ranks.append(factorization_ranks(is_target[:, part], is_ordered[:, part], order, base))
        query_rank, key_rank = (np.concatenate(of_parts, axis=1) for of_parts in zip(*ranks, strict=True))
        positions = positions_of_targets(is_target)
        return ModelInputs(
            input_ids=windows.ids,
            query_rank=query_rank,
            key_rank=key_rank,
            target_positions=positions,
            targets=np.take_along_axis(windows.ids, positions, axis=1),
        )

    def _random_order(self, length: int, rng: RowRng) -> np.ndarray:
        """Draw a factorization order of `length` tokens for each row, (B, length)."""
        return order_of_chunks(rng.uniform(min(self._config.perm_size or length, length)).argsort(axis=1), length)

    def _rows_with_fixed_order(self, rows: int, rng: RowRng) -> tuple[np.ndarray, np.ndarray]:
        """Draw the rows that are predicted from left to right, and those whose targets are independent, (B,) bool each."""
        left_to_right, independent = self._config.left_to_right, self._config.independent
        if not left_to_right + independent:
            return np.zeros(rows, bool), np.zeros(rows, bool)
        (number,) = rng.uniform(1).T
        return number < left_to_right, (left_to_right <= number) & (number < left_to_right + independent)


def order_of_chunks(order: np.ndarray, length: int) -> np.ndarray:
    """Extend the factorization order of a chunk to a part of a window. The chunks are predicted from left to right.

    Args:
        order: (B, S) permutations of 0 to S - 1, the order within a chunk of S tokens. All chunks of a row use the same permutation.
        length: L, length of the part. It is at least S; the last chunk may be shorter than S.

    Returns:
        (B, L) int64 permutations of 0 to L - 1.
    """
    rows, size = order.shape
    tail_len = length % size
    tail = order[order < tail_len].reshape(rows, tail_len)
    return np.concatenate([order] * (length // size) + [tail], axis=1) + np.arange(length) // size * size


def factorization_ranks(
    is_target: np.ndarray, is_ordered: np.ndarray, order: np.ndarray, base: int
) -> tuple[np.ndarray, np.ndarray]:
    """Compute the ranks of one part of each window.

    Args:
        is_target: (B, L) bool.
        is_ordered: (B, L) bool, True for tokens that have an order: targets, <sep> and <cls>. The context does not see them.
        order: (B, L) index of each token in the factorization order. It is read where `is_ordered` is True.
        base: rank of the first token in the order.

    Returns:
        (B, L) int32 query ranks, (B, L) int32 key ranks.

    Source: zihangdai/xlnet data_utils.py `_local_perm`. docs/objectives.md derives the rule.
    """
    key_rank = np.where(is_ordered, order + base, base - 1).astype(np.int32)
    return key_rank + ~is_target, key_rank
