"""In which parts attention on processors is computed: a few heads of a block of rows of one window at a time.

Few enough scores to stay in the cache from product to softmax to product, and many enough that calling torch costs little.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from xlpre.model.geometry import Geometry

ROWS = 128  # of content in a block
SCORES = 1 << 18  # of a part: 1 MB
KEPT = (
    1 << 24
)  # numbers by row and key: 64 MB; where there are more of them they are computed again when they are needed
NEVER = -1e30  # is added to the score of what is not seen

Index = tuple[int, slice, slice]


class Masks(NamedTuple):
    """Of a block, as numbers: with booleans torch is several times slower here.

    Attributes:
        hidden: (n, k) NEVER where a row does not see a key, else 0.
        different: (n, k) 1 where segments differ, else 0.
        columns: (m, k) where among all distances the key of each row that is not in order stands.
    """

    hidden: Tensor
    different: Tensor
    columns: Tensor


class Block(NamedTuple):
    """Rows of one window that are computed together.

    Attributes:
        number: its own.
        row: which of the batch.
        first: of the window's rows,
        last: one after them.
        n_in_order: so many of them follow each other in the window, from place `first` on; the others are targets.
        n_keys: so many first keys are seen by any of them; no others are computed.
        direction: of the window.
        distances: those that the block needs, by index.
        sees: (n, 1) 1 where a row sees anything, else 0; None where all do.
    """

    number: int
    row: int
    first: int
    last: int
    n_in_order: int
    n_keys: int
    direction: int
    distances: slice
    sees: Tensor | None


class Part(NamedTuple):
    """Some heads of a block, as indices.

    Attributes:
        block: see Block.
        rows: of what is (B, H, N, ...).
        keys: of what is (B, H, K, ...).
        distances: of what is (2, H, R, ...).
    """

    block: Block
    rows: Index
    keys: Index
    distances: Index


class Plan:
    """The parts of a step; those of the same rows of every window follow each other.

    Args:
        geometry: of the rows.
        dtype: of what is computed.
    """

    def __init__(self, geometry: Geometry, dtype: torch.dtype) -> None:
        self._geometry, self._dtype = geometry, dtype
        self._few = geometry.query_rank.numel() * geometry.n_keys <= KEPT
        self._masks: dict[int, Masks] = {}
        self._parts: dict[int, list[Part]] = {}
        blocks = [block for first, last in self._spans() for block in self._blocks(first, last)]
        self.blocks = [block._replace(number=number) for number, block in enumerate(blocks)]

    def parts(self, n_heads: int) -> list[Part]:
        """At most SCORES scores each, but a head at least."""
        if n_heads not in self._parts:
            self._parts[n_heads] = [part for block in self.blocks for part in _parts_of(block, n_heads)]
        return self._parts[n_heads]

    def masks(self, block: Block) -> Masks:
        """Of a block."""
        found = self._masks.get(block.number) or self._new_masks(block)
        if self._few:
            self._masks[block.number] = found
        return found

    def aligned(self, by_distance: Tensor, block: Block) -> Tensor:
        """Of the rows in order, a view by key, (h, m, k), of what is by distance, (h, n, W): nothing is moved.

        Row t and key j stand in column T - t + j of all distances (Transformer-XL appendix B).
        """
        heads, n, width = by_distance.shape
        begin = max(0, self._geometry.n_tokens - block.first - block.distances.start)
        return by_distance.as_strided((heads, block.n_in_order, block.n_keys), (n * width, width - 1, 1), begin)

    def _spans(self) -> list[tuple[int, int]]:
        """First row and one after the last."""
        n_rows, n_content = self._geometry.query_rank.size(1), self._geometry.n_content
        begins = [*range(0, n_content, ROWS), *range(n_content, n_rows, ROWS)]
        if 0 < n_content <= ROWS and n_rows > n_content:
            del begins[1]  # a block that is a whole window needs all distances anyway, as targets do
        return list(zip(begins, [*begins[1:], n_rows], strict=True))

    def _blocks(self, first: int, last: int) -> Iterator[Block]:
        """These rows of every window."""
        geometry, T = self._geometry, self._geometry.n_tokens
        numbers = torch.arange(1, geometry.n_keys + 1)
        visible = geometry.visible(first, last)  # (B, n, K)
        n_keys = (visible.any(1) * numbers).amax(1).clamp(min=1).tolist()
        sees = visible.any(2, keepdim=True)
        all_see = sees.all(1).flatten().tolist()
        n_in_order = max(0, min(last, geometry.n_content) - first)
        for row, direction in enumerate(geometry.direction.tolist()):
            in_order = slice(T - last + 1, T - first + n_keys[row])
            distances = in_order if n_in_order == last - first else slice(0, geometry.n_keys + T)
            some = None if all_see[row] else sees[row].to(self._dtype)
            yield Block(-1, row, first, last, n_in_order, n_keys[row], direction, distances, some)

    def _new_masks(self, block: Block) -> Masks:
        geometry, rows, keys = self._geometry, slice(block.first, block.last), slice(block.n_keys)
        hidden, different = torch.empty(2, block.last - block.first, block.n_keys, dtype=self._dtype)
        torch.le(geometry.query_rank[block.row, rows, None], geometry.key_rank[block.row, keys], out=hidden)
        torch.ne(geometry.row_segments[block.row, rows, None], geometry.key_segments[block.row, keys], out=different)
        own = geometry.own_key[block.row, rows, None]
        n_own = min(geometry.n_own, block.last) - block.first
        if n_own > 0:
            hidden[:n_own].scatter_(1, own[:n_own], 0)
        if geometry.reach is not None:
            hidden += own - torch.arange(block.n_keys) > geometry.reach
        places = geometry.positions[block.row, block.first + block.n_in_order : block.last, None]
        return Masks(hidden.mul_(NEVER), different, torch.arange(block.n_keys) + (geometry.n_tokens - places))


def _parts_of(block: Block, n_heads: int) -> Iterator[Part]:
    fitting = max(1, SCORES // ((block.last - block.first) * block.n_keys))
    n = max(h for h in range(1, n_heads + 1) if n_heads % h == 0 and h <= fitting)
    rows, keys = slice(block.first, block.last), slice(0, block.n_keys)
    for heads in (slice(h, h + n) for h in range(0, n_heads, n)):
        distances = (block.direction, heads, block.distances)
        yield Part(block, (block.row, heads, rows), (block.row, heads, keys), distances)
