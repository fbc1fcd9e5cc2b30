"""Index of a sorted array of positions on disk, such as the ends of sentences, which are too many to keep in memory.

A binary search in a memory-mapped array reads about as many pages as its number of pages has binary digits. On a network file system, each
page that is not cached is a request to a server. The index holds the last element of every page in memory, so a search reads only one page.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

PAGE_ITEMS = 512  # int64 positions in a memory page of 4 KiB


def sample_pages(positions: np.ndarray, n_before: int = 0) -> np.ndarray:
    """Return a copy of the last position of each page.

    Args:
        positions: (n,) int64.
        n_before: number of positions in the file before `positions`, which may be a part of it.
    """
    return np.array(positions[-(n_before + 1) % PAGE_ITEMS :: PAGE_ITEMS])


class SparseIndex:
    """Search in a sorted array that reads at most one page of it.

    Args:
        positions: (n,) int64, increasing, usually memory-mapped.
        samples: (n // PAGE_ITEMS,) int64, result of `sample_pages`. None: it is computed, for which every page is read once.
    """

    def __init__(self, positions: np.ndarray, samples: np.ndarray | None = None) -> None:
        # a plain array: each access to a np.memmap costs a microsecond
        self._positions = np.asarray(positions)
        self._samples = sample_pages(self._positions) if samples is None else samples

    def __getitem__(self, index: int) -> int:
        return int(self._positions[index])

    def __len__(self) -> int:
        return len(self._positions)

    def searchsorted(self, position: int, side: Literal["left", "right"] = "left") -> int:
        """Return the number of positions below `position`, or, with `side="right"`, not above it."""
        begin = int(self._samples.searchsorted(position, side=side)) * PAGE_ITEMS
        return begin + int(self._positions[begin : begin + PAGE_ITEMS].searchsorted(position, side=side))
