"""A long text is read in windows that overlap: which there are, and which of them knows most about a token.

Source: zihangdai/xlnet run_squad.py (`convert_examples_to_features`, `_check_is_max_context`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from finetune.data.features import Features, pair_to_row
from xlpre.text.offsets import TokenOffsets


@dataclass(frozen=True, kw_only=True)
class Window(Features):
    """Tokens of a text, with a question about it.

    Attributes:
        text: all of it.
        first: the number of the window's first token in it.
        central: (n,) bool, of the n tokens of the window: no other window has more context of it.
    """

    text: TokenOffsets
    first: int
    central: np.ndarray


@dataclass(frozen=True)
class Truth:
    """The first and the last token of the answer, if it exists."""

    exists: bool
    first: int = 0
    last: int = 0


def stretches(n_tokens: int, room: int, stride: int) -> list[tuple[int, int]]:
    """First token and length of each window of at most `room` tokens; the next one begins `stride` later, or where this one ends."""
    found, first = [], 0
    while True:
        length = min(n_tokens - first, room)
        found.append((first, length))
        if first + length == n_tokens:
            return found
        first += min(length, stride)


def most_context(found: Sequence[tuple[int, int]]) -> list[np.ndarray]:
    """Of each window (n,) bool, whether it is the one that has most context of each of its tokens.

    A token has as much context as there are tokens on its shorter side, and a hundredth of the window's length more, as in the
    original; of equals it is the first window.
    """
    # what each token has most; a row for each window would grow with the square of a text
    most = np.full(found[-1][0] + found[-1][1], -1.0)
    owner = np.zeros(len(most), np.int64)
    for number, (first, length) in enumerate(found):
        left, inside = np.arange(length), slice(first, first + length)
        context = np.minimum(left, left[::-1]) + 0.01 * length
        owner[inside][context > most[inside]] = number
        most[inside] = np.maximum(most[inside], context)
    return [owner[first : first + length] == number for number, (first, length) in enumerate(found)]


def windows(
    example: int, text: TokenOffsets, question: Sequence[int], max_len: int, stride: int, truth: Truth | None
) -> list[Window]:
    """The windows of a text with a question.

    Args:
        example: its number.
        text: what is read in windows.
        question: its tokens, all of which are in each.
        max_len: tokens of a row.
        stride: see stretches.
        truth: None: not known.
    """
    found = stretches(len(text.ids), max_len - len(question) - 3, stride)
    made = []
    for (first, length), central in zip(found, most_context(found), strict=True):
        row = pair_to_row(text.ids[first : first + length], question, max_len)
        answers = {} if truth is None else _answers(truth, first, length, cls=len(row.input_ids) - 1)
        made.append(Window(example, (row,), answers, text=text, first=first, central=central))
    return made


def _answers(truth: Truth, first: int, length: int, cls: int) -> dict[str, np.generic]:
    """Places in the row; an answer that is not all in the window counts as none, which is told at <cls>."""
    inside = truth.exists and first <= truth.first and truth.last < first + length
    start, end = (truth.first - first, truth.last - first) if inside else (cls, cls)
    return {"start": np.int64(start), "end": np.int64(end), "impossible": np.float32(not inside)}
