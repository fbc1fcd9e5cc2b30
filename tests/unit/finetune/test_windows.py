"""Windows of a text hold all of it, and each token has one window that knows most about it."""

import tracemalloc

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from finetune.data.qa_windows import Truth, most_context, stretches, windows
from xlpre.data.window_layout import SEGMENT_A, SEGMENT_B, SEGMENT_CLS
from xlpre.text import special_tokens
from xlpre.text.offsets import TokenOffsets

TEXT = TokenOffsets("x" * 10, list(range(20, 30)), np.arange(10), np.arange(1, 11))


def test_windows_begin_a_stride_apart_and_end_with_the_text():
    assert stretches(10, 6, 2) == [(0, 6), (2, 6), (4, 6)]
    assert stretches(10, 4, 3) == [(0, 4), (3, 4), (6, 4)]
    assert stretches(6, 6, 2) == [(0, 6)]
    assert stretches(5, 2, 9) == [(0, 2), (2, 2), (4, 1)]  # a stride above the room leaves nothing out


@given(n=st.integers(1, 60), room=st.integers(1, 20), stride=st.integers(1, 30))
def test_every_token_is_in_a_window_and_central_in_one(n, room, stride):
    found = stretches(n, room, stride)
    counts, owners = np.zeros(n, int), np.zeros(n, int)
    for (first, length), central in zip(found, most_context(found), strict=True):
        counts[first : first + length] += 1
        owners[first : first + length] += central
    assert (counts >= 1).all() and (owners == 1).all()


def test_a_token_belongs_to_the_window_with_most_on_its_shorter_side():
    first, second = most_context([(0, 6), (3, 6)])
    assert first.tolist() == [True] * 5 + [
        False
    ]  # token 4: one after it, as many before it in the second; the first wins
    assert second.tolist() == [False] * 2 + [True] * 4
    long, short = most_context([(0, 6), (4, 3)])
    assert long.tolist() == [True] * 5 + [False] and short.tolist() == [False, True, True]


def test_a_much_longer_window_wins_over_one_with_a_little_more_context():
    long, short = most_context([(0, 350), (128, 232)])  # 0.01 of 118 tokens more is worth one token of context
    assert long.nonzero()[0].tolist() == [*range(240)] and short.nonzero()[0].tolist() == [*range(240 - 128, 232)]


def test_windows_of_a_text_as_long_as_a_book_take_memory_by_its_length_not_its_square():
    n = 200_000
    book = TokenOffsets("x" * n, [20] * n, np.arange(n), np.arange(1, n + 1))
    tracemalloc.start()
    found = windows(0, book, [50], 384, 128, None)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(window.central.sum() for window in found) == n and peak < 50e6


def test_a_row_is_the_text_then_the_question_and_ends_with_cls():
    (window, *_) = windows(3, TEXT, [50, 51], 11, 2, Truth(True, 1, 4))
    assert window.rows[0].input_ids.tolist() == [
        *range(20, 26),
        special_tokens.SEP,
        50,
        51,
        special_tokens.SEP,
        special_tokens.CLS,
    ]
    assert window.rows[0].segment_ids.tolist() == [SEGMENT_A] * 7 + [SEGMENT_B] * 3 + [SEGMENT_CLS]
    assert window.example == 3


def test_an_answer_that_is_not_all_in_a_window_is_none_there():
    found = windows(0, TEXT, [50, 51], 11, 2, Truth(True, 1, 4))
    assert [[x.item() for x in one.answers.values()] for one in found] == [[1, 4, 0], [10, 10, 1], [10, 10, 1]]
    (one,) = windows(0, TEXT, [50, 51], 30, 2, Truth(False))
    assert [x.item() for x in one.answers.values()] == [14, 14, 1]
    (one,) = windows(0, TEXT, [50, 51], 30, 2, None)
    assert not one.answers
