"""Strategies for texts longer than `data.max_seq_len`: truncation, recurrent memory, or sliding windows whose predictions are pooled.

The backbone has no maximum text length: positions are relative distances, and memory carries hidden states from window to window
(XLNet section 2.4, Transformer-XL section 3.2). A text that fits into one window becomes the same row under every strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from finetune.config import TaskDataConfig
from finetune.data.examples import Outputs, Split
from finetune.data.features import Chunking, Row, pair_to_row
from xlpre.common.errors import InputError
from xlpre.model.config import ModelConfig
from xlpre.text.special_tokens import N_SYMBOLS


class LongTextStrategy(Protocol):
    """Strategy to turn a text of any length into rows. `chunking` describes how the model reads them."""

    chunking: Chunking

    def rows(self, texts: Sequence[Sequence[int]], location: str) -> list[Row]:
        """Return the rows of an example.

        Args:
            texts: token ids of its one or two texts.
            location: file and line, for error messages.

        Raises:
            InputError: the example has two texts, but the strategy reads only one.
        """


class Truncate:
    """Truncate an example to one row."""

    def __init__(self, data: TaskDataConfig) -> None:
        self.chunking, self._max_len = Chunking(), data.max_seq_len

    def rows(self, texts: Sequence[Sequence[int]], location: str) -> list[Row]:
        """Return one row. See LongTextStrategy."""
        a, b = (*texts, ())[:2]
        return [pair_to_row(a, b, self._max_len)]


class RecurrentMemory:
    """Keep the whole text in one row, which the model reads window by window.

    Windows are cut from the end of the text. So the last window, which the head reads, is full, and the first one contains the
    remainder.
    """

    def __init__(self, data: TaskDataConfig) -> None:
        self.chunking = Chunking(data.max_seq_len, data.mem_len)

    def rows(self, texts: Sequence[Sequence[int]], location: str) -> list[Row]:
        """Return one row of any length. See LongTextStrategy."""
        text = _single_text(texts, location, "memory")
        return [pair_to_row(text, (), max(len(text), 1) + N_SYMBOLS)]


class SlidingWindows:
    """Split a text into overlapping windows. Each is a row with its own special tokens."""

    def __init__(self, data: TaskDataConfig) -> None:
        self.chunking, self._max_len = Chunking(), data.max_seq_len
        self._stride = data.window_stride or max(1, (data.max_seq_len - N_SYMBOLS) // 2)

    def rows(self, texts: Sequence[Sequence[int]], location: str) -> list[Row]:
        """Return a row for each window. See LongTextStrategy."""
        text, window_len = _single_text(texts, location, "windows"), self._max_len - N_SYMBOLS
        starts = range(0, max(len(text) - window_len, 0) + self._stride, self._stride)
        return [pair_to_row(text[start : start + window_len], (), self._max_len) for start in starts]


STRATEGIES: Mapping[str, Callable[[TaskDataConfig], LongTextStrategy]] = {
    "truncate": Truncate,
    "memory": RecurrentMemory,
    "windows": SlidingWindows,
}


def pool_windows(split: Split, outputs: Outputs, pooling: str) -> Outputs:
    """Pool the logits of the windows of each example.

    Args:
        split: examples and their windows.
        outputs: `logits` (n, ...), one entry per window.
        pooling: `mean` or `max`.

    Returns:
        `logits` (N, ...) float64, one entry per example.
    """
    logits = outputs["logits"].astype(np.float64)
    starts = np.flatnonzero(np.diff([feature.example_index for feature in split.features], prepend=-1))
    if pooling == "max":
        return {"logits": np.maximum.reduceat(logits, starts)}
    counts = np.diff([*starts, len(logits)])
    return {"logits": (np.add.reduceat(logits, starts).T / counts).T}


def require_truncation(data: TaskDataConfig, task: str) -> None:
    """Check that `data.long_text` is `truncate`, for a task that reads several texts together.

    Raises:
        InputError: another strategy is set.
    """
    if data.long_text != "truncate":
        raise InputError(
            f"data.long_text={data.long_text} is invalid: it works for a single text, but task={task} reads several together. "
            "Set data.long_text=truncate."
        )


def check_memory(data: TaskDataConfig, config: ModelConfig) -> None:
    """Check that the model has memory if `data.long_text=memory`.

    Raises:
        InputError: the memory length is 0.
    """
    if data.long_text == "memory" and not (data.mem_len or config.mem_len):
        raise InputError(
            "data.long_text=memory is invalid: it needs a memory, but the model in init_from has model.mem_len=0. "
            "Set a memory length, such as data.mem_len=384."
        )


def _single_text(texts: Sequence[Sequence[int]], location: str, long_text: str) -> Sequence[int]:
    if len(texts) != 1:
        raise InputError(
            f"{location}: data.long_text={long_text} is invalid: it reads a single text, but this example has {len(texts)}. "
            "Set data.long_text=truncate."
        )
    return texts[0]
