"""SQuAD is read as it is distributed, and answered as the official scorers want it."""

import gzip
import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from finetune.batches import Dealer
from finetune.config import TaskDataConfig
from finetune.examples import Split
from finetune.span import answer_places
from finetune.tasks import build_task
from xlpre.text import symbols

CONTEXT = "Ba be\u0301  bi, bo bu. Da de di."


def question(name, *answers, **more):
    found = [{"text": text, "answer_start": CONTEXT.index(text)} for text in answers]
    return {"id": name, "question": "Fa fe?", "answers": found, **more}


def content(*questions):
    return {"version": "x", "data": [{"title": "T", "paragraphs": [{"context": CONTEXT, "qas": list(questions)}]}]}


def build(folder, version="2.0", **data):
    return build_task(f"squad/{version}", TaskDataConfig(dir=str(folder), **data), "last")


def write(folder, version="2.0", *questions):
    for part in ("train", "dev"):
        (folder / f"{part}-v{version}.json").write_text(json.dumps(content(*questions)))


def test_official_files_are_read_packed_or_not(tmp_path):
    write(tmp_path, "2.0", question("q1", "bi", "bi, bo"), question("q2", is_impossible=True, plausible_answers=[]))
    path = tmp_path / "dev-v2.0.json"
    with gzip.open(f"{path}.gz", "wt", encoding="utf-8") as file:
        file.write(path.read_text())
    path.unlink()
    task = build(tmp_path)
    assert task.dev == ("dev-v2.0",)
    first, second = task.read("dev-v2.0")
    assert first.texts == (CONTEXT, "Fa fe?") and first.answer == ((8, "bi"), (8, "bi, bo"))
    assert second.answer == () and [x.id for x in task.read("train")] == ["q1", "q2"]


def test_rows_of_a_dataset_have_their_answers_as_lists(tmp_path, monkeypatch):
    row = {"id": "q1", "context": CONTEXT, "question": "Fa?", "answers": {"text": ["bi"], "answer_start": [8]}}
    rows = {"train": [row], "validation": [row, {**row, "id": "q2", "answers": {"text": [], "answer_start": []}}]}
    monkeypatch.setattr("finetune.fields.hub_rows", lambda name, split: iter(rows[split]))
    task = build_task("squad/2.0", TaskDataConfig(train=["hf:a/b:train"], dev=["hf:a/b:validation"]), "last")
    assert [x.answer for x in task.read("train")] == [((8, "bi"),)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows["validation"]))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows["validation"]), tmp_path / "b.parquet")
    for file in ("a.jsonl", "b.parquet"):
        of_file = build(tmp_path, "2.0", dev=[file])
        assert [x.answer for x in of_file.read(*of_file.dev)] == [((8, "bi"),), ()]
    assert task.dev == ("a-b-validation",) and [x.answer for x in task.read(*task.dev)] == [((8, "bi"),), ()]


@pytest.mark.parametrize(
    ("version", "questions", "answers"),
    [
        ("1.1", [question("q1"), question("q2")], [None, None]),
        ("1.1", [question("q1"), question("q2", "bi")], [None, ((8, "bi"),)]),
        ("2.0", [question("q1"), question("q2", is_impossible=False)], [None, None]),
        ("2.0", [question("q1"), question("q2", is_impossible=True)], [None, ()]),
        ("2.0", [question("q1"), question("q2", "bi")], [(), ((8, "bi"),)]),
    ],
)
def test_no_answers_are_the_truth_of_a_test_file_only_where_it_tells_one(tmp_path, version, questions, answers):
    (tmp_path / "test.json").write_text(json.dumps(content(*questions)))
    examples = build(tmp_path, version, test=["test.json"]).read("test")
    assert [example.answer for example in examples] == answers
    assert Split("test", examples, []).labelled == (None not in answers)


def test_the_truth_of_a_line_may_be_unknown(tmp_path):
    assert build(tmp_path).example({"context": CONTEXT, "question": "Fa?"}, "").answer is None


