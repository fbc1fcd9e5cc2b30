"""A search with the sparse index equals a plain search and reads one page of the array."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import examples
from xlpre.data.lanes import BoundaryIndex, DirectedText
from xlpre.data.sparse_index import PAGE_ITEMS, SparseIndex, sample_pages
from xlpre.data.store import SplitData
from xlpre.data.window_layout import split_pair


class CountingArray:
    """An array that records the numbers of the pages that are read. A search counts as reading all pages that it searches in."""

    def __init__(self, array, begin=0, pages=None):
        self._array, self._begin, self.pages = array, begin, set() if pages is None else pages

    def __len__(self):
        return len(self._array)

    def __getitem__(self, key):
        if isinstance(key, slice):
            return CountingArray(self._array[key], self._begin + (key.start or 0), self.pages)
        self._read(key % len(self), key % len(self) + 1)
        return self._array[key]

    def searchsorted(self, *args, **kwargs):
        self._read(0, len(self))
        return self._array.searchsorted(*args, **kwargs)

    def _read(self, begin, end):
        if begin < end:
            self.pages.update(range((self._begin + begin) // PAGE_ITEMS, (self._begin + end - 1) // PAGE_ITEMS + 1))


def counting_index(ends):
    """Return an index, and the set of pages that it reads."""
    index = SparseIndex(ends)
    index._positions = CountingArray(ends)
    return index, index._positions.pages


@given(st.integers(1, 2100), st.integers(1, 40), st.integers(0, 10**9))
@settings(max_examples=examples(60))
def test_a_search_equals_the_search_in_the_whole_array(n, mean_length, seed):
    rng = np.random.default_rng(seed)
    ends = np.cumsum(rng.integers(1, 2 * mean_length, n))
    index = SparseIndex(ends)
    near = ends[rng.integers(0, n, 50)][:, None] + np.arange(-1, 2)
    at_pages = (ends[PAGE_ITEMS - 1 :: PAGE_ITEMS][:, None] + np.arange(-1, 2)).ravel()
    for position in {0, 1, int(ends[-1]), int(ends[-1]) + 1, *near.ravel().tolist(), *at_pages.tolist()}:
        for side in ("left", "right"):
            assert index.searchsorted(position, side) == np.searchsorted(ends, position, side)


@given(st.lists(st.integers(0, 1300), min_size=1, max_size=6))
@settings(max_examples=examples(60))
def test_samples_of_parts_are_the_samples_of_the_whole(lengths):
    positions = np.arange(sum(lengths))
    begins = np.cumsum([0, *lengths])
    parts = [sample_pages(positions[begin:end], begin) for begin, end in zip(begins[:-1], begins[1:], strict=True)]
    assert np.array_equal(np.concatenate(parts), sample_pages(positions))
    assert len(sample_pages(positions)) == len(positions) // PAGE_ITEMS


@pytest.mark.parametrize("backward", [False, True])
def test_a_look_up_reads_at_most_one_page(backward):
    rng = np.random.default_rng(0)
    ends = np.cumsum(rng.integers(1, 60, 40_000))
    index, pages = counting_index(ends)
    boundaries, expected = BoundaryIndex(index, backward), BoundaryIndex(SparseIndex(ends), backward)
    for position in rng.integers(0, ends[-1], 500).tolist():
        for name in ("first_from", "last_until"):
            pages.clear()
            assert getattr(boundaries, name)(position) == getattr(expected, name)(position)
            assert len(pages) <= 1, (name, position)
    unsampled = CountingArray(ends)
    unsampled.searchsorted(5)
    assert len(unsampled.pages) == 79, "the array counts"


def test_a_pair_of_segments_reads_few_pages():
    """Four look-ups at two places, and the boundaries that they find, which may be on the next page."""
    ends = np.cumsum(np.random.default_rng(0).integers(1, 60, 40_000))
    data = SplitData(np.arange(ends[-1]), ends, ends[-1:])
    index, pages = counting_index(ends)
    vars(data)["sentence_index"] = index
    text, n_pages = DirectedText(data), []
    for begin in range(0, int(ends[-1]) - 300, 9973):
        pages.clear()
        split_pair(text, begin, 253, 0.1, 0.5, 0.37)
        n_pages.append(len(pages))
    assert max(n_pages) <= 4 and np.mean(n_pages) < 2.3
