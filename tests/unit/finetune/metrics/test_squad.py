"""SQuAD metrics follow the rules of the official scripts; cases computed by hand."""

import numpy as np
import pytest

from finetune.metrics.squad import best_null_threshold, normalize_words, score_prediction


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The Cat, a hat!", ["cat", "hat"]),
        ("theatre An banana", ["theatre", "banana"]),
        ("a-b the.end", ["ab", "theend"]),  # punctuation is removed before articles
        ("x\u00a0y\u2003z", ["x", "y", "z"]),
        ("\u201cthe\u201d", ["\u201c", "\u201d"]),  # not ASCII punctuation; the article leaves a space
        ("Caf\u00c9", ["caf\u00e9"]),
        (" the ", []),
    ],
)
def test_case_punctuation_articles_and_spaces_are_ignored(text, words):
    assert normalize_words(text) == words


@pytest.mark.parametrize(
    ("prediction", "labels", "always_answerable", "expected"),
    [
        ("the Normans", ["Normans"], True, (1, 1)),
        ("in France", ["France", "Paris"], True, (0, 2 / 3)),
        ("b b c", ["b c c"], True, (0, 2 / 3)),  # a word counts as often as both texts have it
        ("x y", ["x", "y z x y"], True, (0, 2 / 3)),  # the best label for each metric
        ("", ["France"], True, (0, 0)),
        ("A", ["the"], True, (1, 0)),  # 1.1: equal without words, but no common word
        ("A", ["the", "grade A"], False, (0, 0)),  # 2.0: a label without words is ignored, "grade" is not
        ("A", ["the"], False, (1, 1)),  # 2.0: no label is left, so "no answer" is correct, and was predicted
        ("", [], False, (1, 1)),
        ("France", [], False, (0, 0)),
        ("", ["France"], False, (0, 0)),
    ],
)
def test_a_prediction_is_scored_with_the_best_label(prediction, labels, always_answerable, expected):
    assert score_prediction(prediction, labels, always_answerable) == pytest.approx(expected)


def test_the_best_threshold_predicts_no_answer_where_that_is_correct():
    scores = np.array([1.0, 0.5, 0.0, 0.0])
    has_answer = np.array([True, True, False, False])
    is_predicted = np.array([True, True, True, False])
    log_odds = np.array([-3.0, 2.0, -1.0, 5.0])
    # by log-odds: +1 (correct), -1 (a text where there is no answer), +0.5; and 2 that are correct without a text
    assert best_null_threshold(scores, is_predicted, has_answer, log_odds) == (3 / 4, -2.0)
    log_odds = np.array([-3.0, -2.0, -1.0, 5.0])
    assert best_null_threshold(scores, is_predicted, has_answer, log_odds) == (3.5 / 4, -1.5)


def test_the_threshold_is_below_all_log_odds_if_no_question_should_be_answered():
    has_answer = np.array([True, False])
    best, threshold = best_null_threshold(np.zeros(2), np.ones(2, bool), has_answer, np.array([-4.0, -5.0]))
    assert best == 0.5 and threshold < -5


def test_the_best_threshold_equals_that_of_an_exhaustive_search():
    rng = np.random.default_rng(0)
    for _ in range(50):
        has_answer, is_predicted = rng.random(12) < 0.5, rng.random(12) < 0.9
        scores = np.where(has_answer & is_predicted, rng.random(12), 0)
        log_odds = rng.normal(size=12)

        def score(threshold, log_odds=log_odds, is_predicted=is_predicted, has_answer=has_answer, scores=scores):
            has_text = (log_odds <= threshold) & is_predicted
            return np.where(has_answer, np.where(has_text, scores, 0), ~has_text).mean()

        best, threshold = best_null_threshold(scores, is_predicted, has_answer, log_odds)
        assert best == pytest.approx(max(map(score, [*log_odds, log_odds.min() - 1])))
        assert best == pytest.approx(score(threshold))


def test_questions_of_equal_log_odds_are_on_the_same_side_of_the_threshold():
    scores, has_answer = np.array([1.0, 0.0, 0.0, 0.0]), np.array([True, False, False, False])
    score, threshold = best_null_threshold(scores, np.full(4, True), has_answer, np.full(4, 0.5))
    assert score == 1.0  # the official score: only the first question is answered
    assert threshold < 0.5
