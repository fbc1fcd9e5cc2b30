"""Custom files are read with the columns and labels in the settings or in the files."""

import json

import numpy as np
import pytest

from finetune.config import TaskDataConfig
from finetune.data.examples import Split
from finetune.tasks.custom import read_label_names
from finetune.tasks.registry import build_task
from tests.unit.finetune.conftest import build


def encode_train(task, tokenizer):
    examples = task.read_split("train")
    return Split("train", examples, task.encode(examples, tokenizer))


def test_labels_and_columns_come_from_the_files(tmp_path):
    (tmp_path / "a.csv").write_text("topic,one,two\n10,A,B\n9,C,D\n10,E,F\n")
    (tmp_path / "b.jsonl").write_text('{"topic": 9, "one": "X", "two": "Y"}\n')
    task = build("classify", tmp_path, train=["a.csv"], dev=["b.jsonl"], text=["two", "one"], label="topic")
    assert task.label_names == ["9", "10"]
    assert [example.texts for example in task.read_split("train")] == [("B", "A"), ("D", "C"), ("F", "E")]
    assert task.read_split("b")[0].label == 0
    saved = build_task("classify", TaskDataConfig(**task.data_settings()), "last")  # as in a model folder
    assert saved.parse_example({"one": "X", "two": "Y"}, "").texts == ("Y", "X")
    assert saved.label_names == task.label_names


def test_numbers_are_learned_normalized_and_predicted_as_in_the_file(tmp_path, tokenizer):
    (tmp_path / "a.tsv").write_text("text\tlabel\nba\t1990\nbe\t2000\nbi\t2010\nbo\t2020\n")
    task = build("regress", tmp_path, train=["a.tsv"], dev=["a.tsv"], text=["text"])
    split = encode_train(task, tokenizer)
    labels = np.array([feature.labels["label"] for feature in split.features])
    mean, std = task.data_settings()["label_scale"]
    assert mean == 2005 and std == pytest.approx(np.sqrt(125)) and labels.std() == pytest.approx(1)
    saved = build_task("regress", TaskDataConfig(**task.data_settings()), "last")  # as in a model folder
    predictions = saved.to_predictions(split, {"logits": labels})
    assert [prediction["prediction"] for prediction in predictions] == [example.label for example in split.examples]


@pytest.mark.parametrize("label", ["???", "${price}", "~/x"])
def test_a_label_that_settings_cannot_hold_is_refused(tmp_path, label):
    (tmp_path / "a.csv").write_text(f"topic,text\n{label},A\nother,C\n")
    with pytest.raises(ValueError, match=r"a.csv: label .* in column 'topic' is invalid: .* Rename the label"):
        read_label_names([tmp_path / "a.csv"], "topic")


def test_equal_numbers_have_a_scale_of_1(tmp_path):
    (tmp_path / "a.tsv").write_text("text\tlabel\nba\t7\nbe\t7\n")
    task = build("regress", tmp_path, train=["a.tsv"], dev=["a.tsv"], text=["text"])
    assert task.data_settings()["label_scale"] == [7, 1]
    with pytest.raises(ValueError, match="data.label_scale=.*standard deviation above 0"):
        TaskDataConfig(label_scale=[1, 0])


def test_large_numbers_with_small_differences_are_predicted_exactly(tmp_path, tokenizer):
    numbers = [1_600_000_000 + 100 * index for index in range(4)]
    (tmp_path / "a.tsv").write_text("text\tlabel\n" + "".join(f"ba\t{number}\n" for number in numbers))
    task = build("regress", tmp_path, train=["a.tsv"], dev=["a.tsv"], text=["text"])
    split = encode_train(task, tokenizer)
    labels = np.array([feature.labels["label"] for feature in split.features])
    predictions = task.to_predictions(split, {"logits": labels})
    assert [prediction["prediction"] for prediction in predictions] == pytest.approx(numbers, abs=0.01)


