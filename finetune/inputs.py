"""One or two texts as a row of a task: `A <sep> B <sep> <cls>`, cut and padded to one length.

Source: zihangdai/xlnet classifier_utils.py (padding on the left); its run_squad.py pads on the right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from xlpre.data.layout import SEGMENT_A, SEGMENT_B, SEGMENT_CLS
from xlpre.text import symbols

PADDING_TOKEN = 0  # the published code pads with <unk>, not with <pad>; nothing may look at it
SEGMENT_PADDING = {"left": 4, "right": 3}


@dataclass(frozen=True)
class Inputs:
    """One row.

    Attributes:
        ids: (T,) int64.
        segments: (T,) int64: 0 for A and its <sep>, 1 for B and its <sep>, 2 for <cls>, 4 (left) or 3 (right) for padding.
        padding: (T,) bool, true where there is no text.
    """

    ids: np.ndarray
    segments: np.ndarray
    padding: np.ndarray


def lay_out_pair(a: Sequence[int], b: Sequence[int], length: int, padding: Literal["left", "right"] = "left") -> Inputs:
    """`a` and `b` (empty: `a` alone) as a row of `length` tokens.

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
    ids, segments = [*a[:a_len], symbols.SEP], [SEGMENT_A] * (a_len + 1)
    if b_len:
        ids += [*b[:b_len], symbols.SEP]
        segments += [SEGMENT_B] * (b_len + 1)
    ids.append(symbols.CLS)
    segments.append(SEGMENT_CLS)
    missing = length - len(ids)
    around = (missing, 0) if padding == "left" else (0, missing)
    return Inputs(
        ids=np.pad(np.array(ids, np.int64), around, constant_values=PADDING_TOKEN),
        segments=np.pad(np.array(segments, np.int64), around, constant_values=SEGMENT_PADDING[padding]),
        padding=np.pad(np.zeros(len(ids), bool), around, constant_values=True),
    )


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
