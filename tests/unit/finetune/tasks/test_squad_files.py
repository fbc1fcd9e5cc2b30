"""SQuAD is read as it is distributed, and what is wrong in it is named."""

import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest

from finetune.config import TaskDataConfig
from finetune.data.examples import Split
from finetune.tasks.registry import build_task

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
    assert task.dev_splits == ("dev-v2.0",)
    first, second = task.read_split("dev-v2.0")
    assert first.texts == (CONTEXT, "Fa fe?") and first.answer == ((8, "bi"), (8, "bi, bo"))
    assert second.answer == () and [x.id for x in task.read_split("train")] == ["q1", "q2"]


def test_rows_of_a_dataset_have_their_answers_as_lists(tmp_path, monkeypatch):
    row = {"id": "q1", "context": CONTEXT, "question": "Fa?", "answers": {"text": ["bi"], "answer_start": [8]}}
    rows = {"train": [row], "validation": [row, {**row, "id": "q2", "answers": {"text": [], "answer_start": []}}]}
    monkeypatch.setattr("finetune.data.table_reader.read_hf_rows", lambda name, split: iter(rows[split]))
    task = build_task("squad/2.0", TaskDataConfig(train=["hf:a/b:train"], dev=["hf:a/b:validation"]), "last")
    assert [x.label for x in task.read_split("train")] == [((8, "bi"),)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows["validation"]))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows["validation"]), tmp_path / "b.parquet")
    for file in ("a.jsonl", "b.parquet"):
        of_file = build(tmp_path, "2.0", dev=[file])
        assert [x.label for x in of_file.read(*of_file.dev)] == [((8, "bi"),), ()]
    assert task.dev_splits == ("a-b-validation",) and [x.label for x in task.read_split(*task.dev_splits)] == [((8, "bi"),), ()]


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
    assert [example.label for example in examples] == answers
    assert Split("test", examples, []).is_labelled == (None not in answers)


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
        (whole[:-9], "not JSON .* truncated"),
        ("{1}", "not JSON .* at character 1\)\.$"),
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
