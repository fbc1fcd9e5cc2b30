import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import examples
from xlpre.data.rng import RowRng
from xlpre.objectives.objective import ObjectiveConfig
from xlpre.objectives.target_sampling import SpanSampler, n_targets_per_part


def text(n, seed, p_start=0.7, vocab=50):
    """Token ids, and which tokens of the vocabulary start a word."""
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
@settings(max_examples=examples(200))
def test_exactly_n_targets_are_sampled_from_allowed_tokens(n, share, k, max_span, p_start, backward, ends, seed):
    ids, starts = text((3, n), seed, p_start)
    allowed = np.random.default_rng(seed).random((3, n)) < 0.9
    n_targets = int(share * allowed.sum(1).min())
    sampler = SpanSampler(ObjectiveConfig(partial_k=k, max_span=max_span, span_ends=ends), starts)
    backward = np.array([backward, True, False])
    is_target = sampler.sample(ids, allowed, n_targets, backward, sampler.draw_numbers(n, RowRng(seed, range(3), 0)))
    assert (is_target.sum(1) == n_targets).all()
    assert not (is_target & ~allowed).any()


def runs(is_target):
    edges = np.diff(np.concatenate([[0], is_target.astype(int), [0]]))
    return list(zip(np.flatnonzero(edges == 1), np.flatnonzero(edges == -1), strict=True))


def sampled_spans(config, n=4000, n_targets=500, seeds=20, p_start=0.7):
    """Spans before single tokens are filled in."""
    for seed in range(seeds):
        ids, starts = text(n, seed, p_start)
        sampler = SpanSampler(config, starts)
        word_starts = starts[ids]
        (is_target,) = sampler.sample_spans(
            word_starts[None], np.ones((1, n), bool), n_targets, sampler.draw_numbers(n, RowRng(seed, [0], 0))
        )
        for start, end in runs(is_target):
            yield word_starts, start, end


def test_spans_start_and_end_at_word_boundaries():
    assert all(starts[start] and starts[end] for starts, start, end in sampled_spans(ObjectiveConfig()))


def test_as_released_spans_may_end_inside_a_word():
    inside = [not starts[end] for starts, _, end in sampled_spans(ObjectiveConfig(span_ends="as_released"))]
    assert 0.15 < np.mean(inside) < 0.35  # SPEC: 26 % of spans


def test_span_lengths_follow_one_over_n():
    # every token is a word, and contexts are so long that spans rarely touch
    config = ObjectiveConfig(partial_k=40.0)
    lengths = [
        end - start for _, start, end in sampled_spans(config, n=40_000, n_targets=40_000, seeds=10, p_start=1.0)
    ]
    share = np.bincount(lengths, minlength=6)[1:6] / len(lengths)
    expected = 1 / np.arange(1, 6)
    np.testing.assert_allclose(share, expected / expected.sum(), atol=0.03)


def test_max_span_1_gives_single_words():
    ends = [
        starts[start + 1 : end].any()
        for starts, start, end in sampled_spans(ObjectiveConfig(max_span=1, partial_k=30.0))
    ]
    assert np.mean(ends) < 0.05  # two adjacent spans look like a longer one


@pytest.mark.parametrize(
    ("seq_len", "reuse_len", "partial_k", "counts"),
    [(512, 256, 6, (43, 42)), (128, 64, 6, (11, 10)), (9, 9, 2, (4, 0))],
)
def test_targets_are_divided_between_the_parts_by_length(seq_len, reuse_len, partial_k, counts):
    assert n_targets_per_part(seq_len, reuse_len, partial_k) == counts


def test_spans_of_a_backward_row_are_sampled_in_reading_order():
    ids, starts = text((4, 300), seed=1)
    sampler = SpanSampler(ObjectiveConfig(), starts)
    allowed, numbers = np.ones(ids.shape, bool), sampler.draw_numbers(300, RowRng(1, range(4), 0))
    forward = sampler.sample(ids, allowed, 50, np.zeros(4, bool), numbers)
    backward = sampler.sample(ids[:, ::-1], allowed, 50, np.ones(4, bool), numbers)
    assert (backward == forward[:, ::-1]).all()


def test_filled_targets_are_uniform():
    """Without word starts there are no spans, so all targets are filled in."""
    sampler = SpanSampler(ObjectiveConfig(), np.zeros(10, bool))
    rows, length = 20_000, 12
    ids, allowed = np.zeros((rows, length), int), np.tile(np.arange(length) != 5, (rows, 1))
    is_target = sampler.sample(
        ids, allowed, 3, np.zeros(rows, bool), sampler.draw_numbers(length, RowRng(0, range(rows), 0))
    )
    frequency = is_target.mean(0)
    assert (is_target.sum(1) == 3).all() and frequency[5] == 0
    np.testing.assert_allclose(np.delete(frequency, 5), 3 / 11, atol=5 * np.sqrt(3 / 11 * 8 / 11 / rows))