def test_a_hub_dataset_is_read_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    for split, count in (("train", 4), ("test", 2)):
        rows = [{"text": f"Ba {number}", "label": number % 2} for number in range(count)]
        (tmp_path / "data" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = f"hf:{tmp_path / 'data'}"
    settings = {"train": [f"{dataset}:train"], "dev": [f"{dataset}:test"], "text": ["text"]}
    task = build_task("classify", TaskDataConfig(**settings), "last")
    (dev,) = task.dev_splits
    assert task.label_names == ["0", "1"] and dev.endswith("-data-test")
    examples = task.read_split(dev)
    assert [(example.texts, example.label) for example in examples] == [(("Ba 0",), 0), (("Ba 1",), 1)]
    assert examples[1].location == f"{dataset}:test, row 2"
    in_folder = build("classify", tmp_path, **settings)  # data.dir is for other files
    assert len(in_folder.read_split("train")) == 4 and len(in_folder.read_split(dev)) == 2
    with pytest.raises(ValueError, match=f"{dataset} is invalid: .*no split.*{dataset}:train"):
        build_task("classify", TaskDataConfig(train=[dataset], text=["text"]), "last")


def test_test_examples_may_hide_their_label_and_dev_examples_may_not(tmp_path):
    (tmp_path / "train.tsv").write_text("text\tlabel\nx\tgood\ny\tbad\n")
    (tmp_path / "hidden.jsonl").write_text('{"text": "x", "label": -1}\n{"text": "y", "label": ""}\n{"text": "z"}\n')
    settings = {"train": ["train.tsv"], "text": ["text"]}
    task = build("classify", tmp_path, test=["hidden.jsonl"], **settings)
    assert [example.label for example in task.read_split("hidden")] == [None] * 3
    for name, values, labels in [("all", (-1, -1), [None, None]), ("one", (-1, 2), [-1, 2])]:
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"text": "x", "label": {value}}}\n' for value in values))
        task = build("regress", tmp_path, label_scale=[0, 1], test=[f"{name}.jsonl"], **settings)
        assert [example.label for example in task.read_split(name)] == labels
    with pytest.raises(ValueError, match="line 1: label '-1' in column 'label' .*bad, good"):
        build("classify", tmp_path, dev=["hidden.jsonl"], **settings).read_split("hidden")


def test_an_invalid_row_is_refused_with_its_line(tmp_path):
    (tmp_path / "a.tsv").write_text("text\tlabel\nx\tgood\ny\tbad\n")
    (tmp_path / "b.tsv").write_text("text\tlabel\nx\tgood\n\tbad\ny\tfine\n")
    task = build("classify", tmp_path, train=["a.tsv"], dev=["b.tsv"], text=["text"])
    with pytest.raises(ValueError, match="b.tsv, line 3: .*'text' is empty"):
        task.read_split("b")


def test_a_single_label_and_missing_columns_are_refused(tmp_path):
    (tmp_path / "a.tsv").write_text("text\tlabel\nx\ta\n")
    with pytest.raises(ValueError, match="a.tsv: column 'label' .*'a'"):
        build("classify", tmp_path, train=["a.tsv"], text=["text"])
    with pytest.raises(ValueError, match=r"data.text=null .*data.text=\[COLUMN\]"):
        build("classify", tmp_path, labels=["a", "b"])


def test_spaces_around_labels_are_ignored_and_labels_sorted_by_value(tmp_path):
    (tmp_path / "a.csv").write_text(
        f"text,label\nba,good \nbe,bad\n{'ba ' * 100000},good\n"
    )  # a long text is valid CSV
    assert read_label_names([tmp_path / "a.csv"], "label") == ["bad", "good"]
    spellings = ["-0", "0", "00", "000", "01", "1"]
    (tmp_path / "b.csv").write_text("text,label\n" + "".join(f"ba,{label}\n" for label in spellings[::-1]))
    assert read_label_names([tmp_path / "b.csv"], "label") == spellings
