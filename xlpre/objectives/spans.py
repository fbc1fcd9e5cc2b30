"""Which tokens are targets: spans of whole words, one token in K, exactly P a window.

Source: XLNet section 2.3 (partial prediction) and 3.1 ("span-based prediction"); zihangdai/xlnet data_utils.py `_sample_mask`.
"""

from __future__ import annotations

import numpy as np

from xlpre.data.layout import Window
from xlpre.objectives.objective import ObjectiveConfig


class SpanSampler:
    """Chooses targets in a stretch of text.

    Args:
        config: partial_k, max_span, span_ends.
        starts_word: (V,) bool, pieces that begin a word.
    """

    def __init__(self, config: ObjectiveConfig, starts_word: np.ndarray) -> None:
        self._k = config.partial_k
        self._whole_words = config.span_ends == "whole_words"
        self._starts_word = starts_word
        lengths = 1 / np.arange(1, config.max_span + 1)
        self._length_cdf = np.cumsum(lengths / lengths.sum())

    def targets_of(self, window: Window, rng: np.random.Generator) -> np.ndarray:
        """(T,) bool with exactly P true, shared between the halves of `window` by their lengths."""
        goals = target_shares(len(window.ids), window.reuse_len, self._k)
        allowed = ~window.functional
        chosen = [
            self.sample(window.ids[half], allowed[half], goal, window.backward, rng)
            for half, goal in zip(halves_of(window), goals, strict=False)
        ]
        return np.concatenate(chosen)

    def sample(
        self, ids: np.ndarray, allowed: np.ndarray, goal: int, backward: bool, rng: np.random.Generator
    ) -> np.ndarray:
        """Mark `goal` targets.

        Args:
            ids: (L,) tokens in the row's order.
            allowed: (L,) bool, tokens that may be targets.
            goal: how many, at most `allowed.sum()`.
            backward: the row runs from right to left; everything is drawn in reading order.
            rng: source of every draw.

        Returns:
            (L,) bool with exactly `goal` true.
        """
        order = slice(None, None, -1 if backward else 1)
        allowed = allowed[order]
        chosen = self._spans(self._starts_word[ids[order]], allowed, goal, rng)
        missing = goal - int(chosen.sum())
        if missing:
            free = np.flatnonzero(allowed & ~chosen)
            chosen[rng.choice(free, missing, replace=False)] = True
        return chosen[order]

    def _spans(self, starts: np.ndarray, allowed: np.ndarray, goal: int, rng: np.random.Generator) -> np.ndarray:
        """Spans in contexts K times as long, left to right, until `goal` is reached or the text ends.

        A span that does not fit into what is left of the goal, or has a token that is not allowed, is passed over.
        """
        chosen = np.zeros(len(starts), bool)
        word_starts = np.append(np.flatnonzero(starts), len(starts))
        left, at = goal, 0
        while left > 0 and at < len(starts):
            n = min(int(np.searchsorted(self._length_cdf, rng.random(), side="right")) + 1, left)
            context = int(n * self._k)
            before = int(rng.integers(context))
            word = int(np.searchsorted(word_starts, at + before))
            if word + 1 >= len(word_starts):
                break
            begin = int(word_starts[word])
            end = int(word_starts[min(word + n, len(word_starts) - 1)]) if self._whole_words else begin + n
            if end >= len(starts):
                break
            if end - begin <= left and allowed[begin:end].all():
                chosen[begin:end] = True
                left -= end - begin
            at = end + context - before
        return chosen


def target_shares(length: int, reuse_len: int, partial_k: float) -> tuple[int, int]:
    """P, one in K of `length` tokens, as targets in the reused part and in the rest."""
    total = max(1, int(length / partial_k))
    in_rest = total * (length - reuse_len) // length
    return total - in_rest, in_rest


def halves_of(window: Window) -> list[slice]:
    """The reused part and the rest (absent in a plain window), which must not be seen from the reused part."""
    halves = [slice(0, window.reuse_len), slice(window.reuse_len, len(window.ids))]
    return [half for half in halves if half.stop > half.start]
