"""Questions of SQuAD are answered as the official scorers want it."""

import json

import numpy as np
import pytest

from finetune.data.batching import LengthBucketSampler
from finetune.data.examples import Split
from finetune.tasks.span import span_masks
from tests.unit.finetune.tasks.test_squad_files import build, question, write
from xlpre.text import special_tokens


@pytest.fixture
def split(tmp_path, tokenizer):
    """A question with an answer, in windows, and one without."""
    write(tmp_path, "2.0", question("q1", "bi, bo"), question("q2"))
    task = build(tmp_path, max_len=24, max_question_len=8, doc_stride=4)
    examples = task.read_split("dev-v2.0")
    return task, Split("dev-v2.0", examples, task.encode(examples, tokenizer))


def answers(split, say, odds):
    """Outputs in which every window says `say` of its first example's tokens, as (score, first, last), if it has them."""
    n = len(split.features)
    found = {name: np.full((n, 5), -50.0) for name in ("start",)} | {"end": np.full((n, 5, 5), -50.0)}
    found |= {"start_position": np.full((n, 5), 10**6), "end_position": np.full((n, 5, 5), 10**6)}
    for number, item in enumerate(split.features):
        for rank, (score, first, last) in enumerate(say):
            found["start"][number, rank], found["start_position"][number, rank] = score, first - item.first
            found["end"][number, rank, 0], found["end_position"][number, rank, 0] = 0, last - item.first
    return {**found, "no_answer": np.array(odds(split.features))}


def test_the_span_with_most_context_wins_and_the_lowest_odds_count(split):
    task, asked = split
    windows = [item for item in asked.features if item.example_index == 0]
    assert len(windows) > 1
    text = windows[0].text
    first, last = text.token_range(8, 14)
    assert text.span_text(first, last) == "bi, bo"
    outputs = answers(
        asked, [(-1, first, last), (-0.5, last, first), (-2, 0, 0)], lambda items: [3.0 + i for i in range(len(items))]
    )
    one, two = task.to_predictions(asked, outputs)
    assert one["best"][0]["text"] == "bi, bo" and one["best"][0]["log_probability"] == -1
    assert len({x["text"] for x in one["best"]}) == len(one["best"]) == 2  # an end before its start is no answer
    assert one["best"][0]["probability"] == pytest.approx(1 / (1 + np.exp(-1)), abs=1e-6)
    assert one["null_log_odds"] == 3 and one["prediction"] == ""
    scores = task.compute_metrics(asked, outputs)
    assert scores["best_f1"] == scores["best_exact"] == 1 and 3 < scores["best_f1_threshold"] < two["null_log_odds"]
    assert scores["f1"] == 0.5 and scores["has_answer_f1"] == 0 and scores["no_answer_exact"] == 1
    assert task.tuned_settings(scores) == {"null_threshold": scores["best_f1_threshold"]}
    assert task.chance_threshold(asked) > 0.5


def test_scores_at_a_threshold_are_those_of_the_answers_handed_in_and_never_tuned_on_what_they_measure(split, tmp_path):
    _, asked = split
    outputs = answers(
        asked, [(-1, *asked.features[0].text.token_range(8, 14))], lambda items: [0.9 if x.example_index == 0 else 2.0 for x in items]
    )
    for threshold, right in ((0.5, [False, True]), (1.0, [True, True]), (3.0, [True, False])):
        task = build(tmp_path, max_len=24, max_question_len=8, doc_stride=4, null_threshold=threshold)
        scores, given = task.compute_metrics(asked, outputs), [one["prediction"] for one in task.to_predictions(asked, outputs)]
        assert [answer == truth for answer, truth in zip(given, ["bi, bo", ""], strict=True)] == right
        assert scores["f1"] == scores["exact"] == np.mean(right) and scores["has_answer_f1"] == right[0]
        assert task.main_metric in scores and not any(name.startswith("best") for name in scores)


