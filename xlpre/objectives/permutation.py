"""Permutation language modelling: a factorization order, as ranks (XLNet section 2.2-2.3).

A token sees those ranked below it. In each half of a window, with base 0 for the reused half and `reuse_len + 1` for the rest:

    context token          key base - 1          query base
    target                 base + place          the same, so it does not see itself
    <sep>, <cls>           base + place          one more
"""

from __future__ import annotations

import numpy as np

from xlpre.data.rng import RowRng
from xlpre.data.window_layout import Windows
from xlpre.objectives.objective import Examples, ObjectiveConfig
from xlpre.objectives.target_sampling import SpanSampler, positions_of, window_parts


class Permutation:
    """Targets are predicted in a random order, each from the context and the targets before it."""

    two_streams, sees_ahead = True, True
    about = "Targets are predicted in a random order (place), each from the context and the targets before it."

    def __init__(self, config: ObjectiveConfig, starts_word: np.ndarray) -> None:
        self._config = config
        self._spans = SpanSampler(config, starts_word)

    def n_targets(self, window: int, reuse_len: int) -> int:
        """As many as spans are drawn for."""
        return sum(self._spans.shares(window, reuse_len))

    def examples(self, windows: Windows, rng: RowRng) -> Examples:
        """Draw targets and an order for each row."""
        is_target = self._spans.targets_of(windows, rng)
        ranks = []
        for half in window_parts(windows):
            length = half.stop - half.start
            places = rng.uniform(min(self._config.perm_size or length, length)).argsort(axis=1)
            base = 0 if half.start == 0 else windows.reuse_len + 1
            ranks.append(ranks_of(is_target[:, half], windows.special_mask[:, half], places, base))
        query_rank, key_rank = (np.concatenate(side, axis=1) for side in zip(*ranks, strict=True))
        positions = positions_of(is_target)
        return Examples(
            input_ids=windows.ids,
            query_rank=query_rank,
            key_rank=key_rank,
            target_positions=positions,
            targets=np.take_along_axis(windows.ids, positions, axis=1),
        )


def ranks_of(
    is_target: np.ndarray, special_mask: np.ndarray, places: np.ndarray, base: int
) -> tuple[np.ndarray, np.ndarray]:
    """Query and key ranks of one half of each window.

    Args:
        is_target: (B, L) bool.
        special_mask: (B, L) bool, <sep> and <cls>: hidden from the context like targets, but never predicted.
        places: (B, S) permutations of the places in a chunk, a row's the same for all its chunks; chunks follow each other from
            left to right.
        base: rank of the half's first place.

    Returns:
        (B, L) int32 query ranks, (B, L) int32 key ranks.

    Source: zihangdai/xlnet data_utils.py `_local_perm`; docs/objectives.md derives the rule.
    """
    (rows, length), size = is_target.shape, places.shape[1]
    in_tail = length % size
    tail = places[places < in_tail].reshape(rows, in_tail)  # the last chunk may be shorter
    order = np.concatenate([places] * (length // size) + [tail], axis=1, dtype=np.int32, casting="same_kind")
    order += (np.arange(length) // size * size + base).astype(np.int32)
    key = np.where(is_target | special_mask, order, np.int32(base - 1))
    return key + ~is_target, key
