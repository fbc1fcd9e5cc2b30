"""One or two texts as a row of a task, `A <sep> B <sep> <cls>`, cut to a length; rows as one array, padded to the longest.

Source: zihangdai/xlnet classifier_utils.py (padding on the left); its run_squad.py pads on the right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from xlpre.data.window_layout import SEGMENT_A, SEGMENT_B, SEGMENT_CLS
from xlpre.text import special_tokens

Padding = Literal["left", "right"]
PADDING_TOKEN = 0  # the published code pads with <unk>, not with <pad>; nothing may look at it
SEGMENT_PADDING = {"left": 4, "right": 3}


@dataclass(frozen=True)
class Row:
    """What is read in one go, without padding.

    Attributes:
        ids: (n,) int32.
        segments: (n,) uint8: 0 for A and its <sep>, 1 for B and its <sep>, 2 for <cls>.
    """

    ids: np.ndarray
    segments: np.ndarray


@dataclass(frozen=True)
class Inputs:
    """B rows of one length.

    Attributes:
        ids: (B, T) int64.
        segments: (B, T) int64, as of the rows, and 4 (left) or 3 (right) for padding.
        padding: (B, T) bool, true where there is no text.
    """

    ids: np.ndarray
    segments: np.ndarray
    padding: np.ndarray


def lay_out(a: Sequence[int], b: Sequence[int], length: int) -> Row:
    """`a` and `b` (empty: `a` alone) as a row of at most `length` tokens.

    Too long a pair loses its last tokens: always the longer of the two, of two equals the second. A second text of which
    nothing is left goes with its <sep>.

    Raises:
        ValueError: no room for the symbols and a token.
    """
    n_symbols = 3 if b else 2
    if length <= n_symbols:
        raise ValueError(
            f"a row of {length} tokens has no room for {n_symbols} symbols and a token; set a length above {n_symbols}"
        )
    a_len, b_len = _cut(len(a), len(b), length - n_symbols)
    ids, segments = [*a[:a_len], special_tokens.SEP], [SEGMENT_A] * (a_len + 1)
    if b_len:
        ids += [*b[:b_len], special_tokens.SEP]
        segments += [SEGMENT_B] * (b_len + 1)
    ids.append(special_tokens.CLS)
    segments.append(SEGMENT_CLS)
    return Row(np.array(ids, np.int32), np.array(segments, np.uint8))


def pad(rows: Sequence[Row], side: Padding, length: int | None = None) -> Inputs:
    """Rows as one array, padded to `length` (by default that of the longest)."""
    T = length or max(len(row.ids) for row in rows)
    ids = np.full((len(rows), T), PADDING_TOKEN, np.int64)
    segments = np.full((len(rows), T), SEGMENT_PADDING[side], np.int64)
    padding = np.ones((len(rows), T), bool)
    for number, row in enumerate(rows):
        n = len(row.ids)
        where = slice(T - n, T) if side == "left" else slice(0, n)
        ids[number, where], segments[number, where], padding[number, where] = row.ids, row.segments, False
    return Inputs(ids, segments, padding)


def _cut(a_len: int, b_len: int, room: int) -> tuple[int, int]:
    """Lengths that fit into `room` together."""
    if a_len + b_len <= room:
        return a_len, b_len
    if a_len > b_len:
        a_len = max(b_len, room - b_len)
    else:
        b_len = max(a_len, room - a_len)
    excess = max(0, a_len + b_len - room)  # now both are equally long, and lose in turn, B first
    return a_len - excess // 2, b_len - (excess + 1) // 2
