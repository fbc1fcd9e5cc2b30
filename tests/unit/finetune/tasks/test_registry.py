"""Corpora, files of one's own and datasets by name are read; what does not fit a task is refused."""

import csv
import json

import numpy as np
import pytest

from finetune.config import TaskDataConfig
from finetune.data.examples import Split
from finetune.tasks.registry import TASK_NAMES, build_task


def build(name, folder, **data):
    return build_task(name, TaskDataConfig(dir=str(folder), **data), "last")


def test_corpora_are_read_as_distributed_and_a_part_held_out(tmp_path):
    place = tmp_path / "ag_news_csv"
    place.mkdir()
    for name, count in (("train", 200), ("test", 5)):
        with open(place / f"{name}.csv", "w", newline="") as file:
            writer = csv.writer(file, quoting=csv.QUOTE_ALL)
            writer.writerows([number % 4 + 1, f'A "title" {number}', "one\\ntwo"] for number in range(count))
    task = build("ag-news", tmp_path)
    train, held_out, test = (task.read_split(split) for split in ("train", *task.dev_splits, *task.test_splits))
    assert len(train) + len(held_out) == 200 and 5 < len(held_out) < 45
    assert not {x.texts for x in train} & {x.texts for x in held_out}
    assert test[1].texts == ('A "title" 1 one ntwo',) and [x.label for x in test] == [0, 1, 2, 3, 0]
    assert task.to_predictions(Split("test", test[:1], []), {"logits": np.eye(4)[:1]})[0]["prediction"] == "World"
    (place / "test.csv").write_text("")
    with pytest.raises(ValueError, match=r"test.csv: holds no example"):
        task.read_split("test")


@pytest.mark.parametrize(
    ("name", "written", "meant"),
    [
        ("ag-news", r"a social\network of \$5", "a social network of $5"),
        ("yelp-5", r"He said \"no way\"\n\nand 2\3", 'He said "no way"\n\nand 2\\3'),
        ("amazon-2", r"\"so\"\nit is", '"so"\nit is'),
        ("dbpedia", r"C:\new", r"C:\new"),
        ("imdb", "So<br /><br />it is", "So  it is"),
    ],
)
def test_what_a_corpus_writes_for_line_ends_quotes_and_dollars_is_read_in_files_and_lines(name, written, meant):
    task = build_task(name, TaskDataConfig(), "last")
    fields = {**dict.fromkeys(task.text_columns, ""), task.text_columns[-1]: written}
    assert task.parse_example(fields, "").texts == (meant,)


def test_imdb_is_read_from_its_folders(tmp_path):
    for split in ("train", "test"):
        for label in ("neg", "pos"):
            (tmp_path / "aclImdb" / split / label).mkdir(parents=True)
            for number in range(20):
                (tmp_path / "aclImdb" / split / label / f"{number}_3.txt").write_text(f"So<br />{number} {label}")
    task = build("imdb", tmp_path)
    assert [x.label for x in task.read_split("test")] == [0] * 20 + [1] * 20
    assert task.read_split("test")[0].texts == ("So 0 neg",)
    assert len(task.read_split("train")) + len(task.read_split("held_out")) == 40


def test_own_files_bring_their_labels_and_columns(tmp_path):
    (tmp_path / "a.csv").write_text("topic,one,two\n10,A,B\n9,C,D\n10,E,F\n")
    (tmp_path / "b.jsonl").write_text('{"topic": 9, "one": "X", "two": "Y"}\n')
    task = build("classify", tmp_path, train=["a.csv"], dev=["b.jsonl"], text=["two", "one"], label="topic")
    assert task.label_names == ["9", "10"]
    assert [x.texts for x in task.read_split("train")] == [("B", "A"), ("D", "C"), ("F", "E")]
    assert task.read_split("b")[0].answer == 0
    again = build_task("classify", TaskDataConfig(**task.data_settings()), "last")  # as a saved folder has it
    assert again.example({"one": "X", "two": "Y"}, "").texts == ("Y", "X") and again.labels == task.label_names


