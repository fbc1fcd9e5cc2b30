import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xlpre.data.lanes import Lanes, Text, permuted
from xlpre.data.store import Part


def part_of(n_tokens, seed=0):
    rng = np.random.default_rng(seed)
    ends = np.unique(np.append(rng.integers(1, n_tokens + 1, n_tokens // 9 + 1), n_tokens))
    return Part(np.arange(n_tokens), ends)


def lanes_over(part, n_lanes=4, stride=8, reach=14, run_windows=5, bidirectional=True, seed=3):
    return Lanes(
        part, n_lanes, stride=stride, reach=reach, run_windows=run_windows, bidirectional=bidirectional, seed=seed
    )


@given(st.integers(1, 3000), st.integers(0, 10**9))
@settings(max_examples=50, deadline=None)
def test_the_order_of_runs_is_a_permutation(size, seed):
    assert sorted(permuted(i, size, (seed, 0)) for i in range(size)) == list(range(size))


@given(st.integers(14, 500), st.integers(1, 9), st.integers(1, 7), st.integers(1, 12), st.integers(0, 99))
@settings(max_examples=200, deadline=None)
def test_every_window_lies_in_the_text(n_tokens, n_lanes, run_windows, stride, step):
    lanes = lanes_over(part_of(n_tokens), n_lanes, stride=stride, reach=14, run_windows=run_windows)
    for lane in range(n_lanes):
        assert 0 <= lanes.place(lane, step).begin <= n_tokens - 14


def test_a_window_continues_where_the_last_one_of_its_lane_ended():
    lanes = lanes_over(part_of(2000))
    for lane in range(4):
        for step in range(1, 60):
            before, now = lanes.place(lane, step - 1), lanes.place(lane, step)
            assert now.continues == (step % 5 != 0)
            if now.continues:
                assert now.begin == before.begin + 8


def test_an_epoch_reads_every_run_once_and_the_next_in_another_order():
    lanes = lanes_over(part_of(4000), n_lanes=5)
    slots = [lanes.place(lane, slot * 5).begin // 40 for slot in range(2 * lanes.n_runs // 5) for lane in range(5)]
    first, second = slots[: lanes.n_runs], slots[lanes.n_runs : 2 * lanes.n_runs]
    assert sorted(first) == list(range(lanes.n_runs))
    assert first != second[: len(first)]


def test_every_second_lane_reads_backward():
    lanes = lanes_over(part_of(500))
    assert [lanes.place(lane, 0).backward for lane in range(4)] == [False, True, False, True]
    assert not any(lanes_over(part_of(500), bidirectional=False).place(lane, 0).backward for lane in range(4))


def test_text_read_backward_is_the_text_reversed_with_its_boundaries():
    part = part_of(300)
    forward, backward = Text(part), Text(part, backward=True)
    assert (backward.tokens(10, 60) == forward.tokens(240, 290)[::-1]).all()
    inner = forward.boundaries(0, 299).tolist()
    assert list(backward.boundaries(0, 299)) == [300 - x for x in reversed(inner)]
    for text, ends in ((forward, {0, *part.sentence_ends}), (backward, {300 - x for x in (0, *part.sentence_ends)})):
        for position in range(1, 300):
            assert text.boundary_after(position) == min(x for x in ends if x >= position)
            assert text.boundary_before(position) == max(x for x in ends if x <= position)


def test_a_window_longer_than_the_text_is_refused_by_its_key():
    with pytest.raises(ValueError, match=r"data.window needs 14 tokens in a row, but the text has 13"):
        lanes_over(part_of(13))
