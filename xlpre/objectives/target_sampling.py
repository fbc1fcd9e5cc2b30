"""Sampling of targets: spans of whole words, one token in K, exactly P per window.

Source: XLNet, section 2.3 (partial prediction) and section 3.1 ("span-based prediction"); zihangdai/xlnet data_utils.py `_sample_mask`.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from xlpre.data.rng import RowRng
from xlpre.data.window_layout import Windows
from xlpre.objectives.objective import ObjectiveConfig


@dataclass(frozen=True)
class SpanRandomNumbers:
    """Uniform random numbers in [0, 1) that determine the targets of B rows of L tokens.

    Attributes:
        lengths: (B, S), each number determines the number of words of a span. S is the largest possible number of spans.
        offsets: (B, S), fraction of the context of each span that precedes the span. The context of n words has int(n K) tokens.
        fill: (B, L), one number per token. If the spans of a row mark too few targets, the tokens with the lowest numbers are added.
    """

    lengths: np.ndarray
    offsets: np.ndarray
    fill: np.ndarray


class SpanSampler:
    """Samples the targets of each window: spans of words, then single tokens until there are exactly P targets.

    Args:
        config: objective settings. `partial_k`, `max_span` and `span_ends` are used.
        starts_word: (V,) bool, True for tokens that start a word.
    """

    def __init__(self, config: ObjectiveConfig, starts_word: np.ndarray) -> None:
        self._partial_k, self._max_span = config.partial_k, config.max_span
        self._whole_words = config.span_ends == "whole_words"
        self._starts_word = starts_word
        weights = 1 / np.arange(1, config.max_span + 1)
        self._length_cdf = np.cumsum(weights / weights.sum())[:-1]
        self._context_len = [int(n * self._partial_k) for n in range(config.max_span + 1)]  # by length of the span

    def n_targets_per_part(self, seq_len: int, reuse_len: int) -> tuple[int, int]:
        """Return the number of targets in the reused part and in the rest of a window."""
        return n_targets_per_part(seq_len, reuse_len, self._partial_k)

    def sample_targets(self, windows: Windows, rng: RowRng) -> np.ndarray:
        """Return (B, T) bool with exactly P targets in each row. The parts of a window get targets in proportion to their lengths."""
        counts = self.n_targets_per_part(windows.ids.shape[1], windows.reuse_len)
        allowed = ~windows.special_mask
        is_target = []
        for part, n_targets in zip(window_parts(windows), counts, strict=False):
            numbers = self.draw_numbers(part.stop - part.start, rng)
            is_target.append(self.sample(windows.ids[:, part], allowed[:, part], n_targets, windows.backward, numbers))
        return np.concatenate(is_target, axis=1)

    def draw_numbers(self, length: int, rng: RowRng) -> SpanRandomNumbers:
        """Draw the random numbers for rows of `length` tokens."""
        max_spans = (length - 1) // (
            self._context_len[1] + 1
        ) + 1  # a span with its context has at least this many tokens
        return SpanRandomNumbers(rng.uniform(max_spans), rng.uniform(max_spans), rng.uniform(length))

    def sample(
        self, ids: np.ndarray, allowed: np.ndarray, n_targets: int, backward: np.ndarray, numbers: SpanRandomNumbers
    ) -> np.ndarray:
        """Mark `n_targets` targets in each row.

        Args:
            ids: (B, L) tokens in the order of the row.
            allowed: (B, L) bool, tokens that may be targets.
            n_targets: number of targets of each row. Each row must have at least this number of allowed tokens.
            backward: (B,) bool, rows from right to left. Spans are sampled in reading order.
            numbers: random numbers of these rows.

        Returns:
            (B, L) bool with exactly `n_targets` true in each row.
        """
        allowed = _reversed_where(backward, allowed)
        is_target = self.sample_spans(_reversed_where(backward, self._starts_word[ids]), allowed, n_targets, numbers)
        _fill(is_target, allowed, n_targets, numbers.fill)
        return _reversed_where(backward, is_target)

    def sample_spans(
        self, starts: np.ndarray, allowed: np.ndarray, n_targets: int, numbers: SpanRandomNumbers
    ) -> np.ndarray:
        """Mark spans in reading order.

        Args:
            starts: (B, L) bool, tokens that start a word.
            allowed: (B, L) bool, tokens that may be targets.
            n_targets: maximum number of targets.
            numbers: random numbers of these rows.

        Returns:
            (B, L) bool with at most `n_targets` true in each row.
        """
        is_target = np.zeros(starts.shape, bool)
        n_words = (self._length_cdf.searchsorted(numbers.lengths, side="right") + 1).tolist()
        offsets = numbers.offsets.tolist()
        for marks, row_starts, row_allowed, n, offset in zip(is_target, starts, allowed, n_words, offsets, strict=True):
            spans = self._place_spans(row_starts.nonzero()[0].tolist(), row_allowed.tobytes(), n_targets, n, offset)
            for start, end in spans:
                marks[start:end] = True
        return is_target

    def _place_spans(
        self, words: list[int], allowed: bytes, n_targets: int, n_words: list[int], offsets: list[float]
    ) -> list[tuple[int, int]]:
        """Place spans from left to right until `n_targets` is reached or the text ends. Each span has a context of K times its length.

        A span is skipped if it exceeds the remaining number of targets or contains a token that is not allowed. This is the only
        Python loop over tokens in the data path. It cannot be vectorized, because a context starts where the previous one ended.
        """
        length, last = len(allowed), len(words)
        words = words + [length] * (self._max_span + 1)  # so that words[word + n] exists
        spans = []
        remaining, position = n_targets, 0
        for n, offset in zip(n_words, offsets, strict=True):
            if remaining == 0 or position >= length:
                break
            n = min(n, remaining)
            context_len = self._context_len[n]
            before = int(offset * context_len)
            word = bisect_left(words, position + before, 0, last)
            start = words[word]
            end = words[word + n] if self._whole_words else start + n
            if end >= length:
                break
            if end - start <= remaining and allowed.find(0, start, end) < 0:
                spans.append((start, end))
                remaining -= end - start
            position = end + context_len - before
        return spans


def n_targets_per_part(seq_len: int, reuse_len: int, partial_k: float) -> tuple[int, int]:
    """Return the number of targets in the reused part and in the rest of a window.

    Args:
        seq_len: T.
        reuse_len: length of the reused part.
        partial_k: one token in K is a target.
    """
    total = max(1, int(seq_len / partial_k))
    in_rest = total * (seq_len - reuse_len) // seq_len
    return total - in_rest, in_rest


def window_parts(windows: Windows) -> list[slice]:
    """Return the slices of the reused part and of the rest of a window. Plain windows have no rest."""
    parts = [slice(0, windows.reuse_len), slice(windows.reuse_len, windows.ids.shape[1])]
    return [part for part in parts if part.stop > part.start]


def positions_of_targets(is_target: np.ndarray) -> np.ndarray:
    """Return the (B, P) int64 positions at which `is_target` (B, T) is True. Each row must have P targets."""
    rows, length = is_target.shape
    return np.flatnonzero(is_target).reshape(rows, -1) - np.arange(0, rows * length, length)[:, None]


def _fill(is_target: np.ndarray, allowed: np.ndarray, n_targets: int, fill: np.ndarray) -> None:
    """In each row, mark the allowed tokens with the lowest `fill` as targets, in place, until there are `n_targets`."""
    missing = n_targets - is_target.sum(1)
    by_fill = np.where(allowed & ~is_target, fill, np.inf).argsort(axis=1)
    row, rank = (np.arange(fill.shape[1]) < missing[:, None]).nonzero()
    is_target[row, by_fill[row, rank]] = True


def _reversed_where(backward: np.ndarray, rows: np.ndarray) -> np.ndarray:
    return np.where(backward[:, None], rows[:, ::-1], rows)
