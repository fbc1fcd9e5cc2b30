"""Texts that are longer than a row: cut as published, read window by window into memory, or as windows whose answers are pooled.

The backbone has no longest text: positions are distances, and memory carries hidden states from window to window (XLNet section 2.4,
Transformer-XL section 3.2). A text that fits into one window is the same row in all three ways.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from finetune.config import TaskDataConfig
from finetune.data.examples import Outputs, Split
from finetune.data.features import Chunking, Row, pair_to_row
from xlpre.model.config import ModelConfig

N_SYMBOLS = 2  # <sep> and <cls> after a text


class Long(Protocol):
    """What becomes of a text; `reading` says how the rows are read."""

    chunking: Chunking

    def rows(self, texts: Sequence[Sequence[int]], place: str) -> list[Row]:
        """Rows of an example, of whose one or two texts these are the tokens.

        Raises:
            ValueError: two, where only one can be read so; `place` is named.
        """


class Cut:
    """One row; what is too long is cut."""

    def __init__(self, data: TaskDataConfig) -> None:
        self.chunking, self._max_len = Chunking(), data.max_seq_len

    def rows(self, texts: Sequence[Sequence[int]], place: str) -> list[Row]:
        """See Long."""
        a, b = (*texts, ())[:2]
        return [pair_to_row(a, b, self._max_len)]


class RecurrentMemory:
    """One row with the whole text, which the model reads window by window, counted from its end.

    The last window is full, however long the text, and the head reads nothing else; the first is what is left over.
    """

    def __init__(self, data: TaskDataConfig) -> None:
        self.chunking = Chunking(data.max_seq_len, data.mem_len)

    def rows(self, texts: Sequence[Sequence[int]], place: str) -> list[Row]:
        """See Long."""
        text = _only(texts, place, "memory")
        return [pair_to_row(text, (), max(len(text), 1) + N_SYMBOLS)]


class Windows:
    """A row for each window, with symbols of its own; windows overlap, and the last ends where the text does or behind it."""

    def __init__(self, data: TaskDataConfig) -> None:
        self.chunking, self._max_len = Chunking(), data.max_seq_len
        self._stride = data.window_stride or max(1, (data.max_seq_len - N_SYMBOLS) // 2)

    def rows(self, texts: Sequence[Sequence[int]], place: str) -> list[Row]:
        """See Long."""
        text, room = _only(texts, place, "windows"), self._max_len - N_SYMBOLS
        begins = range(0, max(len(text) - room, 0) + self._stride, self._stride)
        return [pair_to_row(text[begin : begin + room], (), self._max_len) for begin in begins]


LONG: Mapping[str, Callable[[TaskDataConfig], Long]] = {"cut": Cut, "memory": RecurrentMemory, "windows": Windows}


def pooled(split: Split, outputs: Outputs, pool: str) -> Outputs:
    """Logits of examples (N, ...) in float64, the `mean` or `max` of those of their windows."""
    logits = outputs["logits"].astype(np.float64)
    begins = np.flatnonzero(np.diff([item.example_index for item in split.features], prepend=-1))
    if pool == "max":
        return {"logits": np.maximum.reduceat(logits, begins)}
    counts = np.diff([*begins, len(logits)])
    return {"logits": (np.add.reduceat(logits, begins).T / counts).T}


def check_checksum(data: TaskDataConfig, task: str) -> None:
    """Raise ValueError if texts should be read in another way than whole or cut, for a task whose answer is of several rows."""
    if data.long_text != "cut":
        raise ValueError(
            f"data.long_text={data.long_text} reads one text, and task={task} several together; leave data.long_text=cut"
        )


def check_memory(data: TaskDataConfig, shape: ModelConfig) -> None:
    """Raise ValueError if a text should be read into memory, and there is none."""
    if data.long_text == "memory" and not (data.mem_len or shape.mem_len):
        raise ValueError(
            "data.long_text=memory needs memory, and the model of init= has model.mem_len=0; say how much: data.mem_len=384"
        )


def _only(texts: Sequence[Sequence[int]], place: str, long: str) -> Sequence[int]:
    if len(texts) != 1:
        raise ValueError(
            f"{place}: data.long_text={long} reads one text, and here are {len(texts)}; leave data.long_text=cut"
        )
    return texts[0]
