"""SQuAD is read as distributed, and its spans are predicted and written as the official scripts expect."""

import gzip
import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from finetune.config import TaskDataConfig
from finetune.data.batching import LengthBucketSampler
from finetune.data.examples import Split
from finetune.tasks.registry import build_task
from finetune.tasks.span import span_masks
from xlpre.text import special_tokens

CONTEXT = "Ba be\u0301  bi, bo bu. Da de di."
SMALL = {"max_seq_len": 24, "max_question_len": 8, "doc_stride": 4}


def question(question_id, *answers, **fields):
    answers = [{"text": text, "answer_start": CONTEXT.index(text)} for text in answers]
    return {"id": question_id, "question": "Fa fe?", "answers": answers, **fields}


def content(*questions):
    return {"version": "x", "data": [{"title": "T", "paragraphs": [{"context": CONTEXT, "qas": list(questions)}]}]}


def build(folder, version="2.0", **data):
    return build_task(f"squad/{version}", TaskDataConfig(dir=str(folder), **data), "last")


def write(folder, version="2.0", *questions):
    for part in ("train", "dev"):
        (folder / f"{part}-v{version}.json").write_text(json.dumps(content(*questions)))


def test_official_files_are_read_compressed_or_not(tmp_path):
    write(tmp_path, "2.0", question("q1", "bi", "bi, bo"), question("q2", is_impossible=True, plausible_answers=[]))
    path = tmp_path / "dev-v2.0.json"
    with gzip.open(f"{path}.gz", "wt", encoding="utf-8") as file:
        file.write(path.read_text())
    path.unlink()
    task = build(tmp_path)
    assert task.dev_splits == ("dev-v2.0",)
    first, second = task.read_split("dev-v2.0")
    assert first.texts == (CONTEXT, "Fa fe?") and first.label == ((8, "bi"), (8, "bi, bo"))
    assert second.label == () and [example.id for example in task.read_split("train")] == ["q1", "q2"]


def test_rows_of_a_dataset_have_lists_of_answers(tmp_path, monkeypatch):
    row = {"id": "q1", "context": CONTEXT, "question": "Fa?", "answers": {"text": ["bi"], "answer_start": [8]}}
    rows = {"train": [row], "validation": [row, {**row, "id": "q2", "answers": {"text": [], "answer_start": []}}]}
    monkeypatch.setattr("finetune.data.table_reader.read_hf_rows", lambda name, split: iter(rows[split]))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows["validation"]))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows["validation"]), tmp_path / "b.parquet")
    tasks = [build(tmp_path, "2.0", dev=[file]) for file in ("a.jsonl", "b.parquet")]
    tasks.append(build_task("squad/2.0", TaskDataConfig(train=["hf:a/b:train"], dev=["hf:a/b:validation"]), "last"))
    for task in tasks:
        assert [example.label for example in task.read_split(*task.dev_splits)] == [((8, "bi"),), ()]
    assert tasks[-1].dev_splits == ("a-b-validation",)
    assert [example.label for example in tasks[-1].read_split("train")] == [((8, "bi"),)]


@pytest.mark.parametrize(
    ("version", "questions", "labels"),
    [
        ("1.1", [question("q1"), question("q2")], [None, None]),
        ("1.1", [question("q1"), question("q2", "bi")], [None, ((8, "bi"),)]),
        ("2.0", [question("q1"), question("q2", is_impossible=False)], [None, None]),
        ("2.0", [question("q1"), question("q2", is_impossible=True)], [None, ()]),
        ("2.0", [question("q1"), question("q2", "bi")], [(), ((8, "bi"),)]),
    ],
)
def test_an_empty_list_of_answers_in_a_test_file_is_a_label_only_beside_an_answer(tmp_path, version, questions, labels):
    (tmp_path / "test.json").write_text(json.dumps(content(*questions)))
    examples = build(tmp_path, version, test=["test.json"]).read_split("test")
    assert [example.label for example in examples] == labels
    assert Split("test", examples, []).is_labeled == (None not in labels)


def test_a_line_without_answers_has_no_label(tmp_path):
    assert build(tmp_path).parse_example({"context": CONTEXT, "question": "Fa?"}, "").label is None


@pytest.mark.parametrize(
    ("version", "changes", "message"),
    [
        ("2.0", {"answers": [{"text": "bi", "answer_start": 7}]}, "q1: answer_start=7 .*' b' .*'bi'.* at 8"),
        ("2.0", {"answers": [{"text": "zu", "answer_start": 1}]}, "q1: answer_start=1 .*'zu'.* remove the question"),
        ("2.0", {"answers": [{"text": "bi"}]}, "q1: .*no column 'answer_start'"),
        ("2.0", {"answers": "bi"}, "q1: 'answers' .*list"),
        ("2.0", {"answers": {"text": ["bi"], "answer_start": []}}, "q1: 'answers' .*same length"),
        ("2.0", {"is_impossible": True}, "q1: is_impossible=true .*answers"),
        ("2.0", {"is_impossible": False, "answers": []}, "q1: is_impossible=false .*no answers"),
        ("2.0", {"question": " "}, "q1: .*'question' is empty"),
        ("1.1", {"answers": []}, "q1: .*no answer.* task=squad/2.0"),
        ("2.0", {"answers": [{"text": "bi", "answer_start": "8"}]}, "q1: answer_start='8' .*integer"),
        ("2.0", {"is_impossible": "false"}, "q1: is_impossible='false' .*true or false"),
        ("2.0", {"id": None}, "article 1, paragraph 1, question 1: .*no column 'id'"),
        ("2.0", {"id": [1]}, r"id \[1\] .*text"),
    ],
)
def test_an_invalid_question_is_refused_with_its_file(tmp_path, version, changes, message):
    fields = {**question("q1", "bi"), **changes}
    write(tmp_path, version, {key: value for key, value in fields.items() if value is not None})
    with pytest.raises(ValueError, match=f"dev-v{version}.json.*{message}"):
        build(tmp_path, version).read_split(f"dev-v{version}")


