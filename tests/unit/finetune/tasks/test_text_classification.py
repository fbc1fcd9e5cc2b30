"""Text classification corpora are read as distributed."""

import csv

import numpy as np
import pytest

from finetune.config import TaskDataConfig
from finetune.data.examples import Split
from finetune.tasks.registry import build_task


def build(name, folder):
    return build_task(name, TaskDataConfig(dir=str(folder)), "last")


def test_csv_corpora_are_read_as_distributed_with_a_held_out_split(tmp_path):
    folder = tmp_path / "ag_news_csv"
    folder.mkdir()
    for name, count in (("train", 200), ("test", 5)):
        with open(folder / f"{name}.csv", "w", newline="") as file:
            writer = csv.writer(file, quoting=csv.QUOTE_ALL)
            writer.writerows([number % 4 + 1, f'A "title" {number}', "one\\ntwo"] for number in range(count))
    task = build("ag-news", tmp_path)
    train, held_out, test = (task.read_split(split) for split in ("train", *task.dev_splits, *task.test_splits))
    assert len(train) + len(held_out) == 200 and 5 < len(held_out) < 45
    assert not {example.texts for example in train} & {example.texts for example in held_out}
    assert test[1].texts == ('A "title" 1 one ntwo',)
    assert [example.label for example in test] == [0, 1, 2, 3, 0]
    predictions = task.to_predictions(Split("test", test[:1], []), {"logits": np.eye(4)[:1]})
    assert predictions[0]["prediction"] == "World"
    (folder / "test.csv").write_text("")
    with pytest.raises(ValueError, match="test.csv contains no example"):
        task.read_split("test")


@pytest.mark.parametrize(
    ("name", "escaped", "text"),
    [
        ("ag-news", r"a social\network of \$5", "a social network of $5"),
        ("yelp-5", r"He said \"no way\"\n\nand 2\3", 'He said "no way"\n\nand 2\\3'),
        ("amazon-2", r"\"so\"\nit is", '"so"\nit is'),
        ("dbpedia", r"C:\new", r"C:\new"),
        ("imdb", "So<br /><br />it is", "So  it is"),
    ],
)
def test_escape_sequences_of_a_corpus_are_replaced(name, escaped, text):
    task = build_task(name, TaskDataConfig(), "last")
    fields = {**dict.fromkeys(task.text_columns, ""), task.text_columns[-1]: escaped}
    assert task.parse_example(fields, "").texts == (text,)


def test_imdb_is_read_from_its_folders(tmp_path):
    for split in ("train", "test"):
        for label in ("neg", "pos"):
            (tmp_path / "aclImdb" / split / label).mkdir(parents=True)
            for number in range(20):
                (tmp_path / "aclImdb" / split / label / f"{number}_3.txt").write_text(f"So<br />{number} {label}")
    task = build("imdb", tmp_path)
    test = task.read_split("test")
    assert [example.label for example in test] == [0] * 20 + [1] * 20 and test[0].texts == ("So 0 neg",)
    assert len(task.read_split("train")) + len(task.read_split("held_out")) == 40
