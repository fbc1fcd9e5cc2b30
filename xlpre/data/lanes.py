"""Lanes: a lane is the text that one batch row reads, step after step. Its position is a pure function of (seed, lane, step).

The text of a split is cut into passages of `windows_per_run` consecutive windows. Passages of a short text are shorter, so that each lane
has at least one. A lane reads one passage after another, in a random order that is drawn for each epoch. Inside a passage, each
window starts where the reused part of the previous window ended, so memory stays valid.

In an epoch, each passage is read by one lane, from left to right or from right to left. Forward and backward lanes together read the
whole text. Memory use does not grow with the text, because the order of the passages is a keyed permutation that is computed on demand.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from xlpre.common.errors import InputError
from xlpre.data.sparse_index import SparseIndex
from xlpre.data.store import SplitData


class BoundaryIndex:
    """Positions of sentence or document boundaries in reading direction. The start and the end of the text are boundaries, too.

    Args:
        ends: position after the last token of each sentence or document in the forward text. The last one is the length of the text.
        backward: True if the text is read from right to left.
    """

    def __init__(self, ends: SparseIndex, backward: bool) -> None:
        self._ends, self._backward, self._length = ends, backward, ends[-1]

    def __getitem__(self, index: int) -> int:
        """Return the position of boundary `index`. Boundary 0 is the start of the text."""
        if self._backward:
            return self._length - self._forward(len(self._ends) - index)
        return self._forward(index)

    def first_from(self, position: int) -> int:
        """Return the index of the first boundary at or after `position`."""
        if self._backward:
            return len(self._ends) - self._ends.searchsorted(self._length - position, side="right")
        return self._ends.searchsorted(position) + 1 if position > 0 else 0

    def last_until(self, position: int) -> int:
        """Return the index of the last boundary at or before `position`, which must be the position of a token."""
        return self.first_from(position + 1) - 1

    def _forward(self, index: int) -> int:
        return self._ends[index - 1] if index else 0


class DirectedText:
    """A split read in one direction. Position 0 is its first token, or its last token if `backward`.

    Attributes:
        backward: True if the text is read from right to left.
        sentences: boundaries of sentences.
        documents: boundaries of documents.
    """

    def __init__(self, data: SplitData, backward: bool = False) -> None:
        self.backward = backward
        self.sentences, self.documents = (
            BoundaryIndex(ends, backward) for ends in (data.sentence_index, data.document_index)
        )
        self._tokens = np.asarray(data.tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def tokens(self, begin: int, end: int) -> np.ndarray:
        """Return the (end - begin,) token ids of positions [begin, end) in reading order."""
        if self.backward:
            return self._tokens[len(self) - end : len(self) - begin][::-1]
        return self._tokens[begin:end]


@dataclass(frozen=True, slots=True)
class WindowLocation:
    """Location of a window in a text.

    Attributes:
        text: text that contains the window.
        begin: position of the first token of the window in `text`.
        visible_mem_len: number of memory positions before the window that are visible. It is 0 at the start of a passage, but
            `initial_mem_len` at the start of the first passage of a lane.
    """

    text: DirectedText
    begin: int
    visible_mem_len: int


class Lanes:
    """`n_lanes` lanes that read a split.

    Args:
        data: split to read.
        n_lanes: rows of a step, over all processes and micro-steps.
        stride: tokens by which a lane advances per step.
        lookahead: tokens that a window may read, counted from its first token.
        windows_per_run: maximum number of windows in a passage.
        bidirectional: True if every second lane reads backward.
        seed: seed of the order of the passages.
        at_document_end: `carry`: memory stays valid in the next document. `cut`: a window sees memory of its own document only.
        initial_mem_len: number of memory positions that are visible in the first window of a lane: M with `memory.initial=zeros`, else 0.
        origin: name of the split in error messages.

    Raises:
        InputError: the split is shorter than one window, or too short to give each lane different text.
    """

    def __init__(
        self,
        data: SplitData,
        n_lanes: int,
        *,
        stride: int,
        lookahead: int,
        windows_per_run: int,
        bidirectional: bool,
        seed: int,
        at_document_end: Literal["carry", "cut"] = "carry",
        initial_mem_len: int = 0,
        origin: str = "the text",
    ) -> None:
        self.n_lanes, self.bidirectional = n_lanes, bidirectional
        self._texts = (DirectedText(data), DirectedText(data, backward=True))
        self._stride, self._seed, self._cut = stride, seed, at_document_end == "cut"
        self._initial_mem_len = initial_mem_len
        last_begin = len(data) - max(lookahead, stride)
        if last_begin < 0:
            raise InputError(
                f"data.seq_len is invalid: a window needs {max(lookahead, stride)} consecutive tokens, but {origin} has {len(data)}. "
                "Set a smaller data.seq_len, or provide more text."
            )
        if n_lanes > (largest := max_lanes(len(data), stride, lookahead)):
            raise InputError(
                f"train.global_batch_size={n_lanes} is invalid: each row of a step must read different text, but {origin} has "
                f"{len(data):,} tokens, enough for only {largest:,} rows. Set train.global_batch_size={largest} or less, or provide more "
                "text."
            )
        self.windows_per_run = max(1, min(windows_per_run, last_begin // (stride * n_lanes)))
        self.n_passages = last_begin // (self.windows_per_run * stride) or 1
        # Each epoch shifts all passages, so that windows start at other tokens and the end of the text is read.
        self._max_shift = last_begin - (self.n_passages * self.windows_per_run - 1) * stride
        self._max_passage_begin = last_begin - (self.windows_per_run - 1) * stride
        # Every step needs the start of its passage, and the permutation takes 6 to 20 microseconds.
        self._cached_passage_begin = lru_cache(maxsize=4 * n_lanes)(self._passage_begin)

    def location(self, lane: int, step: int) -> WindowLocation:
        """Return the location of the window of `lane` at `step`; both count from 0."""
        passage, window = divmod(step, self.windows_per_run)
        text = self._texts[self.bidirectional and lane % 2]
        offset = window * self._stride
        visible_mem_len = offset if passage else offset + self._initial_mem_len
        begin = self._cached_passage_begin(passage * self.n_lanes + lane)
        if text.backward:
            begin = min(len(text) - begin - self.windows_per_run * self._stride, self._max_passage_begin)
        begin += offset
        if self._cut:
            document_begin = text.documents[text.documents.last_until(begin)]
            visible_mem_len = min(visible_mem_len, begin - document_begin)
        return WindowLocation(text, begin, visible_mem_len)

    def _passage_begin(self, number: int) -> int:
        """Return the position in the forward text of the first token of a passage. `number` counts the passages of all lanes and epochs."""
        epoch, index = divmod(number, self.n_passages)
        passage = permute_index(index, self.n_passages, (self._seed, epoch))
        shift = int(_hash64(self._seed, epoch) % (self._max_shift + 1))
        return passage * self.windows_per_run * self._stride + shift


def max_lanes(n_tokens: int, stride: int, lookahead: int) -> int:
    """Return the largest number of lanes that can read different parts of a text of `n_tokens` tokens; see Lanes."""
    return max(1, (n_tokens - max(lookahead, stride)) // stride)


def permute_index(index: int, size: int, key: tuple[int, int]) -> int:
    """Return the image of `index` in a pseudo-random permutation of range(size), in O(1) memory.

    A Feistel network on the next even power of two is iterated until the result is below `size` (Black and Rogaway 2002).

    Args:
        index: 0 to size - 1.
        size: number of elements.
        key: selects the permutation.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    while True:
        left, right = index >> half_bits, index & mask
        for round_index in range(4):
            left, right = right, left ^ (_hash64(key[0], key[1], round_index, right) & mask)
        index = left << half_bits | right
        if index < size:
            return index


def _hash64(*values: int) -> int:
    """Return a 64-bit hash of integers: the finalizer of splitmix64, chained."""
    state = 0
    for value in values:
        state = (state + value + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ state >> 27) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state
