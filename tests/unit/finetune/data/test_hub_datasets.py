"""Tasks read from Hub datasets: columns and label indices are those of the dataset, examples are the same as from files."""

import pytest

from finetune.config import TaskDataConfig
from finetune.tasks.registry import build_task

# as nyu-mll/glue numbers them, which is not the order of the published code
NLI = {0: "entailment", 1: "neutral", 2: "contradiction"}
SENTENCES = ("sentence1", "sentence2")
GLUE = {  # configuration and text columns of nyu-mll/glue, and what the label 1 means there
    "glue/cola": ("cola", ("sentence",), "1"),
    "glue/sst-2": ("sst2", ("sentence",), "1"),
    "glue/mrpc": ("mrpc", SENTENCES, "1"),
    "glue/qqp": ("qqp", ("question1", "question2"), "1"),
    "glue/sts-b": ("stsb", SENTENCES, 1.0),
    "glue/mnli": ("mnli", ("premise", "hypothesis"), "neutral"),
    "glue/qnli": ("qnli", ("question", "sentence"), "not_entailment"),
    "glue/rte": ("rte", SENTENCES, "not_entailment"),
    "glue/wnli": ("wnli", SENTENCES, "1"),
    "glue/ax": ("mnli", ("premise", "hypothesis"), "neutral"),
}


@pytest.fixture
def read(monkeypatch):
    """Build a task on datasets of the given rows. Returns it, with id, texts and label of the examples of a split."""

    def make(name, dataset, rows_by_split, split):
        monkeypatch.setattr(
            "finetune.data.table_reader.read_hf_rows", lambda source, split: iter(rows_by_split[f"{source}:{split}"])
        )
        task = build_task(name, TaskDataConfig(dir=dataset, max_seq_len=128), "last")
        return task, [(example.id, example.texts, example.label) for example in task.read_split(split)]

    return make


def pairs(labels, columns=("premise", "hypothesis"), first=0):
    a, b = columns
    return [{a: f"a{i}", b: f"b{i}", "label": label, "idx": i} for i, label in enumerate(labels, first)]


@pytest.mark.parametrize(
    ("name", "split", "hub_split"),
    [
        ("glue/mnli", "train", "mnli:train"),
        ("glue/mnli", "dev_matched", "mnli:validation_matched"),
        ("glue/mnli", "dev_mismatched", "mnli:validation_mismatched"),
        ("glue/ax", "train", "mnli:train"),
        ("glue/rte", "dev", "rte:validation"),
    ],
)
def test_label_indices_are_those_of_the_dataset(read, name, split, hub_split):
    label_names = NLI if name != "glue/rte" else {0: "entailment", 1: "not_entailment"}
    columns = ("premise", "hypothesis") if name != "glue/rte" else ("sentence1", "sentence2")
    rows = {f"hf:nyu-mll/glue/{hub_split}": pairs(label_names, columns)}
    task, examples = read(name, "hf:nyu-mll/glue", rows, split)
    assert [task.label_names[label] for _, _, label in examples] == list(label_names.values())
    assert examples[0][:2] == ("0", ("a0", "b0"))


@pytest.mark.parametrize(
    ("name", "split", "hub_split"),
    [
        ("glue/mnli", "test_matched", "mnli:test_matched"),
        ("glue/mnli", "diagnostic", "ax:test"),
        ("glue/ax", "diagnostic", "ax:test"),
    ],
)
def test_rows_to_predict_keep_their_index_and_have_no_label(read, name, split, hub_split):
    task, examples = read(name, "hf:GLUE", {f"hf:GLUE/{hub_split}": pairs([-1, -1], first=7)}, split)
    assert examples == [("7", ("a7", "b7"), None), ("8", ("a8", "b8"), None)]
    assert split in task.test_splits


@pytest.mark.parametrize("name", GLUE)
def test_each_glue_task_is_read_from_its_config_of_the_dataset(read, name):
    config, texts, meaning_of_1 = GLUE[name]
    row = {**{column: f"in {column}" for column in texts}, "label": 1, "idx": 5}
    task, [example] = read(name, "hf:G", {f"hf:G/{config}:train": [row]}, "train")
    assert example[:2] == ("5", tuple(f"in {column}" for column in texts))
    assert (task.label_names[example[2]] if task.label_names else example[2]) == meaning_of_1


def test_texts_and_labels_of_mrpc_and_sts_b_are_read_under_their_hub_names(read):
    _, examples = read("glue/mrpc", "hf:G", {"hf:G/mrpc:train": pairs([0, 1], SENTENCES)}, "train")
    assert examples == [("0", ("a0", "b0"), 0), ("1", ("a1", "b1"), 1)]
    _, examples = read("glue/sts-b", "hf:G", {"hf:G/stsb:validation": pairs([0.5, 5.0], SENTENCES)}, "dev")
    assert [label for _, _, label in examples] == [0.5, 5.0]


def test_race_questions_are_numbered_within_their_files(read):
    def rows(level):
        question = {"article": "a", "question": "_?", "options": ["p", "q", "r", "s"], "answer": "C"}
        return [{**question, "example_id": f"{level}{file}.txt"} for file in (3, 3, 5)]

    rows_by_split = {f"hf:race/{level}:validation": rows(level) for level in ("middle", "high")}
    _, examples = read("race", "hf:race", rows_by_split, "dev")
    ids = [example_id for example_id, _, _ in examples]
    assert ids == [f"{level}/{question}" for level in ("middle", "high") for question in ("3/0", "3/1", "5/0")]
    assert examples[0][1:] == (("a", "p?", "q?", "r?", "s?"), 2)


def test_corpora_number_classes_from_0_and_may_have_no_title(read):
    task, examples = read("imdb", "hf:imdb", {"hf:imdb:test": [{"text": "x<br />y", "label": 1}]}, "test")
    assert examples == [("0", ("x y",), 1)] and task.label_names == ("neg", "pos")
    task, examples = read("yelp-5", "hf:yelp", {"hf:yelp:test": [{"text": "x\\ny", "label": 4}]}, "test")
    assert examples == [("0", ("x\ny",), 4)] and task.label_names[4] == "5"
    _, examples = read("dbpedia", "hf:d", {"hf:d:test": [{"title": "t", "content": "c", "label": 0}]}, "test")
    assert examples == [("0", ("t c",), 0)]
    _, examples = read("ag-news", "hf:n", {"hf:n:test": [{"text": "t (R) d", "label": 3}]}, "test")
    assert examples == [("0", ("t (R) d",), 3)]


def test_squad_is_read_from_its_splits(read):
    row = {"id": "q", "context": "one two", "question": "?", "answers": {"text": ["two"], "answer_start": [4]}}
    _, examples = read("squad/1.1", "hf:squad", {"hf:squad:validation": [row]}, "dev-v1.1")
    assert examples == [("q", ("one two", "?"), ((4, "two"),))]


def test_a_dataset_with_other_label_indices_is_refused(read):
    with pytest.raises(ValueError, match="hf:y:test, row 2: label 5 .* 0 to 4.*1, 2, 3, 4, 5"):
        read("yelp-5", "hf:y", {"hf:y:test": [{"text": "x", "label": label} for label in (1, 5)]}, "test")


def test_files_with_the_columns_of_a_hub_dataset_are_refused(tmp_path):
    (tmp_path / "train.tsv").write_text("index\tsentence1\tsentence2\tlabel\n0\ta\tb\t1\n")
    with pytest.raises(ValueError, match="no column 'Quality'.* index, sentence1, sentence2, label"):
        build_task("glue/mrpc", TaskDataConfig(dir=str(tmp_path)), "last").read_split("train")