def test_numbers_are_learned_on_a_scale_of_their_own_and_answered_on_that_of_the_file(tmp_path, tokenizer):
    (tmp_path / "a.tsv").write_text("text\tlabel\nba\t1990\nbe\t2000\nbi\t2010\nbo\t2020\n")
    task = build("regress", tmp_path, train=["a.tsv"], dev=["a.tsv"], text=["text"])
    examples = task.read_split("train")
    split = Split("train", examples, task.encode(examples, tokenizer))
    learned = np.array([item.labels["label"] for item in split.features])
    mean, deviation = task.data_settings()["scale"]
    assert mean == 2005 and deviation == pytest.approx(np.sqrt(125)) and learned.std() == pytest.approx(1)
    again = build_task("regress", TaskDataConfig(**task.data_settings()), "last")  # as a saved folder has it
    assert [one["prediction"] for one in again.predictions(split, {"logits": learned})] == [x.label for x in examples]
    (tmp_path / "b.tsv").write_text("text\tlabel\nba\t7\nbe\t7\n")
    assert build("regress", tmp_path, train=["b.tsv"], dev=["a.tsv"], text=["text"]).settings()["scale"] == [7, 1]
    with pytest.raises(ValueError, match="must be a mean and a standard deviation above 0"):
        TaskDataConfig(label_scale=[1, 0])


def test_numbers_far_from_zero_and_close_to_each_other_are_told_apart(tmp_path, tokenizer):
    seconds = [1_600_000_000 + 100 * number for number in range(4)]
    (tmp_path / "a.tsv").write_text("text\tlabel\n" + "".join(f"ba\t{one}\n" for one in seconds))
    task = build("regress", tmp_path, train=["a.tsv"], dev=["a.tsv"], text=["text"])
    examples = task.read_split("train")
    split = Split("train", examples, task.encode(examples, tokenizer))
    learned = np.array([item.labels["label"] for item in split.features])
    answers = [one["prediction"] for one in task.to_predictions(split, {"logits": learned})]
    assert answers == pytest.approx(seconds, abs=0.01)


def test_a_dataset_is_read_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    for split, count in (("train", 4), ("test", 2)):
        rows = [{"text": f"Ba {number}", "label": number % 2} for number in range(count)]
        (tmp_path / "data" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = f"hf:{tmp_path / 'data'}"
    task = build_task(
        "classify", TaskDataConfig(train=[f"{source}:train"], dev=[f"{source}:test"], text=["text"]), "last"
    )
    (dev,) = task.dev_splits
    assert task.label_names == ["0", "1"] and dev.endswith("-data-test")
    assert [(x.texts, x.label) for x in task.read_split(dev)] == [(("Ba 0",), 0), (("Ba 1",), 1)]
    assert task.read_split(dev)[1].place == f"{source}:test, row 2"
    again = build("classify", tmp_path, train=[f"{source}:train"], dev=[f"{source}:test"], text=["text"])
    assert len(again.read("train")) == 4 and len(again.read(dev)) == 2  # data.dir is for other files
    with pytest.raises(ValueError, match="name its split"):
        build_task("classify", TaskDataConfig(train=[source], text=["text"]), "last")


def test_examples_to_predict_may_leave_the_truth_open_and_others_may_not(tmp_path):
    (tmp_path / "train.tsv").write_text("text\tlabel\nx\tgood\ny\tbad\n")
    (tmp_path / "open.jsonl").write_text('{"text": "x", "label": -1}\n{"text": "y", "label": ""}\n{"text": "z"}\n')
    settings = {"train": ["train.tsv"], "text": ["text"]}
    task = build("classify", tmp_path, test=["open.jsonl"], **settings)
    assert [x.label for x in task.read_split("open")] == [None] * 3
    for name, values, answers in [("all", (-1, -1), [None, None]), ("one", (-1, 2), [-1, 2])]:
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"text": "x", "label": {value}}}\n' for value in values))
        numbers = build("regress", tmp_path, scale=[0, 1], test=[f"{name}.jsonl"], **settings)
        assert [x.label for x in numbers.read(name)] == answers
    with pytest.raises(ValueError, match="line 1: the label '-1' in 'label' is none of bad, good"):
        build("classify", tmp_path, dev=["open.jsonl"], **settings).read("open")


