"""Lanes: which stretch of text each batch row reads at each step. A pure function of (seed, lane, step).

The text of a part is cut into runs of `run_windows` windows. A lane walks one run after another, in an order drawn anew for
each epoch; inside a run every window starts where the reused half of the last one ended, so that memory continues. Nothing
held here grows with the text: the order is a keyed permutation computed on demand.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from xlpre.data.store import Part


@dataclass(frozen=True)
class Place:
    """Where a row's window lies: its first token in reading direction, and whether its lane's last window came just before."""

    begin: int
    backward: bool
    continues: bool


class Text:
    """A part read in one direction. Position 0 is its first token, or its last one if `backward`."""

    def __init__(self, part: Part, backward: bool = False) -> None:
        self._part, self._backward = part, backward

    def __len__(self) -> int:
        return len(self._part)

    def tokens(self, begin: int, end: int) -> np.ndarray:
        """(end - begin,) ids in reading order."""
        if self._backward:
            return self._part.tokens[len(self) - end : len(self) - begin][::-1]
        return self._part.tokens[begin:end]

    def boundaries(self, begin: int, end: int) -> np.ndarray:
        """Sentence boundaries x with begin < x <= end, increasing (a sentence ends just before x)."""
        if self._backward:
            inner = self._between(len(self) - end, len(self) - begin)
            return len(self) - inner[::-1]
        return self._between(begin + 1, end + 1)

    def boundary_after(self, position: int) -> int:
        """The first sentence boundary at or after `position`, at most the end of the text."""
        reach = 256
        while True:
            found = self.boundaries(position - 1, min(position + reach, len(self)))
            if len(found):
                return int(found[0])
            if position + reach >= len(self):
                return len(self)
            reach *= 4

    def boundary_before(self, position: int) -> int:
        """The last sentence boundary at or before `position`; 0 is one."""
        reach = 256
        while True:
            found = self.boundaries(max(position - reach, 0), position)
            if len(found):
                return int(found[-1])
            if position - reach <= 0:
                return 0
            reach *= 4

    def _between(self, low: int, high: int) -> np.ndarray:
        """Boundaries x of the forward text with low <= x < high; the text's start is one too."""
        ends = self._part.sentence_ends
        first, last = np.searchsorted(ends, (low, high))
        inner = np.asarray(ends[first:last])
        return np.concatenate([[0], inner]) if low <= 0 < high else inner


class Lanes:
    """`n_lanes` lanes over a part: `place(lane, step)`, and `text(place)` to read from.

    Args:
        part: the text.
        n_lanes: rows of a step, over all processes and accumulation.
        stride: tokens that a lane advances a step.
        reach: tokens that a window may read from its first one on.
        run_windows: windows of a run; shortened where the text is short.
        bidirectional: every second lane reads backward.
        seed: of the order of runs.
        origin: the part's name, for messages.

    Raises:
        ValueError: the text is shorter than one window.
    """

    def __init__(
        self,
        part: Part,
        n_lanes: int,
        *,
        stride: int,
        reach: int,
        run_windows: int,
        bidirectional: bool,
        seed: int,
        origin: str = "the text",
    ) -> None:
        self.n_lanes, self.bidirectional = n_lanes, bidirectional
        self._texts = (Text(part), Text(part, backward=True))
        self._stride, self._seed = stride, seed
        available = len(part) - max(reach, stride)
        if available < 0:
            raise ValueError(
                f"data.window needs {max(reach, stride)} tokens in a row, but {origin} has {len(part)}; "
                "set a smaller data.window, or give more text"
            )
        self.run_windows = min(run_windows, available // stride + 1)
        self.n_runs = available // (self.run_windows * stride) or 1
        # each epoch shifts all runs by a little, so that windows do not begin at the same tokens again
        self._slack = min(stride, max(available - (self.n_runs * self.run_windows - 1) * stride, 0))

    def place(self, lane: int, step: int) -> Place:
        """Where `lane` reads at `step` (both from 0)."""
        slot, window = divmod(step, self.run_windows)
        epoch, index = divmod(slot * self.n_lanes + lane, self.n_runs)
        run = permuted(index, self.n_runs, (self._seed, epoch))
        shift = int(_mix(self._seed, epoch) % (self._slack + 1))
        begin = (run * self.run_windows + window) * self._stride + shift
        return Place(begin, self.bidirectional and lane % 2 == 1, window > 0)

    def text(self, place: Place) -> Text:
        """The part, read in the direction of `place`."""
        return self._texts[place.backward]


def permuted(index: int, size: int, key: tuple[int, int]) -> int:
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
