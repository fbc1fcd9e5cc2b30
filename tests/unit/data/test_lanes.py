import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import examples
from xlpre.data.lanes import DirectedText, Lanes, max_lanes, permute_index
from xlpre.data.store import SplitData


def split_of(n_tokens, seed=0):
    rng = np.random.default_rng(seed)
    ends = np.unique(np.append(rng.integers(1, n_tokens + 1, n_tokens // 9 + 1), n_tokens))
    return SplitData(np.arange(n_tokens), ends, ends[::-3][::-1])


def lanes_over(data, n_lanes=4, stride=8, lookahead=14, windows_per_run=5, bidirectional=True, seed=3, **settings):
    return Lanes(
        data,
        n_lanes,
        stride=stride,
        lookahead=lookahead,
        windows_per_run=windows_per_run,
        bidirectional=bidirectional,
        seed=seed,
        **settings,
    )


@given(st.integers(1, 3000), st.integers(0, 10**9))
@settings(max_examples=examples(50))
def test_the_order_of_runs_is_a_permutation(size, seed):
    assert sorted(permute_index(i, size, (seed, 0)) for i in range(size)) == list(range(size))


@given(st.integers(14, 500), st.integers(1, 9), st.integers(1, 7), st.integers(1, 12), st.integers(0, 99))
@settings(max_examples=examples(200))
def test_every_window_lies_in_the_text(n_tokens, n_lanes, windows_per_run, stride, step):
    n_lanes = min(n_lanes, max_lanes(n_tokens, stride, 14))
    lanes = lanes_over(split_of(n_tokens), n_lanes, stride=stride, lookahead=14, windows_per_run=windows_per_run)
    for lane in range(n_lanes):
        assert 0 <= lanes.location(lane, step).begin <= n_tokens - 14


def test_inside_a_passage_windows_follow_each_other():
    lanes = lanes_over(split_of(2000))
    for lane in range(4):
        for step in range(1, 60):
            previous, current = lanes.location(lane, step - 1), lanes.location(lane, step)
            assert current.visible_mem_len == step % 5 * 8
            if current.visible_mem_len:
                assert current.begin == previous.begin + 8 and current.text is previous.text


def test_initial_memory_is_visible_until_the_first_passage_of_a_lane_ends():
    lanes = lanes_over(split_of(2000), initial_mem_len=30)
    lengths = [lanes.location(1, step).visible_mem_len for step in range(12)]
    assert lengths == [30, 38, 46, 54, 62, 0, 8, 16, 24, 32, 0, 8]


def test_memory_cut_at_document_ends_starts_at_the_document_or_the_passage():
    data = split_of(2000)
    carried, cut = (lanes_over(data, at_document_end=mode) for mode in ("carry", "cut"))
    n_shorter = 0
    for lane in range(4):
        for step in range(60):
            location, longest = cut.location(lane, step), carried.location(lane, step).visible_mem_len
            tokens = carried.location(lane, step).text.tokens(location.begin - longest, location.begin + 1)
            # a token is its forward position: a document starts at it, or in a backward text at the next one
            starts = [i for i in range(longest + 1) if tokens[i] + location.text.backward in {0, *data.document_ends}]
            assert location.visible_mem_len == longest - max(starts, default=0)
            n_shorter += location.visible_mem_len < longest
    assert n_shorter > 50


def count_reads(data, lanes, n_passages):
    """Return (N,) the number of times that each token was read as a new token in the first `n_passages` passages of all lanes."""
    counts = np.zeros(len(data), int)
    for step in range(n_passages * lanes.windows_per_run):
        for lane in range(lanes.n_lanes):
            location = lanes.location(lane, step)
            counts[location.text.tokens(location.begin, location.begin + 8)] += 1
    return counts


@pytest.mark.parametrize("bidirectional", [False, True])
def test_an_epoch_reads_the_text_once_in_one_or_both_directions(bidirectional):
    data = split_of(4014)  # a hundred runs
    lanes = lanes_over(data, bidirectional=bidirectional)
    counts = count_reads(data, lanes, lanes.n_passages // 4)
    assert (counts == 1).mean() > 0.99
    assert counts.max() <= 2 and (counts == 2).sum() <= 14  # at an end of the text


def test_each_epoch_has_another_order_and_the_ends_of_the_text_are_read():
    data = split_of(300)
    lanes = lanes_over(data, n_lanes=2)
    orders = {
        tuple(lanes.location(0, passage * lanes.windows_per_run).begin // 40 for passage in range(k, k + 3))
        for k in range(0, 90, 3)
    }
    assert len(orders) > 10
    assert count_reads(data, lanes, 200)[:-14].min() > 0


@given(st.integers(60, 600), st.integers(1, 16))
@settings(max_examples=examples(50))
def test_rows_read_different_text_and_more_rows_than_that_are_refused(n_tokens, n_lanes):
    data, largest = split_of(n_tokens), (n_tokens - 14) // 8
    if n_lanes <= largest:
        lanes = lanes_over(data, n_lanes, windows_per_run=1000, bidirectional=False)
        assert count_reads(data, lanes, 1).max() == 1
    else:
        with pytest.raises(
            ValueError, match=rf"train.global_batch_size={n_lanes} is invalid: .*={largest} or less, or"
        ):
            lanes_over(data, n_lanes)


def test_every_second_lane_reads_backward():
    lanes = lanes_over(split_of(500))
    assert [lanes.location(lane, 0).text.backward for lane in range(4)] == [False, True, False, True]
    assert not any(lanes_over(split_of(500), bidirectional=False).location(lane, 0).text.backward for lane in range(4))


def test_a_backward_text_is_the_reversed_text_with_its_boundaries():
    data = split_of(300)
    forward, backward = DirectedText(data), DirectedText(data, backward=True)
    assert (backward.tokens(10, 60) == forward.tokens(240, 290)[::-1]).all()
    for kind, ends in (("sentences", data.sentence_ends), ("documents", data.document_ends)):
        for text, positions in ((forward, [0, *ends]), (backward, [300 - x for x in reversed([0, *ends])])):
            boundaries = getattr(text, kind)
            assert [boundaries[index] for index in range(len(positions))] == positions
            for position in range(300):
                assert boundaries[boundaries.first_from(position)] == min(x for x in positions if x >= position)
                assert boundaries[boundaries.last_until(position)] == max(x for x in positions if x <= position)


def test_a_window_longer_than_the_text_is_refused():
    with pytest.raises(ValueError, match=r"data.seq_len is invalid: .* 14 consecutive tokens, but the text has 13"):
        lanes_over(split_of(13))
