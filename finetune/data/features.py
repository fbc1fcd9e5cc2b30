"""Model inputs of examples: token rows with their labels, and rows padded to one length.

Source: zihangdai/xlnet classifier_utils.py (padding on the left); run_squad.py pads on the right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from xlpre.data.window_layout import SEGMENT_A, SEGMENT_B, SEGMENT_CLS
from xlpre.text import special_tokens

PaddingSide = Literal["left", "right"]
PADDING_ID = 0  # the published code pads with <unk>, not with <pad>; padding is always masked
PADDING_SEGMENT = {"left": 4, "right": 3}  # as in the published code for each side


@dataclass(frozen=True)
class Row:
    """One unpadded model input.

    Attributes:
        input_ids: (n,) int32.
        segment_ids: (n,) uint8: 0 for text A and its <sep>, 1 for text B and its <sep>, 2 for <cls>.
    """

    input_ids: np.ndarray
    segment_ids: np.ndarray


@dataclass(frozen=True)
class Chunking:
    """Settings for reading rows that are longer than one window.

    Attributes:
        window_len: number of tokens in a window. The head reads the last window of a row; the model reads the earlier windows into
            memory first. None: the whole row is one window.
        mem_len: number of positions in memory. None: the memory length of the model.
    """

    window_len: int | None = None
    mem_len: int | None = None


@dataclass(frozen=True)
class Features:
    """Rows that the model reads together, with their labels.

    Attributes:
        example_index: index of the example in its split.
        rows: model inputs. All features of a task have the same number of rows.
        labels: arrays that the loss needs, by name; empty if the example has no label.
        chunking: whether the rows are read whole or window by window; the same for all features of a task.
    """

    example_index: int
    rows: tuple[Row, ...]
    labels: Mapping[str, Any] = field(default_factory=dict)
    chunking: Chunking = field(default_factory=Chunking)

    @property
    def length(self) -> int:
        """Number of tokens in the longest row."""
        return max(len(row.input_ids) for row in self.rows)


@dataclass(frozen=True)
class PaddedRows:
    """B rows padded to one length T.

    Attributes:
        input_ids: (B, T) int64.
        segment_ids: (B, T) int64; PADDING_SEGMENT at padding.
        padding_mask: (B, T) bool, True at padding.
    """

    input_ids: np.ndarray
    segment_ids: np.ndarray
    padding_mask: np.ndarray


def pair_to_row(a: Sequence[int], b: Sequence[int], max_len: int) -> Row:
    """Concatenate one or two texts into the row `A <sep> B <sep> <cls>` of at most `max_len` tokens.

    A pair that is too long loses its last tokens one by one, each from the longer text, or from B if both are equally long. If
    nothing is left of B, its <sep> is left out as well.

    Args:
        a: token ids of the first text.
        b: token ids of the second text; empty for a single text.
        max_len: maximum number of tokens, special tokens included; at least 4.
    """
    a_len, b_len = _truncated_lengths(len(a), len(b), max_len - (3 if b else 2))
    input_ids, segment_ids = [*a[:a_len], special_tokens.SEP], [SEGMENT_A] * (a_len + 1)
    if b_len:
        input_ids += [*b[:b_len], special_tokens.SEP]
        segment_ids += [SEGMENT_B] * (b_len + 1)
    input_ids.append(special_tokens.CLS)
    segment_ids.append(SEGMENT_CLS)
    return Row(np.array(input_ids, np.int32), np.array(segment_ids, np.uint8))


def pad(rows: Sequence[Row], padding_side: PaddingSide, length: int | None = None) -> PaddedRows:
    """Pad rows to one length.

    Args:
        rows: B rows.
        padding_side: side to pad on.
        length: length T to pad to. None: length of the longest row.
    """
    T = length or max(len(row.input_ids) for row in rows)
    input_ids = np.full((len(rows), T), PADDING_ID, np.int64)
    segment_ids = np.full((len(rows), T), PADDING_SEGMENT[padding_side], np.int64)
    padding_mask = np.ones((len(rows), T), bool)
    for index, row in enumerate(rows):
        n = len(row.input_ids)
        text = slice(T - n, T) if padding_side == "left" else slice(0, n)
        input_ids[index, text], segment_ids[index, text], padding_mask[index, text] = (
            row.input_ids,
            row.segment_ids,
            False,
        )
    return PaddedRows(input_ids, segment_ids, padding_mask)


def _truncated_lengths(a_len: int, b_len: int, max_len: int) -> tuple[int, int]:
    """Truncate a pair of lengths so that their sum is at most `max_len`."""
    if a_len + b_len <= max_len:
        return a_len, b_len
    if a_len > b_len:
        a_len = max(b_len, max_len - b_len)
    else:
        b_len = max(a_len, max_len - a_len)
    # if there is an excess, both texts are equally long by now: they lose tokens in turn, B first
    excess = max(0, a_len + b_len - max_len)
    return a_len - excess // 2, b_len - (excess + 1) // 2