@pytest.mark.parametrize(
    ("version", "changed", "message"),
    [
        ("2.0", {"answers": [{"text": "bi", "answer_start": 7}]}, "q1: .* at its answer_start 7, where ' b' is; it stands at 8"),
        ("2.0", {"answers": [{"text": "zu", "answer_start": 1}]}, "the answer 'zu' .* it is nowhere in the context; remove the question"),
        ("2.0", {"answers": [{"text": "bi"}]}, "q1: there is no column 'answer_start'; there are text"),
        ("2.0", {"answers": "bi"}, "q1: 'answers' must be a list"),
        ("2.0", {"is_impossible": True}, "q1: is_impossible is true, and there are answers"),
        ("2.0", {"question": " "}, "q1: the text in 'question' is empty"),
        ("1.1", {"answers": []}, "q1: has no answer, which is for task=squad/2.0"),
        ("2.0", {"answers": [{"text": "bi", "answer_start": "8"}]}, "q1: answer_start '8' must be a whole number"),
        ("2.0", {"is_impossible": "false"}, "q1: 'is_impossible' is 'false'; it must be true or false"),
        ("2.0", {"id": None}, "article 1, paragraph 1, question 1: there is no column 'id'"),
        ("2.0", {"id": [1]}, r"the id \[1\] must be a text"),
    ],
)  # fmt: skip
def test_a_wrong_question_is_named_with_its_file(tmp_path, version, changed, message):
    one = {**question("q1", "bi"), **changed}
    write(tmp_path, version, {key: value for key, value in one.items() if value is not None})
    with pytest.raises(ValueError, match=f"dev-v{version}.json.*{message}"):
        build(tmp_path, version).read(f"dev-v{version}")


def test_files_that_are_cut_missing_or_of_another_kind_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"train-v2.0.json: there is no such file; data.dir should hold"):
        build(tmp_path).read("train")
    write(tmp_path, "2.0", question("q1", "bi"))
    path = tmp_path / "dev-v2.0.json"
    whole = path.read_text()
    for text, message in [
        (whole[:-9], "not JSON .*; it ends early"),
        ("{1}", "not JSON .* at character 1.$"),
        ("[]", "JSON object"),
        ('{"a": 1}', "no column 'data'"),
    ]:
        path.write_text(text)
        with pytest.raises(ValueError, match=f"dev-v2.0.json.*{message}"):
            build(tmp_path).read("dev-v2.0")
    path.write_text(json.dumps(content(question("q1", "bi"), question("q1", "bo"))))
    with pytest.raises(ValueError, match="2 questions have the id 'q1'"):
        build(tmp_path).read("dev-v2.0")
    path.write_text(json.dumps({"data": []}))
    with pytest.raises(ValueError, match="holds no question"):
        build(tmp_path).read("dev-v2.0")
    with pytest.raises(ValueError, match="no room for data.max_question_len"):
        build(tmp_path, max_len=64)
    with pytest.raises(ValueError, match="set data.dir to the one that holds train-v2.0.json"):
        build("").read("train")


@pytest.fixture
def split(tmp_path, tokenizer):
    """A question with an answer, in windows, and one without."""
    write(tmp_path, "2.0", question("q1", "bi, bo"), question("q2"))
    task = build(tmp_path, max_len=24, max_question_len=8, doc_stride=4)
    examples = task.read("dev-v2.0")
    return task, Split("dev-v2.0", examples, task.encode(examples, tokenizer))


def answers(split, say, odds):
    """Outputs in which every window says `say` of its first example's tokens, as (score, first, last), if it has them."""
    n = len(split.items)
    found = {name: np.full((n, 5), -50.0) for name in ("start",)} | {"end": np.full((n, 5, 5), -50.0)}
    found |= {"start_position": np.full((n, 5), 10**6), "end_position": np.full((n, 5, 5), 10**6)}
    for number, item in enumerate(split.items):
        for rank, (score, first, last) in enumerate(say):
            found["start"][number, rank], found["start_position"][number, rank] = score, first - item.first
            found["end"][number, rank, 0], found["end_position"][number, rank, 0] = 0, last - item.first
    return {**found, "no_answer": np.array(odds(split.items))}


def test_the_span_with_most_context_wins_and_the_lowest_odds_count(split):
    task, asked = split
    windows = [item for item in asked.items if item.example == 0]
    assert len(windows) > 1
    text = windows[0].text
    first, last = text.tokens(8, 14)
    assert text.stretch(first, last) == "bi, bo"
    outputs = answers(
        asked, [(-1, first, last), (-0.5, last, first), (-2, 0, 0)], lambda items: [3.0 + i for i in range(len(items))]
    )
    one, two = task.predictions(asked, outputs)
    assert one["best"][0]["text"] == "bi, bo" and one["best"][0]["log_probability"] == -1
    assert len({x["text"] for x in one["best"]}) == len(one["best"]) == 2  # an end before its start is no answer
    assert one["best"][0]["probability"] == pytest.approx(1 / (1 + np.exp(-1)), abs=1e-6)
    assert one["null_log_odds"] == 3 and one["prediction"] == ""
    scores = task.measure(asked, outputs)
    assert scores["best_f1"] == scores["best_exact"] == 1 and 3 < scores["best_f1_threshold"] < two["null_log_odds"]
    assert scores["f1"] == 0.5 and scores["has_answer_f1"] == 0 and scores["no_answer_exact"] == 1
    assert task.decided(scores) == {"null_threshold": scores["best_f1_threshold"]}
    assert task.level_of_chance(asked) > 0.5