def test_incomplete_missing_and_other_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="train-v2.0.json: no such file.* data.dir"):
        build(tmp_path).read_split("train")
    write(tmp_path, "2.0", question("q1", "bi"))
    path = tmp_path / "dev-v2.0.json"
    text = path.read_text()
    for invalid, message in [
        (text[:-9], "not JSON .*truncated"),
        ("{1}", r"not JSON .*at character 1\)\.$"),
        ("[]", "JSON object"),
        ('{"a": 1}', "no column 'data'"),
        (json.dumps(content(question("q1", "bi"), question("q1", "bo"))), "2 questions .*'q1'"),
        (json.dumps({"data": []}), "no question"),
    ]:
        path.write_text(invalid)
        with pytest.raises(ValueError, match=f"dev-v2.0.json.*{message}"):
            build(tmp_path).read_split("dev-v2.0")


def test_a_row_too_short_and_a_missing_folder_are_refused(tmp_path):
    with pytest.raises(ValueError, match="data.max_seq_len=64 .*data.max_question_len=64.* above 67"):
        build(tmp_path, max_seq_len=64)
    with pytest.raises(ValueError, match="data.dir=.*train-v2.0.json"):
        build("").read_split("train")


def test_an_answer_without_tokens_is_refused(tmp_path, tokenizer):
    example = build(tmp_path).parse_example(
        {"context": "\u200b Ba bi", "question": "Fa?", "answers": [{"text": "\u200b", "answer_start": 0}]}, "line 1"
    )
    with pytest.raises(ValueError, match="line 1: the answer .*no tokens"):
        build(tmp_path).encode([example], tokenizer)


@pytest.fixture
def task_and_split(tmp_path, tokenizer):
    """A task and its dev split: a question with an answer, in windows, and one without."""
    write(tmp_path, "2.0", question("q1", "bi, bo"), question("q2"))
    task = build(tmp_path, **SMALL)
    examples = task.read_split("dev-v2.0")
    return task, Split("dev-v2.0", examples, task.encode(examples, tokenizer))


def make_outputs(split, spans, null_log_odds):
    """Return outputs in which every window predicts the same spans.

    Args:
        split: the split.
        spans: (log-probability, first token, last token) in the context.
        null_log_odds: log-odds of each window.
    """
    n = len(split.features)
    outputs = {"start": np.full((n, 5), -50.0), "end": np.full((n, 5, 5), -50.0), "no_answer": np.array(null_log_odds)}
    outputs |= {"start_position": np.full((n, 5), 10**6), "end_position": np.full((n, 5, 5), 10**6)}
    for row, window in enumerate(split.features):
        for beam, (log_prob, first, last) in enumerate(spans):
            outputs["start"][row, beam], outputs["end"][row, beam, 0] = log_prob, 0
            outputs["start_position"][row, beam] = first - window.first_token
            outputs["end_position"][row, beam, 0] = last - window.first_token
    return outputs


def true_tokens(split):
    """Return the first and last token of the answer "bi, bo"."""
    return split.features[0].context.token_range(8, 14)


def test_the_best_span_of_all_windows_and_the_lowest_log_odds_count(task_and_split):
    task, split = task_and_split
    windows = [window for window in split.features if window.example_index == 0]
    assert len(windows) > 1
    first, last = true_tokens(split)
    assert windows[0].context.span_text(first, last) == "bi, bo"
    spans = [(-1, first, last), (-0.5, last, first), (-2, 0, 0)]
    outputs = make_outputs(split, spans, [3.0 + i for i in range(len(split.features))])
    with_answer, without_answer = task.to_predictions(split, outputs)
    nbest = with_answer["nbest"]
    assert nbest[0]["text"] == "bi, bo" and nbest[0]["log_probability"] == -1
    assert len({span["text"] for span in nbest}) == len(nbest) == 2  # an end before its start is not a span
    assert nbest[0]["probability"] == pytest.approx(1 / (1 + np.exp(-1)), abs=1e-6)
    assert with_answer["null_log_odds"] == 3 and with_answer["prediction"] == ""
    metrics = task.compute_metrics(split, outputs)
    assert metrics["best_f1"] == metrics["best_exact"] == 1
    assert 3 < metrics["best_f1_threshold"] < without_answer["null_log_odds"]
    assert metrics["f1"] == 0.5 and metrics["has_answer_f1"] == 0 and metrics["no_answer_exact"] == 1
    assert task.tuned_settings(metrics) == {"null_score_threshold": metrics["best_f1_threshold"]}
    assert task.chance_threshold(split) > 0.5


