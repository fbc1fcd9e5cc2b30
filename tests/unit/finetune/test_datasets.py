"""Tasks whose data is a dataset by its name instead of a folder: columns and numbers of labels are as there, examples as from files."""

import pytest

from finetune.config import TaskDataConfig
from finetune.tasks.registry import build_task

NLI = {
    0: "entailment",
    1: "neutral",
    2: "contradiction",
}  # as nyu-mll/glue numbers them, which is not the original's order


@pytest.fixture
def read(monkeypatch):
    """Makes datasets of the rows that are given; returns what a task reads of one."""

    def make(task, name, datasets, split):
        def rows(source, split):
            return iter(datasets[f"{source}:{split}"])

        monkeypatch.setattr("finetune.data.table_reader.hub_rows", rows)
        made = build_task(task, TaskDataConfig(dir=name, max_seq_len=128), "last")
        return made, [(example.id, example.texts, example.label) for example in made.read(split)]

    return make


def pairs(labels, names=("premise", "hypothesis"), first=0):
    one, two = names
    return [{one: f"a{i}", two: f"b{i}", "label": label, "idx": i} for i, label in enumerate(labels, first)]


@pytest.mark.parametrize(
    ("task", "split", "place"),
    [
        ("glue/mnli", "train", "mnli:train"),
        ("glue/mnli", "dev_matched", "mnli:validation_matched"),
        ("glue/mnli", "dev_mismatched", "mnli:validation_mismatched"),
        ("glue/ax", "train", "mnli:train"),
        ("glue/rte", "dev", "rte:validation"),
    ],
)
def test_numbers_stand_for_the_labels_of_the_dataset(read, task, split, place):
    names = NLI if task != "glue/rte" else {0: "entailment", 1: "not_entailment"}
    columns = ("premise", "hypothesis") if task != "glue/rte" else ("sentence1", "sentence2")
    made, found = read(task, "hf:nyu-mll/glue", {f"hf:nyu-mll/glue/{place}": pairs(names, columns)}, split)
    assert [made.labels[answer] for _, _, answer in found] == list(names.values())
    assert found[0][:2] == ("0", ("a0", "b0"))


@pytest.mark.parametrize(
    ("task", "split", "place"),
    [
        ("glue/mnli", "test_matched", "mnli:test_matched"),
        ("glue/mnli", "diagnostic", "ax:test"),
        ("glue/ax", "diagnostic", "ax:test"),
    ],
)
def test_rows_to_predict_keep_their_index_and_have_no_truth(read, task, split, place):
    made, found = read(task, "hf:GLUE", {f"hf:GLUE/{place}": pairs([-1, -1], first=7)}, split)
    assert found == [("7", ("a7", "b7"), None), ("8", ("a8", "b8"), None)]
    assert split in made.test


def test_all_tasks_of_glue_name_their_part_of_the_dataset():
    made = [
        build_task(f"glue/{name}", TaskDataConfig(dir="hf:G"), "last") for name in ("cola", "sst-2", "sts-b", "qqp")
    ]
    assert [str(task.source._train[0]) for task in made] == [
        f"hf:G/{name}:train" for name in ("cola", "sst2", "stsb", "qqp")
    ]


def test_texts_and_truth_of_mrpc_and_sts_b_are_found_under_their_other_names(read):
    names = ("sentence1", "sentence2")
    _, found = read("glue/mrpc", "hf:G", {"hf:G/mrpc:train": pairs([0, 1], names)}, "train")
    assert found == [("0", ("a0", "b0"), 0), ("1", ("a1", "b1"), 1)]
    _, found = read("glue/sts-b", "hf:G", {"hf:G/stsb:validation": pairs([0.5, 5.0], names)}, "dev")
    assert [answer for _, _, answer in found] == [0.5, 5.0]


def test_questions_of_race_are_numbered_within_their_files(read):
    def rows(level):
        question = {"article": "a", "question": "_?", "options": ["p", "q", "r", "s"], "answer": "C"}
        return [{**question, "example_id": f"{level}{file}.txt"} for file in (3, 3, 5)]

    datasets = {f"hf:race/{level}:validation": rows(level) for level in ("middle", "high")}
    _, found = read("race", "hf:race", datasets, "dev")
    names = [name for name, _, _ in found]
    assert names == [f"{level}/{place}" for level in ("middle", "high") for place in ("3/0", "3/1", "5/0")]
    assert found[0][1:] == (("a", "p?", "q?", "r?", "s?"), 2)


def test_corpora_count_classes_from_0_and_may_have_no_title(read):
    made, found = read("imdb", "hf:imdb", {"hf:imdb:test": [{"text": "x<br />y", "label": 1}]}, "test")
    assert found == [("0", ("x y",), 1)] and made.labels == ("neg", "pos")
    made, found = read("yelp-5", "hf:yelp", {"hf:yelp:test": [{"text": "x\\ny", "label": 4}]}, "test")
    assert found == [("0", ("x\ny",), 4)] and made.labels[4] == "5"
    _, found = read("dbpedia", "hf:d", {"hf:d:test": [{"title": "t", "content": "c", "label": 0}]}, "test")
    assert found == [("0", ("t c",), 0)]
    _, found = read("ag-news", "hf:n", {"hf:n:test": [{"text": "t (R) d", "label": 3}]}, "test")
    assert found == [("0", ("t (R) d",), 3)]


def test_squad_is_read_from_its_splits(read):
    row = {"id": "q", "context": "one two", "question": "?", "answers": {"text": ["two"], "answer_start": [4]}}
    _, found = read("squad/1.1", "hf:squad", {"hf:squad:validation": [row]}, "dev-v1.1")
    assert found == [("q", ("one two", "?"), ((4, "two"),))]


def test_a_dataset_that_numbers_labels_otherwise_is_refused(read):
    with pytest.raises(
        ValueError, match="hf:y:test, row 2: the label 5 is none of 0 to 4, which stand for 1, 2, 3, 4, 5"
    ):
        read("yelp-5", "hf:y", {"hf:y:test": [{"text": "x", "label": label} for label in (1, 5)]}, "test")


def test_files_of_one_task_are_not_taken_for_those_of_another_that_has_the_columns_of_a_dataset(tmp_path):
    (tmp_path / "train.tsv").write_text("index\tsentence1\tsentence2\tlabel\n0\ta\tb\t1\n")
    with pytest.raises(ValueError, match="there is no column 'Quality'; there are index, sentence1, sentence2, label"):
        build_task("glue/mrpc", TaskDataConfig(dir=str(tmp_path)), "last").read("train")
