"""Permutation language modeling: a factorization order, expressed as ranks (XLNet, sections 2.2 and 2.3).

A query sees the keys with a lower rank. Ranks are assigned separately in the reused part of a window (base 0) and in the rest (base
`reuse_len + 1`). Context tokens are those that are neither targets nor special; `order` is the index of a token in the factorization order:

    token           key rank          query rank
    context         base - 1          base
    target          base + order      base + order, so it does not see itself
    <sep>, <cls>    base + order      base + order + 1
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
        return sum(self._spans.num_targets(seq_len, reuse_len))

    def build_inputs(self, windows: Windows, rng: RowRng) -> ModelInputs:
        """Sample targets and a factorization order for each row."""
        is_target = self._spans.sample_targets(windows, rng)
        ranks = []
        for part in window_parts(windows):
            length = part.stop - part.start
            order = rng.uniform(min(self._config.perm_size or length, length)).argsort(axis=1)
            base = 0 if part.start == 0 else windows.reuse_len + 1
            ranks.append(factorization_ranks(is_target[:, part], windows.special_mask[:, part], order, base))
        query_rank, key_rank = (np.concatenate(parts, axis=1) for parts in zip(*ranks, strict=True))
        positions = positions_of_targets(is_target)
        return ModelInputs(
            input_ids=windows.ids,
            query_rank=query_rank,
            key_rank=key_rank,
            target_positions=positions,
            targets=np.take_along_axis(windows.ids, positions, axis=1),
        )


def factorization_ranks(
    is_target: np.ndarray, special_mask: np.ndarray, order: np.ndarray, base: int
) -> tuple[np.ndarray, np.ndarray]:
    """Compute the ranks of one part of each window.

    Args:
        is_target: (B, L) bool.
        special_mask: (B, L) bool, True for <sep> and <cls>. The context does not see them, as it does not see targets, but they are never
            predicted.
        order: (B, S) permutations of 0 to S - 1, the factorization order within a chunk of S tokens. All chunks of a row use the
            same permutation. The chunks themselves are predicted from left to right.
        base: rank of the first token in the order.

    Returns:
        (B, L) int32 query ranks, (B, L) int32 key ranks.

    Source: zihangdai/xlnet data_utils.py `_local_perm`. docs/objectives.md derives the rule.
    """
    (rows, length), size = is_target.shape, order.shape[1]
    tail_len = length % size
    tail = order[order < tail_len].reshape(rows, tail_len)  # the last chunk may be shorter
    ranks = np.concatenate([order] * (length // size) + [tail], axis=1, dtype=np.int32, casting="same_kind")
    ranks += (np.arange(length) // size * size + base).astype(np.int32)
    key_rank = np.where(is_target | special_mask, ranks, np.int32(base - 1))
    return key_rank + ~is_target, key_rank