@pytest.mark.parametrize(
    ("task", "own"), [("classify", {"text": ["a"], "labels": ["0", "1"]}), ("squad/2.0", {}), ("rank", {})]
)
def test_dev_and_test_are_told_apart_by_name_or_refused(task, own, tmp_path):
    for dev, test in [
        ("news.dev.tsv", "news.test.tsv"),
        ("dev-v1.1.json", "dev-v1.2.json.gz"),
        ("hf:./A:validation", "hf:B/C:validation"),
    ]:
        made = build(task, tmp_path, dev=[dev], test=[test], **own)
        assert made.dev != made.test and not any("/" in name for name in (*made.dev, *made.test))
    for dev, test in [
        ("a.tsv", "x/a.csv.gz"),
        ("hf:A:b", "hf:A:b"),
        ("train.tsv", "a.tsv"),
        ("a.tsv", "metrics.jsonl"),
    ]:
        with pytest.raises(ValueError, match="both called|is called .*; rename it"):
            build(task, tmp_path, dev=[dev], test=[test], **own)


def test_official_dev_and_another_file_of_its_name_are_refused(tmp_path):
    for task, test in [("glue/sst-2", "../RTE/dev.tsv"), ("squad/2.0", "old/dev-v2.0.json")]:
        with pytest.raises(ValueError, match=f"{test} and .* are both called dev"):
            build(task, tmp_path, test=[test])


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("glue/mprc", "glue/mrpc"), ("mrpc", "glue/mrpc"), ("GLUE/CoLA", "glue/cola"), ("sst2", "glue/sst-2"), ("race/low", "race")],
)  # fmt: skip
def test_a_misspelt_task_names_the_nearest(name, nearest):
    with pytest.raises(ValueError, match=f"there is no such task; did you mean {nearest}"):
        build_task(name, TaskDataConfig(), "last")
    with pytest.raises(ValueError, match="there are glue/cola"):
        build_task("zzzzzz", TaskDataConfig(), "last")


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("classify", "regress", "rank")])
def test_a_task_without_its_folder_says_what_it_should_hold(name, tmp_path):
    for folder, message in ((tmp_path / "no", "there is no such folder; it should hold"), ("", "set data.dir")):
        with pytest.raises(ValueError, match=message):
            build(name, folder).read("train")


def test_settings_that_a_task_has_no_use_for_are_refused(tmp_path):
    with pytest.raises(ValueError, match="data.text=.* has no effect on task=glue/cola"):
        build("glue/cola", tmp_path, text=["a"])
    with pytest.raises(ValueError, match="data.train=.* has no effect on task=race"):
        build("race", tmp_path, train=["a"])


def test_a_wrong_row_is_named_with_its_line(tmp_path):
    (tmp_path / "a.tsv").write_text("text\tlabel\nx\tgood\ny\tbad\n")
    (tmp_path / "b.tsv").write_text("text\tlabel\nx\tgood\n\tbad\ny\tfine\n")
    task = build("classify", tmp_path, train=["a.tsv"], dev=["b.tsv"], text=["text"])
    with pytest.raises(ValueError, match=r"b.tsv, line 3: the text in 'text' is empty"):
        task.read_split("b")
    (tmp_path / "c.tsv").write_text("text\tlabel\nx\ta\n")
    with pytest.raises(ValueError, match="holds the label 'a' only; at least two"):
        build("classify", tmp_path, train=["c.tsv"], text=["text"])
    with pytest.raises(ValueError, match="both called a"):
        build("classify", tmp_path, train=["a.tsv"], dev=["x/a.tsv", "y/a.tsv"], text=["text"])
    with pytest.raises(ValueError, match=r"data.text: \[COLUMN\]"):
        build("classify", tmp_path, train=["a.tsv"])
