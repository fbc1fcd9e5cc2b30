"""Which tokens are targets: spans of whole words, one token in K, exactly P a window.

Source: XLNet section 2.3 (partial prediction) and 3.1 ("span-based prediction"); zihangdai/xlnet data_utils.py `_sample_mask`.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from xlpre.data.rng import RowRng
from xlpre.data.window_layout import Windows
from xlpre.objectives.objective import ObjectiveConfig


@dataclass(frozen=True)
class SpanDraws:
    """What chance decides about the targets of B stretches of L tokens, all uniform from 0 to 1.

    Attributes:
        lengths: (B, N), words of each span, for as many spans as there can be.
        offsets: (B, N), where in its context each span begins.
        fill: (B, L), tokens with low ones are targets where spans are too few.
    """

    lengths: np.ndarray
    offsets: np.ndarray
    fill: np.ndarray


class SpanSampler:
    """Chooses targets in stretches of text.

    Args:
        config: partial_k, max_span, span_ends.
        starts_word: (V,) bool, pieces that begin a word.
    """

    def __init__(self, config: ObjectiveConfig, starts_word: np.ndarray) -> None:
        self._k, self._max_span = config.partial_k, config.max_span
        self._whole_words = config.span_ends == "whole_words"
        self._starts_word = starts_word
        lengths = 1 / np.arange(1, config.max_span + 1)
        self._length_cdf = np.cumsum(lengths / lengths.sum())[:-1]
        self._contexts = [int(n * self._k) for n in range(config.max_span + 1)]

    def shares(self, window: int, reuse_len: int) -> tuple[int, int]:
        """How many targets the halves of a window have; see target_shares."""
        return num_targets(window, reuse_len, self._k)

    def targets_of(self, windows: Windows, rng: RowRng) -> np.ndarray:
        """(B, T) bool with exactly P true in each row, shared between the halves of a window by their lengths."""
        goals = self.shares(windows.ids.shape[1], windows.reuse_len)
        allowed = ~windows.special_mask
        chosen = [
            self.sample(
                windows.ids[:, half], allowed[:, half], goal, windows.backward, self.draw(half.stop - half.start, rng)
            )
            for half, goal in zip(window_parts(windows), goals, strict=False)
        ]
        return np.concatenate(chosen, axis=1)

    def draw(self, length: int, rng: RowRng) -> SpanDraws:
        """The draws for stretches of `length` tokens."""
        most = (length - 1) // (self._contexts[1] + 1) + 1  # a span and its context take so many tokens at least
        return SpanDraws(rng.uniform(most), rng.uniform(most), rng.uniform(length))

    def sample(
        self, ids: np.ndarray, allowed: np.ndarray, goal: int, backward: np.ndarray, draws: SpanDraws
    ) -> np.ndarray:
        """Mark `goal` targets in each row.

        Args:
            ids: (B, L) tokens in the rows' order.
            allowed: (B, L) bool, tokens that may be targets.
            goal: how many, at most what any row allows.
            backward: (B,) bool, the row runs from right to left; everything is drawn in reading order.
            draws: for B stretches of L tokens.

        Returns:
            (B, L) bool with exactly `goal` true in each row.
        """
        allowed = _reversed_where(backward, allowed)
        chosen = self.spans(_reversed_where(backward, self._starts_word[ids]), allowed, goal, draws)
        _fill(chosen, allowed, goal, draws.fill)
        return _reversed_where(backward, chosen)

    def spans(self, starts: np.ndarray, allowed: np.ndarray, goal: int, draws: SpanDraws) -> np.ndarray:
        """(B, L) bool, at most `goal` true in each row, in reading order; `starts` (B, L) are tokens that begin a word."""
        chosen = np.zeros(starts.shape, bool)
        n_words = (self._length_cdf.searchsorted(draws.lengths, side="right") + 1).tolist()
        offsets = draws.offsets.tolist()
        for marks, begins, free, n, offset in zip(chosen, starts, allowed, n_words, offsets, strict=True):
            for begin, end in self._walk(begins.nonzero()[0].tolist(), free.tobytes(), goal, n, offset):
                marks[begin:end] = True
        return chosen

    def _walk(
        self, words: list[int], allowed: bytes, goal: int, n_words: list[int], offsets: list[float]
    ) -> list[tuple[int, int]]:
        """Spans in contexts K times as long, left to right, until `goal` is reached or the text ends.

        A span that does not fit into what is left of the goal, or has a token that is not allowed, is passed over. This is the
        one loop over tokens of the data path: plain integers, because a span begins where the last one's context ended.
        """
        length, last = len(allowed), len(words)
        words = words + [length] * (self._max_span + 1)  # so that words[word + n] is there
        spans = []
        left, at = goal, 0
        for n, offset in zip(n_words, offsets, strict=True):
            if left == 0 or at >= length:
                break
            n = min(n, left)
            context = self._contexts[n]
            before = int(offset * context)
            word = bisect_left(words, at + before, 0, last)
            begin = words[word]
            end = words[word + n] if self._whole_words else begin + n
            if end >= length:
                break
            if end - begin <= left and allowed.find(0, begin, end) < 0:
                spans.append((begin, end))
                left -= end - begin
            at = end + context - before
        return spans


def num_targets(length: int, reuse_len: int, partial_k: float) -> tuple[int, int]:
    """P, one in K of `length` tokens, as targets in the reused part and in the rest."""
    total = max(1, int(length / partial_k))
    in_rest = total * (length - reuse_len) // length
    return total - in_rest, in_rest


def window_parts(windows: Windows) -> list[slice]:
    """The reused part and the rest (absent in plain windows), which must not be seen from the reused part."""
    halves = [slice(0, windows.reuse_len), slice(windows.reuse_len, windows.ids.shape[1])]
    return [half for half in halves if half.stop > half.start]


def positions_of(chosen: np.ndarray) -> np.ndarray:
    """(B, P) int64, where `chosen` (B, T) is true, which it is P times in each row."""
    rows, length = chosen.shape
    return np.flatnonzero(chosen).reshape(rows, -1) - np.arange(0, rows * length, length)[:, None]


def _fill(chosen: np.ndarray, allowed: np.ndarray, goal: int, fill: np.ndarray) -> None:
    """Mark the tokens with the lowest `fill` in each row, until there are `goal`."""
    missing = goal - chosen.sum(1)
    by_fill = np.where(allowed & ~chosen, fill, np.inf).argsort(axis=1)
    row, taken = (np.arange(fill.shape[1]) < missing[:, None]).nonzero()
    chosen[row, by_fill[row, taken]] = True


def _reversed_where(backward: np.ndarray, rows: np.ndarray) -> np.ndarray:
    return np.where(backward[:, None], rows[:, ::-1], rows)
