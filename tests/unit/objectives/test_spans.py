import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xlpre.data.rng import RowRng
from xlpre.objectives.objective import ObjectiveConfig
from xlpre.objectives.target_sampling import SpanSampler, num_targets


def text(n, seed, p_start=0.7, vocab=50):
    """Ids, and which of the vocabulary's pieces start a word."""
    rng = np.random.default_rng(seed)
    starts = np.arange(vocab) < vocab * p_start
    return rng.integers(0, vocab, n), starts


@given(
    st.integers(1, 300),
    st.floats(0, 1),
    st.floats(1, 8),
    st.integers(1, 6),
    st.floats(0, 1),
    st.booleans(),
    st.sampled_from(["whole_words", "as_released"]),
    st.integers(0, 10**6),
)
@settings(max_examples=200, deadline=None)
def test_there_are_exactly_as_many_targets_as_asked_for(n, share, k, max_span, p_start, backward, ends, seed):
    ids, starts = text((3, n), seed, p_start)
    allowed = np.random.default_rng(seed).random((3, n)) < 0.9
    goal = int(share * allowed.sum(1).min())
    sampler = SpanSampler(ObjectiveConfig(partial_k=k, max_span=max_span, span_ends=ends), starts)
    backward = np.array([backward, True, False])
    chosen = sampler.sample(ids, allowed, goal, backward, sampler.draw_numbers(n, RowRng(seed, range(3), 0)))
    assert (chosen.sum(1) == goal).all()
    assert not (chosen & ~allowed).any()


def runs(chosen):
    edges = np.diff(np.concatenate([[0], chosen.astype(int), [0]]))
    return list(zip(np.flatnonzero(edges == 1), np.flatnonzero(edges == -1), strict=True))


def spans_of(config, n=4000, goal=500, seeds=20, p_start=0.7):
    """Spans drawn before the fill-in of single tokens."""
    for seed in range(seeds):
        ids, starts = text(n, seed, p_start)
        sampler = SpanSampler(config, starts)
        begins = starts[ids]
        (chosen,) = sampler.sample_spans(begins[None], np.ones((1, n), bool), goal, sampler.draw_numbers(n, RowRng(seed, [0], 0)))
        for begin, end in runs(chosen):
            yield begins, begin, end


def test_spans_begin_and_end_where_words_do():
    assert all(starts[begin] and starts[end] for starts, begin, end in spans_of(ObjectiveConfig()))


def test_as_released_spans_may_end_inside_a_word():
    inside = [not starts[end] for starts, _, end in spans_of(ObjectiveConfig(span_ends="as_released"))]
    assert 0.15 < np.mean(inside) < 0.35  # SPEC: 26 % of spans


def test_span_lengths_follow_one_over_n():
    # every piece a word, contexts so long that spans hardly touch each other
    config = ObjectiveConfig(partial_k=40.0)
    lengths = [end - begin for _, begin, end in spans_of(config, n=40_000, goal=40_000, seeds=10, p_start=1.0)]
    share = np.bincount(lengths, minlength=6)[1:6] / len(lengths)
    expected = 1 / np.arange(1, 6)
    np.testing.assert_allclose(share, expected / expected.sum(), atol=0.03)


def test_a_largest_span_of_one_hides_single_words():
    ends = [
        starts[begin + 1 : end].any() for starts, begin, end in spans_of(ObjectiveConfig(max_span=1, partial_k=30.0))
    ]
    assert np.mean(ends) < 0.05  # two neighbours drawn one after the other look like a longer one


@pytest.mark.parametrize(
    ("length", "reuse", "k", "shares"), [(512, 256, 6, (43, 42)), (128, 64, 6, (11, 10)), (9, 9, 2, (4, 0))]
)
def test_targets_are_shared_between_the_halves(length, reuse, k, shares):
    assert num_targets(length, reuse, k) == shares


def test_words_of_a_backward_row_are_spans_in_reading_order():
    ids, starts = text((4, 300), seed=1)
    sampler = SpanSampler(ObjectiveConfig(), starts)
    everything, draws = np.ones(ids.shape, bool), sampler.draw_numbers(300, RowRng(1, range(4), 0))
    forward = sampler.sample(ids, everything, 50, np.zeros(4, bool), draws)
    backward = sampler.sample(ids[:, ::-1], everything, 50, np.ones(4, bool), draws)
    assert (backward == forward[:, ::-1]).all()


def test_every_token_left_over_is_as_likely_to_be_filled_in():
    """No piece begins a word, so that there are no spans at all."""
    sampler = SpanSampler(ObjectiveConfig(), np.zeros(10, bool))
    rows, length = 20_000, 12
    ids, allowed = np.zeros((rows, length), int), np.tile(np.arange(length) != 5, (rows, 1))
    chosen = sampler.sample(ids, allowed, 3, np.zeros(rows, bool), sampler.draw_numbers(length, RowRng(0, range(rows), 0)))
    frequency = chosen.mean(0)
    assert (chosen.sum(1) == 3).all() and frequency[5] == 0
    np.testing.assert_allclose(np.delete(frequency, 5), 3 / 11, atol=5 * np.sqrt(3 / 11 * 8 / 11 / rows))
