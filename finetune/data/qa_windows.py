"""Split a long context into overlapping windows, and find the window with the most context around each token.

Source: zihangdai/xlnet run_squad.py (`convert_examples_to_features`, `_check_is_max_context`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from finetune.data.features import Features, pair_to_row
from xlpre.text.offsets import TokenOffsets


@dataclass(frozen=True, kw_only=True)
class ContextWindow(Features):
    """One window of a context, with the question.

    Attributes:
        context: the whole context.
        first_token: index of the first token of the window in the context.
        is_max_context: (n,) bool, for the n context tokens of the window: True if no other window has more context around the
            token.
    """

    context: TokenOffsets
    first_token: int
    is_max_context: np.ndarray


@dataclass(frozen=True)
class SpanLabel:
    """True answer of a question: a span of context tokens, or no answer.

    Attributes:
        has_answer: False if the question has no answer.
        first_token: index of the first token of the span in the context.
        last_token: index of the last token, inclusive.
    """

    has_answer: bool
    first_token: int = 0
    last_token: int = 0


def window_bounds(n_tokens: int, max_len: int, stride: int) -> list[tuple[int, int]]:
    """Split a context into windows.

    Args:
        n_tokens: number of tokens of the context.
        max_len: maximum number of tokens in a window.
        stride: number of tokens from the start of one window to the next. If it is above `max_len`, the next window
            starts where this one ends, so that no token is skipped.

    Returns:
        First token and length of each window.
    """
    bounds, first = [], 0
    while True:
        length = min(n_tokens - first, max_len)
        bounds.append((first, length))
        if first + length == n_tokens:
            return bounds
        first += min(length, stride)


def max_context_masks(bounds: Sequence[tuple[int, int]]) -> list[np.ndarray]:
    """For each window, return a mask of the tokens that have more context in this window than in any other.

    The context of a token is the smaller of the numbers of tokens to its left and to its right in the window, plus 0.01 times the
    length of the window, as in the published code. If windows are tied, the first one wins.

    Args:
        bounds: first token and length of each window.

    Returns:
        (n,) bool for each window of n tokens.
    """
    # one array over all tokens: an array (windows, tokens) would grow with the square of the context length
    max_context = np.full(bounds[-1][0] + bounds[-1][1], -1.0)
    owner = np.zeros(len(max_context), np.int64)
    for index, (first, length) in enumerate(bounds):
        n_left, window = np.arange(length), slice(first, first + length)
        context = np.minimum(n_left, n_left[::-1]) + 0.01 * length
        owner[window][context > max_context[window]] = index
        max_context[window] = np.maximum(max_context[window], context)
    return [owner[first : first + length] == index for index, (first, length) in enumerate(bounds)]


def build_windows(
    example_index: int,
    context: TokenOffsets,
    question: Sequence[int],
    max_len: int,
    stride: int,
    label: SpanLabel | None,
) -> list[ContextWindow]:
    """Return the rows of a question: one for each window of its context, followed by the question.

    Args:
        example_index: index of the example in its split.
        context: tokens of the context.
        question: token ids of the question, which is part of every row.
        max_len: maximum number of tokens in a row, special tokens included.
        stride: see window_bounds.
        label: the true span. None: unknown.
    """
    bounds = window_bounds(len(context.ids), max_len - len(question) - 3, stride)
    windows = []
    for (first, length), is_max_context in zip(bounds, max_context_masks(bounds), strict=True):
        row = pair_to_row(context.ids[first : first + length], question, max_len)
        labels = {} if label is None else _row_labels(label, first, length, cls_position=len(row.input_ids) - 1)
        windows.append(
            ContextWindow(
                example_index, (row,), labels, context=context, first_token=first, is_max_context=is_max_context
            )
        )
    return windows


def _row_labels(label: SpanLabel, first: int, length: int, cls_position: int) -> dict[str, np.generic]:
    """Return the labels of a row: `start` and `end` of the span, and `impossible`.

    `impossible` is 1 if the question has no answer or the window does not contain the whole span. Then `start` and `end` are the
    position of <cls>.
    """
    inside = label.has_answer and first <= label.first_token and label.last_token < first + length
    start, end = (label.first_token - first, label.last_token - first) if inside else (cls_position, cls_position)
    return {"start": np.int64(start), "end": np.int64(end), "impossible": np.float32(not inside)}
