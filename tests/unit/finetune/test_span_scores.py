"""Answers in words are worth what the rules of SQuAD's scorers say; cases computed by hand."""

import numpy as np
import pytest

from finetune.metrics.squad import best_threshold, normalize_words, score_prediction


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The Cat, a hat!", ["cat", "hat"]),
        ("theatre An banana", ["theatre", "banana"]),
        ("a-b the.end", ["ab", "theend"]),  # punctuation goes before articles do
        ("x\u00a0y\u2003z", ["x", "y", "z"]),
        ("\u201cthe\u201d", ["\u201c", "\u201d"]),  # no ASCII punctuation, so that the article leaves a space
        ("Caf\u00c9", ["caf\u00e9"]),
        (" the ", []),
    ],
)
def test_case_punctuation_articles_and_spaces_do_not_count(text, words):
    assert normalize_words(text) == words


@pytest.mark.parametrize(
    ("answer", "truths", "answerable", "expected"),
    [
        ("the Normans", ["Normans"], True, (1, 1)),
        ("in France", ["France", "Paris"], True, (0, 2 / 3)),
        ("b b c", ["b c c"], True, (0, 2 / 3)),  # a word counts as often as both have it
        ("x y", ["x", "y z x y"], True, (0, 2 / 3)),  # the best of several, of each score by itself
        ("", ["France"], True, (0, 0)),
        ("A", ["the"], True, (1, 0)),  # 1.1: the same without words, but no word in common
        ("A", ["the", "grade A"], False, (0, 0)),  # 2.0: a truth without words does not count, "grade" does
        ("A", ["the"], False, (1, 1)),  # 2.0: none is left, which is no answer, and none was given
        ("", [], False, (1, 1)),
        ("France", [], False, (0, 0)),
        ("", ["France"], False, (0, 0)),
    ],
)
def test_an_answer_is_worth_what_it_shares_with_the_best_truth(answer, truths, answerable, expected):
    assert score_prediction(answer, truths, answerable) == pytest.approx(expected)


def test_the_best_threshold_gives_no_answer_where_that_is_right():
    scores = np.array([1.0, 0.5, 0.0, 0.0])
    exists = np.array([True, True, False, False])
    said = np.array([True, True, True, False])
    odds = np.array([-3.0, 2.0, -1.0, 5.0])
    # in the order of odds: +1 (right), -1 (an answer where there is none), +0.5; and 2 that are right without one
    assert best_threshold(scores, said, exists, odds) == (3 / 4, -2.0)
    assert best_threshold(scores, said, exists, np.array([-3.0, -2.0, -1.0, 5.0])) == (3.5 / 4, -1.5)


def test_where_giving_no_answer_is_best_the_threshold_is_below_all_odds():
    best, threshold = best_threshold(np.zeros(2), np.ones(2, bool), np.array([True, False]), np.array([-4.0, -5.0]))
    assert best == 0.5 and threshold < -5


def test_the_best_threshold_is_that_of_trying_all():
    rng = np.random.default_rng(0)
    for _ in range(50):
        exists, said = rng.random(12) < 0.5, rng.random(12) < 0.9
        scores = np.where(exists & said, rng.random(12), 0)
        odds = rng.normal(size=12)

        def score(threshold, odds=odds, said=said, exists=exists, scores=scores):
            given = (odds <= threshold) & said
            return np.where(exists, np.where(given, scores, 0), ~given).mean()

        best, threshold = best_threshold(scores, said, exists, odds)
        assert best == pytest.approx(max(map(score, [*odds, odds.min() - 1]))) == pytest.approx(score(threshold))


def test_of_equal_odds_all_are_answered_or_none():
    scores, answerable = np.array([1.0, 0.0, 0.0, 0.0]), np.array([True, False, False, False])
    score, threshold = best_threshold(scores, np.full(4, True), answerable, np.full(4, 0.5))
    assert score == 1.0  # the official one: the first is answered, the others not
    assert threshold < 0.5