def test_a_window_does_not_answer_at_tokens_of_which_another_has_more_context(split):
    task, asked = split
    first, last = asked.features[0].text.token_range(8, 14)
    outputs = answers(asked, [(-5, first, last)], lambda items: [0.0] * len(items))
    n_others = 0
    for number, item in enumerate(asked.features):
        place = first - item.first
        if item.example_index == 0 and 0 <= place < len(item.central) - 1 and not item.central[place]:
            outputs["start"][number, 0], outputs["end_position"][number, 0, 0] = 0, place  # surer, and of another end
            n_others += 1
    assert n_others
    assert [one["text"] for one in task.to_predictions(asked, outputs)[0]["best"]] == ["bi, bo"]


def test_the_official_files_hold_what_was_answered(split, tmp_path):
    task, asked = split
    first, last = asked.features[0].text.token_range(8, 14)
    decided = build(tmp_path, max_len=24, max_question_len=8, doc_stride=4, null_threshold=0.5)
    outputs = answers(asked, [(-1, first, last)], lambda items: [0.5 if item.example_index == 0 else 2.0 for item in items])
    written = decided.submit(tmp_path, {"dev-v2.0": decided.predictions(asked, outputs)})
    found = {path.name.split(".")[-2]: json.loads(path.read_text()) for path in written}
    assert found["answers"] == {"q1": "bi, bo", "q2": ""}
    assert found["spans"] == {"q1": "bi, bo", "q2": "bi, bo"}
    assert found["null_odds"] == {"q1": 0.5, "q2": 2.0}
    assert found["best"]["q1"][0]["text"] == "bi, bo"


def test_only_the_text_and_cls_can_hold_an_answer(split):
    task, asked = split
    (part,) = LengthBucketSampler(asked.features, task.padding_side, 0, 1, 10**6).eval_batches(100)
    excluded, cls = span_masks(part)
    for row, number in enumerate(part.indices):
        item = asked.features[number]
        n = len(item.central)
        assert cls[row] == len(item.rows[0].input_ids) - 1 and part.input_ids[row, cls[row]] == special_tokens.CLS
        assert (~excluded[row]).nonzero().flatten().tolist() == [*range(n), cls[row]]


def test_an_answer_longer_than_allowed_is_not_given(split, tmp_path):
    _, asked = split
    first, last = asked.features[0].text.token_range(8, 14)
    short = build(tmp_path, max_len=24, max_question_len=8, max_answer_len=last - first)
    outputs = answers(asked, [(-1, first, last)], lambda items: [0.0] * len(items))
    assert short.predictions(asked, outputs)[0]["best"][0]["text"] == ""


def test_the_first_version_always_answers_and_knows_no_threshold(tmp_path, tokenizer):
    write(tmp_path, "1.1", question("q1", "bi", "bi, bo"))
    task = build(tmp_path, "1.1", max_len=64, max_question_len=8)
    examples = task.read_split("dev-v1.1")
    asked = Split("dev-v1.1", examples, task.encode(examples, tokenizer))
    outputs = answers(asked, [(-1, *asked.features[0].text.token_range(8, 14))], lambda items: [99.0])
    assert task.compute_metrics(asked, outputs) == {"f1": 1.0, "exact": 1.0}
    (one,) = task.to_predictions(asked, outputs)
    assert one.keys() == {"id", "prediction", "best"} and one["prediction"] == "bi, bo"
    assert task.tuned_settings({}) == {} and task.chance_threshold(asked) == 0
    written = task.write_submission(tmp_path, {"dev-v1.1": [one]})
    assert [path.name for path in written] == ["dev-v1.1.answers.json", "dev-v1.1.best.json"]


def test_an_answer_of_which_nothing_is_read_is_refused(tmp_path, tokenizer):
    example = build(tmp_path).example(
        {"context": "\u200b Ba bi", "question": "Fa?", "answers": [{"text": "\u200b", "answer_start": 0}]}, "line 1"
    )
    with pytest.raises(ValueError, match="line 1: of the answer .* the vocabulary reads nothing"):
        build(tmp_path).encode([example], tokenizer)
