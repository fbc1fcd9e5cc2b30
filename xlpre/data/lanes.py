"""Lanes: which stretch of text each batch row reads at each step. A pure function of (seed, lane, step).

The text of a part is cut into runs of `windows_per_run` windows, fewer where there would not be a run for each lane. A lane walks one run
after another, in an order drawn anew for each epoch; inside a run every window starts where the reused half of the last one ended, so that
memory continues. A run is the same text in either direction, so that lanes of both read all of it between them. Nothing held here grows
with the text: the order is a keyed permutation computed on demand.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from xlpre.data.store import SplitData


class BoundaryIndex:
    """Where the sentences (or documents) of a text read in one direction meet: its begin, ..., its end, by index.

    Args:
        ends: (N,) int64, increasing offsets in the forward text, of which the last is its length.
        backward: the text is read from right to left.
    """

    def __init__(self, ends: np.ndarray, backward: bool) -> None:
        # not a np.memmap, whose every slice and item costs a microsecond
        self._ends, self._backward, self._length = np.asarray(ends), backward, int(ends[-1])

    def __getitem__(self, index: int) -> int:
        """The position of boundary `index`; 0 is the begin of the text."""
        if self._backward:
            return self._length - self._forward(len(self._ends) - index)
        return self._forward(index)

    def first_from(self, position: int) -> int:
        """The index of the first boundary at or after `position`."""
        if self._backward:
            return len(self._ends) - int(self._ends.searchsorted(self._length - position, side="right"))
        return int(self._ends.searchsorted(position)) + 1 if position > 0 else 0

    def last_until(self, position: int) -> int:
        """The index of the last boundary at or before `position`, which is that of a token."""
        return self.first_from(position + 1) - 1

    def _forward(self, index: int) -> int:
        return int(self._ends[index - 1]) if index else 0


class DirectedText:
    """A part read in one direction. Position 0 is its first token, or its last one if `backward`.

    Attributes:
        backward: the direction.
        sentences: where sentences meet.
        documents: where documents meet.
    """

    def __init__(self, part: SplitData, backward: bool = False) -> None:
        self.backward = backward
        self.sentences, self.documents = (
            BoundaryIndex(ends, backward) for ends in (part.sentence_ends, part.document_ends)
        )
        self._tokens = np.asarray(part.tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def tokens(self, begin: int, end: int) -> np.ndarray:
        """(end - begin,) ids in reading order."""
        if self.backward:
            return self._tokens[len(self) - end : len(self) - begin][::-1]
        return self._tokens[begin:end]


@dataclass(frozen=True, slots=True)
class WindowLocation:
    """Where a row's window lies.

    Attributes:
        text: what it is read from.
        begin: its first token, in the text's direction.
        remembers: how many tokens before it the row's memory may show; 0 where its lane jumped.
    """

    text: DirectedText
    begin: int
    visible_mem_len: int


class Lanes:
    """`n_lanes` lanes over a part: `place(lane, step)`.

    Args:
        part: the text.
        n_lanes: rows of a step, over all processes and accumulation.
        stride: tokens that a lane advances a step.
        reach: tokens that a window may read from its first one on.
        run_windows: windows of a run at most.
        bidirectional: every second lane reads backward.
        seed: of the order of runs.
        at_document_end: whether memory is carried into the next document or cut.
        origin: the part's name, for messages.

    Raises:
        ValueError: the text is shorter than one window.
    """

    def __init__(
        self,
        part: SplitData,
        n_lanes: int,
        *,
        stride: int,
        lookahead: int,
        windows_per_run: int,
        bidirectional: bool,
        seed: int,
        at_document_end: Literal["carry", "cut"] = "carry",
        origin: str = "the text",
    ) -> None:
        self.n_lanes, self.bidirectional = n_lanes, bidirectional
        self._texts = (DirectedText(part), DirectedText(part, backward=True))
        self._stride, self._seed, self._cut = stride, seed, at_document_end == "cut"
        available = len(part) - max(lookahead, stride)
        if available < 0:
            raise ValueError(
                f"data.seq_len needs {max(lookahead, stride)} tokens in a row, but {origin} has {len(part)}; "
                "set a smaller data.seq_len, or give more text"
            )
        self.windows_per_run = max(1, min(windows_per_run, available // (stride * n_lanes)))
        self.n_runs = available // (self.windows_per_run * stride) or 1
        # each epoch shifts all runs, so that windows do not begin at the same tokens again and the text's end is read, too
        self._slack = available - (self.n_runs * self.windows_per_run - 1) * stride
        self._last = available - (self.windows_per_run - 1) * stride  # where a run can begin
        # a lane asks for the same run at every step of it, and the permutation takes 6 to 20 microseconds (2026-11)
        self._begin_of = lru_cache(maxsize=4 * n_lanes)(self._run_begin)

    def location(self, lane: int, step: int) -> WindowLocation:
        """Where `lane` reads at `step` (both from 0)."""
        slot, window = divmod(step, self.windows_per_run)
        text = self._texts[self.bidirectional and lane % 2]
        walked = window * self._stride
        begin = self._begin_of(slot * self.n_lanes + lane)
        if text.backward:
            begin = min(len(text) - begin - self.windows_per_run * self._stride, self._last)
        begin += walked
        if self._cut:
            walked = min(walked, begin - text.documents[text.documents.last_until(begin)])
        return WindowLocation(text, begin, walked)

    def _run_begin(self, number: int) -> int:
        """The first token, in the forward text, of the run that is read as the `number`-th of all."""
        epoch, index = divmod(number, self.n_runs)
        run = permute_index(index, self.n_runs, (self._seed, epoch))
        return run * self.windows_per_run * self._stride + int(_mix(self._seed, epoch) % (self._slack + 1))


def permute_index(index: int, size: int, key: tuple[int, int]) -> int:
    """Where `index` goes in a pseudo-random permutation of range(size), in O(1) memory.

    A Feistel network on the next even power of two, walked until it falls inside (Black and Rogaway 2002).
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    while True:
        left, right = index >> half_bits, index & mask
        for round_ in range(4):
            left, right = right, left ^ (_mix(key[0], key[1], round_, right) & mask)
        index = left << half_bits | right
        if index < size:
            return index


def _mix(*words: int) -> int:
    """A 64-bit hash of integers (the finaliser of splitmix64, chained)."""
    state = 0
    for word in words:
        state = (state + word + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ state >> 27) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state