def test_scores_at_a_threshold_are_those_of_the_answers_handed_in_and_never_tuned_on_what_they_measure(split, tmp_path):
    _, asked = split
    outputs = answers(
        asked, [(-1, *asked.items[0].text.tokens(8, 14))], lambda items: [0.9 if x.example == 0 else 2.0 for x in items]
    )
    for threshold, right in ((0.5, [False, True]), (1.0, [True, True]), (3.0, [True, False])):
        task = build(tmp_path, max_len=24, max_question_len=8, doc_stride=4, null_threshold=threshold)
        scores, given = task.measure(asked, outputs), [one["prediction"] for one in task.predictions(asked, outputs)]
        assert [answer == truth for answer, truth in zip(given, ["bi, bo", ""], strict=True)] == right
        assert scores["f1"] == scores["exact"] == np.mean(right) and scores["has_answer_f1"] == right[0]
        assert task.score in scores and not any(name.startswith("best") for name in scores)


def test_a_window_does_not_answer_at_tokens_of_which_another_has_more_context(split):
    task, asked = split
    first, last = asked.items[0].text.tokens(8, 14)
    outputs = answers(asked, [(-5, first, last)], lambda items: [0.0] * len(items))
    n_others = 0
    for number, item in enumerate(asked.items):
        place = first - item.first
        if item.example == 0 and 0 <= place < len(item.central) - 1 and not item.central[place]:
            outputs["start"][number, 0], outputs["end_position"][number, 0, 0] = 0, place  # surer, and of another end
            n_others += 1
    assert n_others
    assert [one["text"] for one in task.predictions(asked, outputs)[0]["best"]] == ["bi, bo"]


def test_the_official_files_hold_what_was_answered(split, tmp_path):
    task, asked = split
    first, last = asked.items[0].text.tokens(8, 14)
    decided = build(tmp_path, max_len=24, max_question_len=8, doc_stride=4, null_threshold=0.5)
    outputs = answers(asked, [(-1, first, last)], lambda items: [0.5 if item.example == 0 else 2.0 for item in items])
    written = decided.submit(tmp_path, {"dev-v2.0": decided.predictions(asked, outputs)})
    found = {path.name.split(".")[-2]: json.loads(path.read_text()) for path in written}
    assert found["answers"] == {"q1": "bi, bo", "q2": ""}
    assert found["spans"] == {"q1": "bi, bo", "q2": "bi, bo"}
    assert found["null_odds"] == {"q1": 0.5, "q2": 2.0}
    assert found["best"]["q1"][0]["text"] == "bi, bo"


def test_only_the_text_and_cls_can_hold_an_answer(split):
    task, asked = split
    (part,) = Dealer(asked.items, task.padding, 0, 1, 10**6).once(100)
    excluded, cls = answer_places(part)
    for row, number in enumerate(part.numbers):
        item = asked.items[number]
        n = len(item.central)
        assert cls[row] == len(item.rows[0].ids) - 1 and part.ids[row, cls[row]] == symbols.CLS
        assert (~excluded[row]).nonzero().flatten().tolist() == [*range(n), cls[row]]


def test_an_answer_longer_than_allowed_is_not_given(split, tmp_path):
    _, asked = split
    first, last = asked.items[0].text.tokens(8, 14)
    short = build(tmp_path, max_len=24, max_question_len=8, max_answer_len=last - first)
    outputs = answers(asked, [(-1, first, last)], lambda items: [0.0] * len(items))
    assert short.predictions(asked, outputs)[0]["best"][0]["text"] == ""


def test_the_first_version_always_answers_and_knows_no_threshold(tmp_path, tokenizer):
    write(tmp_path, "1.1", question("q1", "bi", "bi, bo"))
    task = build(tmp_path, "1.1", max_len=64, max_question_len=8)
    examples = task.read("dev-v1.1")
    asked = Split("dev-v1.1", examples, task.encode(examples, tokenizer))
    outputs = answers(asked, [(-1, *asked.items[0].text.tokens(8, 14))], lambda items: [99.0])
    assert task.measure(asked, outputs) == {"f1": 1.0, "exact": 1.0}
    (one,) = task.predictions(asked, outputs)
    assert one.keys() == {"id", "prediction", "best"} and one["prediction"] == "bi, bo"
    assert task.decided({}) == {} and task.level_of_chance(asked) == 0
    written = task.submit(tmp_path, {"dev-v1.1": [one]})
    assert [path.name for path in written] == ["dev-v1.1.answers.json", "dev-v1.1.best.json"]


def test_an_answer_of_which_nothing_is_read_is_refused(tmp_path, tokenizer):
    example = build(tmp_path).example(
        {"context": "\u200b Ba bi", "question": "Fa?", "answers": [{"text": "\u200b", "answer_start": 0}]}, "line 1"
    )
    with pytest.raises(ValueError, match="line 1: of the answer .* the vocabulary reads nothing"):
        build(tmp_path).encode([example], tokenizer)
