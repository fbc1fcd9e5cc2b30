import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xlpre.data.lanes import DirectedText, Lanes, permute_index
from xlpre.data.store import SplitData


def part_of(n_tokens, seed=0):
    rng = np.random.default_rng(seed)
    ends = np.unique(np.append(rng.integers(1, n_tokens + 1, n_tokens // 9 + 1), n_tokens))
    return SplitData(np.arange(n_tokens), ends, ends[::-3][::-1])


def lanes_over(part, n_lanes=4, stride=8, lookahead=14, windows_per_run=5, bidirectional=True, seed=3, **settings):
    return Lanes(
        part,
        n_lanes,
        stride=stride,
        lookahead=lookahead,
        windows_per_run=windows_per_run,
        bidirectional=bidirectional,
        seed=seed,
        **settings,
    )


@given(st.integers(1, 3000), st.integers(0, 10**9))
@settings(max_examples=50, deadline=None)
def test_the_order_of_runs_is_a_permutation(size, seed):
    assert sorted(permute_index(i, size, (seed, 0)) for i in range(size)) == list(range(size))


@given(st.integers(14, 500), st.integers(1, 9), st.integers(1, 7), st.integers(1, 12), st.integers(0, 99))
@settings(max_examples=200, deadline=None)
def test_every_window_lies_in_the_text(n_tokens, n_lanes, windows_per_run, stride, step):
    lanes = lanes_over(part_of(n_tokens), n_lanes, stride=stride, lookahead=14, windows_per_run=windows_per_run)
    for lane in range(n_lanes):
        assert 0 <= lanes.location(lane, step).begin <= n_tokens - 14


def test_a_window_continues_where_the_last_one_of_its_lane_ended():
    lanes = lanes_over(part_of(2000))
    for lane in range(4):
        for step in range(1, 60):
            before, now = lanes.location(lane, step - 1), lanes.location(lane, step)
            assert now.visible_mem_len == step % 5 * 8
            if now.visible_mem_len:
                assert now.begin == before.begin + 8 and now.text is before.text


def test_memory_cut_at_a_documents_end_reaches_back_to_it_and_not_past_the_run():
    part = part_of(2000)
    carried, cut = (lanes_over(part, at_document_end=how) for how in ("carry", "cut"))
    some_shorter = 0
    for lane in range(4):
        for step in range(60):
            place, longest = cut.location(lane, step), carried.location(lane, step).visible_mem_len
            read = carried.location(lane, step).text.tokens(place.begin - longest, place.begin + 1)
            # a document ends just before these tokens, or after them where text is read backward
            meets = [i for i in range(longest + 1) if read[i] + place.text.backward in {0, *part.document_ends}]
            assert place.visible_mem_len == longest - max(meets, default=0)
            some_shorter += place.visible_mem_len < longest
    assert some_shorter > 50


def times_read(part, lanes, slots):
    """(N,) how often each token of the part was a lane's own in the first `slots` runs of all lanes."""
    times = np.zeros(len(part), int)
    for step in range(slots * lanes.windows_per_run):
        for lane in range(lanes.n_lanes):
            place = lanes.location(lane, step)
            times[place.text.tokens(place.begin, place.begin + 8)] += 1
    return times


@pytest.mark.parametrize("bidirectional", [False, True])
def test_an_epoch_reads_the_text_once_in_either_direction_or_both(bidirectional):
    part = part_of(4014)  # a hundred runs
    lanes = lanes_over(part, bidirectional=bidirectional)
    times = times_read(part, lanes, lanes.n_runs // 4)
    assert (times == 1).mean() > 0.99
    assert times.max() <= 2 and (times == 2).sum() <= 14  # at an end of the text


def test_epochs_take_the_runs_in_other_orders_and_read_the_ends_of_the_text_too():
    part = part_of(300)
    lanes = lanes_over(part, n_lanes=2)
    orders = {
        tuple(lanes.location(0, slot * lanes.windows_per_run).begin // 40 for slot in range(k, k + 3)) for k in range(0, 90, 3)
    }
    assert len(orders) > 10
    assert times_read(part, lanes, 200)[:-14].min() > 0


@given(st.integers(60, 600), st.integers(1, 16))
@settings(max_examples=50, deadline=None)
def test_rows_of_a_step_are_of_different_text_where_there_is_enough(n_tokens, n_lanes):
    part = part_of(n_tokens)
    lanes = lanes_over(part, n_lanes, windows_per_run=1000, bidirectional=False)
    if n_tokens - 14 >= 8 * n_lanes:
        assert times_read(part, lanes, 1).max() == 1


def test_every_second_lane_reads_backward():
    lanes = lanes_over(part_of(500))
    assert [lanes.location(lane, 0).text.backward for lane in range(4)] == [False, True, False, True]
    assert not any(lanes_over(part_of(500), bidirectional=False).location(lane, 0).text.backward for lane in range(4))


def test_text_read_backward_is_the_text_reversed_with_its_boundaries():
    part = part_of(300)
    forward, backward = DirectedText(part), DirectedText(part, backward=True)
    assert (backward.tokens(10, 60) == forward.tokens(240, 290)[::-1]).all()
    for kind, ends in (("sentences", part.sentence_ends), ("documents", part.document_ends)):
        for text, sides in ((forward, [0, *ends]), (backward, [300 - x for x in reversed([0, *ends])])):
            met = getattr(text, kind)
            assert [met[index] for index in range(len(sides))] == sides
            for position in range(300):
                assert met[met.first_from(position)] == min(x for x in sides if x >= position)
                assert met[met.last_until(position)] == max(x for x in sides if x <= position)


def test_a_window_longer_than_the_text_is_refused_by_its_key():
    with pytest.raises(ValueError, match=r"data.seq_len needs 14 tokens in a row, but the text has 13"):
        lanes_over(part_of(13))
