"""Windows of a context cover all of it, and each token has one window with the most context."""

import tracemalloc

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from finetune.data.qa_windows import SpanLabel, build_windows, max_context_masks, window_bounds
from xlpre.data.window_layout import SEGMENT_A, SEGMENT_B, SEGMENT_CLS
from xlpre.text import special_tokens
from xlpre.text.offsets import TokenOffsets

CONTEXT = TokenOffsets("x" * 10, list(range(20, 30)), np.arange(10), np.arange(1, 11))


def test_windows_start_a_stride_apart_and_end_with_the_context():
    assert window_bounds(10, 6, 2) == [(0, 6), (2, 6), (4, 6)]
    assert window_bounds(10, 4, 3) == [(0, 4), (3, 4), (6, 4)]
    assert window_bounds(6, 6, 2) == [(0, 6)]
    assert window_bounds(5, 2, 9) == [(0, 2), (2, 2), (4, 1)]  # a stride above the window length leaves no gap


@given(n=st.integers(1, 60), max_len=st.integers(1, 20), stride=st.integers(1, 30))
def test_every_token_is_in_a_window_and_has_max_context_in_one(n, max_len, stride):
    bounds = window_bounds(n, max_len, stride)
    n_windows, n_owners = np.zeros(n, int), np.zeros(n, int)
    for (first, length), is_max_context in zip(bounds, max_context_masks(bounds), strict=True):
        n_windows[first : first + length] += 1
        n_owners[first : first + length] += is_max_context
    assert (n_windows >= 1).all() and (n_owners == 1).all()


def test_a_token_has_max_context_where_its_shorter_side_is_longest():
    first, second = max_context_masks([(0, 6), (3, 6)])
    # token 4 has one token on its shorter side in both windows; the first one wins
    assert first.tolist() == [True] * 5 + [False]
    assert second.tolist() == [False] * 2 + [True] * 4
    long, short = max_context_masks([(0, 6), (4, 3)])
    assert long.tolist() == [True] * 5 + [False] and short.tolist() == [False, True, True]


def test_a_much_longer_window_wins_over_one_with_slightly_more_context():
    long, short = max_context_masks([(0, 350), (128, 232)])  # 0.01 * 118 tokens is worth one token of context
    assert long.nonzero()[0].tolist() == [*range(240)] and short.nonzero()[0].tolist() == [*range(240 - 128, 232)]


def test_memory_grows_linearly_with_the_context():
    n = 200_000
    book = TokenOffsets("x" * n, [20] * n, np.arange(n), np.arange(1, n + 1))
    tracemalloc.start()
    windows = build_windows(0, book, [50], 384, 128, None)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(window.is_max_context.sum() for window in windows) == n and peak < 50e6


def test_a_row_is_context_question_and_cls():
    (window, *_) = build_windows(3, CONTEXT, [50, 51], 11, 2, SpanLabel(True, 1, 4))
    question = [50, 51, special_tokens.SEP, special_tokens.CLS]
    assert window.rows[0].input_ids.tolist() == [*range(20, 26), special_tokens.SEP, *question]
    assert window.rows[0].segment_ids.tolist() == [SEGMENT_A] * 7 + [SEGMENT_B] * 3 + [SEGMENT_CLS]
    assert window.example_index == 3


def test_a_span_partly_outside_a_window_is_no_answer_there():
    def labels(max_len, label):
        windows = build_windows(0, CONTEXT, [50, 51], max_len, 2, label)
        return [[value.item() for value in window.labels.values()] for window in windows]

    assert labels(11, SpanLabel(True, 1, 4)) == [[1, 4, 0], [10, 10, 1], [10, 10, 1]]
    assert labels(30, SpanLabel(False)) == [[14, 14, 1]]
    assert labels(30, None) == [[]]