@pytest.mark.parametrize(("threshold", "is_correct"), [(0.5, [False, True]), (1.0, [True, True]), (3.0, [True, False])])
def test_metrics_at_a_set_threshold_are_those_of_the_submission(task_and_split, tmp_path, threshold, is_correct):
    _, split = task_and_split
    log_odds = [0.9 if window.example_index == 0 else 2.0 for window in split.features]
    outputs = make_outputs(split, [(-1, *true_tokens(split))], log_odds)
    task = build(tmp_path, **SMALL, null_score_threshold=threshold)
    metrics = task.compute_metrics(split, outputs)
    texts = [prediction["prediction"] for prediction in task.to_predictions(split, outputs)]
    assert [text == label for text, label in zip(texts, ["bi, bo", ""], strict=True)] == is_correct
    assert metrics["f1"] == metrics["exact"] == np.mean(is_correct) and metrics["has_answer_f1"] == is_correct[0]
    # the threshold is never tuned on the examples that it is measured on
    assert task.main_metric in metrics and not any(name.startswith("best") for name in metrics)


def test_a_span_starts_only_where_its_window_has_the_most_context(task_and_split):
    task, split = task_and_split
    first, last = true_tokens(split)
    outputs = make_outputs(split, [(-5, first, last)], [0.0] * len(split.features))
    n_changed = 0
    for row, window in enumerate(split.features):
        start = first - window.first_token
        if (
            window.example_index == 0
            and 0 <= start < len(window.is_max_context) - 1
            and not window.is_max_context[start]
        ):
            outputs["start"][row, 0], outputs["end_position"][row, 0, 0] = 0, start  # more likely, with another end
            n_changed += 1
    assert n_changed
    assert [span["text"] for span in task.to_predictions(split, outputs)[0]["nbest"]] == ["bi, bo"]


def test_the_official_files_contain_the_predictions(task_and_split, tmp_path):
    _, split = task_and_split
    task = build(tmp_path, **SMALL, null_score_threshold=0.5)
    log_odds = [0.5 if window.example_index == 0 else 2.0 for window in split.features]
    outputs = make_outputs(split, [(-1, *true_tokens(split))], log_odds)
    paths = task.write_submission(tmp_path, {"dev-v2.0": task.to_predictions(split, outputs)})
    contents = {path.name.split(".")[-2]: json.loads(path.read_text()) for path in paths}
    assert contents["predictions"] == {"q1": "bi, bo", "q2": ""}
    assert contents["spans"] == {"q1": "bi, bo", "q2": "bi, bo"}
    assert contents["null_odds"] == {"q1": 0.5, "q2": 2.0}
    assert contents["nbest"]["q1"][0]["text"] == "bi, bo"


def test_only_the_context_and_cls_can_be_part_of_a_span(task_and_split):
    task, split = task_and_split
    (batch,) = LengthBucketSampler(split.features, task.padding_side, 0, 1, 10**6).eval_batches(100)
    is_excluded, cls_position = span_masks(batch)
    for row, index in enumerate(batch.indices):
        window = split.features[index]
        n = len(window.is_max_context)
        assert cls_position[row] == len(window.rows[0].input_ids) - 1
        assert batch.input_ids[row, cls_position[row]] == special_tokens.CLS
        assert (~is_excluded[row]).nonzero().flatten().tolist() == [*range(n), cls_position[row]]


def test_a_span_longer_than_max_answer_len_is_not_predicted(task_and_split, tmp_path):
    _, split = task_and_split
    first, last = true_tokens(split)
    task = build(tmp_path, max_seq_len=24, max_question_len=8, max_answer_len=last - first)
    outputs = make_outputs(split, [(-1, first, last)], [0.0] * len(split.features))
    assert task.to_predictions(split, outputs)[0]["nbest"][0]["text"] == ""


def test_squad_1_1_always_predicts_a_span_and_has_no_threshold(tmp_path, tokenizer):
    write(tmp_path, "1.1", question("q1", "bi", "bi, bo"))
    task = build(tmp_path, "1.1", max_seq_len=64, max_question_len=8)
    examples = task.read_split("dev-v1.1")
    split = Split("dev-v1.1", examples, task.encode(examples, tokenizer))
    outputs = make_outputs(split, [(-1, *true_tokens(split))], [99.0])
    assert task.compute_metrics(split, outputs) == {"f1": 1.0, "exact": 1.0}
    (prediction,) = task.to_predictions(split, outputs)
    assert prediction.keys() == {"id", "prediction", "nbest"} and prediction["prediction"] == "bi, bo"
    assert task.tuned_settings({}) == {} and task.chance_threshold(split) == 0
    paths = task.write_submission(tmp_path, {"dev-v1.1": [prediction]})
    assert [path.name for path in paths] == ["dev-v1.1.predictions.json", "dev-v1.1.nbest.json"]
