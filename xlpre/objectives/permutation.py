"""Permutation language modelling: a factorization order, as ranks (XLNet section 2.2-2.3).

A token sees those ranked below it. In each half of a window, with base 0 for the reused half and `reuse_len + 1` for the rest:

    context token          key base - 1          query base
    target                 base + place          the same, so it does not see itself
    <sep>, <cls>           base + place          one more
"""

from __future__ import annotations

import numpy as np

from xlpre.data.layout import Window
from xlpre.objectives.objective import Example, ObjectiveConfig
from xlpre.objectives.spans import SpanSampler, halves_of


class Permutation:
    """Targets are predicted in a random order, each from the context and the targets before it."""

    two_streams = True

    def __init__(self, config: ObjectiveConfig, starts_word: np.ndarray) -> None:
        self._config = config
        self._spans = SpanSampler(config, starts_word)

    def example(self, window: Window, rng: np.random.Generator) -> Example:
        """Draw targets and an order for `window`."""
        is_target = self._spans.targets_of(window, rng)
        ranks = []
        for half in halves_of(window):
            length = half.stop - half.start
            places = rng.permutation(min(self._config.perm_size or length, length))
            base = 0 if half.start == 0 else window.reuse_len + 1
            ranks.append(ranks_of(is_target[half], window.functional[half], places, base))
        positions = np.flatnonzero(is_target)
        return Example(
            input_ids=window.ids,
            query_rank=np.concatenate([query for query, _ in ranks]),
            key_rank=np.concatenate([key for _, key in ranks]),
            target_positions=positions,
            targets=window.ids[positions],
        )


def ranks_of(
    is_target: np.ndarray, functional: np.ndarray, places: np.ndarray, base: int
) -> tuple[np.ndarray, np.ndarray]:
    """Query and key ranks of one half of a window.

    Args:
        is_target: (L,) bool.
        functional: (L,) bool, <sep> and <cls>: hidden from the context like targets, but never predicted.
        places: a permutation of the places in a chunk, the same for every chunk; chunks follow each other from left to right.
        base: rank of the half's first place.

    Returns:
        (L,) int32 query ranks, (L,) int32 key ranks.

    Source: zihangdai/xlnet data_utils.py `_local_perm`; docs/objectives.md derives the rule.
    """
    length, size = len(is_target), len(places)
    tail = places[places < length % size]  # the last chunk may be shorter
    order = np.concatenate([np.tile(places, length // size), tail]) + np.arange(length) // size * size + base
    key = np.where(is_target | functional, order, base - 1)
    query = np.where(is_target, order, key + 1)
    return query.astype(np.int32), key.astype(np.int32)
