"""Batches of items of like length, dealt to processes and micro-steps. Which items an update reads depends on seed and step alone.

The items of an update are sorted by length and cut into parts, each padded to its own longest. The loss is the mean over all of
the update's items, whatever the parts, processes and micro-steps, so that no work on padding costs nothing but time saved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from finetune.data.examples import Item, Reading
from finetune.data.features import Padding, pad
from xlpre.batch import Batch
from xlpre.model.visibility import HIDDEN

FILLER = -1  # the number of an item that only fills a round; its answer is dropped


@dataclass(frozen=True)
class Part:
    """n items of like length, whose B = n C rows are padded to one length T.

    Attributes:
        ids: (B, T) int64; the rows of an item are next to each other.
        segments: (B, T) int64.
        padding: (B, T) bool.
        answers: what losses need, by name, each (n, ...); empty where it is not known of all.
        numbers: of the items, (n,), on the CPU.
        reading: whether rows are read whole or window by window.
    """

    ids: Tensor
    segments: Tensor
    padding: Tensor
    answers: dict[str, Tensor]
    numbers: np.ndarray
    reading: Reading = field(default_factory=Reading)

    def to(self, device: torch.device) -> Part:
        """The same on another device."""
        ids, segments, padding = (_moved(x, device) for x in (self.ids, self.segments, self.padding))
        answers = {name: _moved(answer, device) for name, answer in self.answers.items()}
        return dataclasses.replace(self, ids=ids, segments=segments, padding=padding, answers=answers)

    def windows(self) -> list[Part]:
        """What is read at once, in its order: cut from the right, so that the first may be narrower and holds all padding."""
        length = self.ids.size(1)
        width = self.reading.window or length
        cuts = [slice(max(end - width, 0), end) for end in range(length, 0, -width)][::-1]
        return [
            dataclasses.replace(
                self, ids=self.ids[:, cut], segments=self.segments[:, cut], padding=self.padding[:, cut]
            )
            for cut in cuts
        ]

    def batch(self, positions: Tensor, seen: Tensor | None = None, reuse_len: int = 0) -> Batch:
        """As the backbone reads it: all tokens see all others but padding.

        Args:
            positions: (B, P), where hidden states are wanted.
            seen: (B,), how many tokens of the row were read before, which memory may show; none if not given.
            reuse_len: how many tokens enter memory.
        """
        B = len(self.ids)
        of_rows = self.ids.new_zeros(B)
        return Batch(
            input_ids=self.ids,
            segment_ids=self.segments,
            query_rank=torch.ones_like(self.ids, dtype=torch.int32),
            key_rank=self.padding.int() * HIDDEN,
            target_positions=positions,
            targets=torch.zeros_like(positions),
            target_weights=torch.ones_like(positions, dtype=torch.float32),
            backward=of_rows.bool(),
            remembers=of_rows if seen is None else seen,
            pair_label=of_rows,
            reuse_len=reuse_len,
        )


@dataclass(frozen=True)
class Parts:
    """What one process reads in one micro-step; its loss is the sum over its items times `scale`."""

    parts: list[Part]
    scale: float

    def to(self, device: torch.device) -> Parts:
        """The same on another device."""
        return Parts([part.to(device) for part in self.parts], self.scale)

    @property
    def n_tokens(self) -> tuple[int, int]:
        """Tokens of text, and places that are computed, padding included."""
        return sum(int((~part.padding).sum()) for part in self.parts), sum(part.ids.numel() for part in self.parts)


class LengthBucketSampler:
    """Deals items out.

    Args:
        items: all of them.
        side: of the padding.
        process: of this process,
        n_processes: of the job.
        pass_tokens: so many tokens cost as much time as one more forward pass; it decides how finely parts are cut.
    """

    def __init__(self, items: Sequence[Item], side: Padding, process: int, world_size: int, pass_tokens: int) -> None:
        self._items, self._side, self._pass_tokens = items, side, pass_tokens
        self._process, self._n_processes = process, world_size
        self._lengths = np.array([item.length for item in items])
        self._order = (-1, np.empty(0, np.int64))

    def update(self, seed: int, step: int, batch_size: int, accumulation: int) -> list[Parts]:
        """The micro-steps of update `step`, `batch_size` items in all; every epoch has an order of its own."""
        numbers = np.array([self._number(seed, place) for place in range(step * batch_size, (step + 1) * batch_size)])
        numbers = numbers[np.argsort(self._lengths[numbers], kind="stable")]
        # DeepSpeed divides by the accumulation and takes the mean over processes
        scale = accumulation * self._n_processes / batch_size
        rounds = numbers.reshape(accumulation, -1, self._n_processes)
        return [Parts(self._parts(of_micro), scale) for of_micro in rounds]

    def once(self, rows: int) -> Iterator[Part]:
        """All items, each once over all processes, of which each gets equally many parts; up to `rows` items in one."""
        numbers = np.argsort(self._lengths, kind="stable")
        filled = np.append(numbers, np.full(-len(numbers) % self._n_processes, FILLER))
        rounds = filled.reshape(-1, self._n_processes)
        for begin in range(0, len(rounds), rows):
            yield from self._parts(rounds[begin : begin + rows])

    def _number(self, seed: int, place: int) -> int:
        """The item at a place in the endless row of epochs."""
        epoch, index = divmod(place, len(self._items))
        if self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng([seed, epoch]).permutation(len(self._items)))
        return int(self._order[1][index])

    def _parts(self, rounds: np.ndarray) -> list[Part]:
        """Parts of this process, from rounds (n, processes) of items by length; all processes cut at the same rounds."""
        longest = self._lengths[rounds].max(1)
        n_rows = len(self._items[0].rows)
        ends = cut(longest * n_rows, self._pass_tokens)
        mine = rounds[:, self._process]
        return [
            self._part(mine[begin:end], int(longest[begin:end].max()))
            for begin, end in zip([0, *ends], ends, strict=False)
        ]

    def _part(self, numbers: np.ndarray, length: int) -> Part:
        items = [self._items[number] for number in numbers]  # NOBODY is the last item, for the sake of its shape
        inputs = pad([row for item in items for row in item.rows], self._side, length)
        known = items[0].answers.keys() if all(item.answers for item in items) else ()
        answers = {name: torch.from_numpy(np.stack([item.answers[name] for item in items])) for name in known}
        ids, segments, padding = map(torch.from_numpy, (inputs.ids, inputs.segments, inputs.padding))
        return Part(ids, segments, padding, answers, numbers, items[0].reading)


def _moved(x: Tensor, device: torch.device) -> Tensor:
    """To a GPU from page-locked memory, so that nobody waits for the copy."""
    return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)


def cut(lengths: np.ndarray, overhead: int) -> list[int]:
    """Where to cut rising `lengths` (n,) so that parts, each as wide as its longest, and `overhead` for each, cost least.

    Returns:
        The end of each part; the last is n.
    """
    n = len(lengths)
    cost, begin = np.zeros(n + 1), np.zeros(n + 1, np.int64)
    for end in range(1, n + 1):
        of_begin = cost[:end] + (end - np.arange(end)) * lengths[end - 1] + overhead
        begin[end] = of_begin.argmin()
        cost[end] = of_begin[begin[end]]
    ends = [n]
    while begin[ends[-1]]:
        ends.append(int(begin[ends[-1]]))
    return ends[::-1]
