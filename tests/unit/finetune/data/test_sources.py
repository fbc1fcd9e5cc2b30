"""Dev and test files are distinguished by the name of their split."""

import pytest

from tests.unit.finetune.conftest import build

TASKS = [("classify", {"text": ["a"], "labels": ["0", "1"]}), ("squad/2.0", {}), ("rank", {})]


@pytest.mark.parametrize(("name", "settings"), TASKS)
@pytest.mark.parametrize(
    ("dev", "test"),
    [
        ("news.dev.tsv", "news.test.tsv"),
        ("dev-v1.1.json", "dev-v1.2.json.gz"),
        ("hf:./A:validation", "hf:B/C:validation"),
    ],
)
def test_splits_are_named_after_their_files(name, settings, dev, test, tmp_path):
    task = build(name, tmp_path, dev=[dev], test=[test], **settings)
    assert task.dev_splits != task.test_splits
    assert not any("/" in split for split in (*task.dev_splits, *task.test_splits))


@pytest.mark.parametrize(("name", "settings"), TASKS)
@pytest.mark.parametrize(
    ("dev", "test", "message"),
    [
        ("a.tsv", "x/a.csv.gz", "same split name a"),
        ("hf:A:b", "hf:A:b", "same split name A-b"),
        ("train.tsv", "a.tsv", "split name train is reserved"),
        ("a.tsv", "metrics.jsonl", "split name metrics is reserved"),
    ],
)
def test_splits_of_the_same_or_a_reserved_name_are_refused(name, settings, dev, test, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        build(name, tmp_path, dev=[dev], test=[test], **settings)


@pytest.mark.parametrize(("name", "test"), [("glue/sst-2", "../RTE/dev.tsv"), ("squad/2.0", "old/dev-v2.0.json")])
def test_a_test_file_with_the_name_of_the_official_dev_file_is_refused(name, test, tmp_path):
    with pytest.raises(ValueError, match=f"{test} is invalid: .*same split name dev"):
        build(name, tmp_path, test=[test])


def test_custom_files_without_training_files_are_refused_when_they_are_read(tmp_path):
    task = build("classify", tmp_path, text=["a"], labels=["0", "1"], dev=["dev.tsv"])
    with pytest.raises(
        ValueError, match=r"data.train=null is invalid: .*needs training files. Set data.train=\[FILE\]"
    ):
        task.read_split("train")


def test_rows_of_several_training_files_have_different_ids(tmp_path):
    for name in ("a.tsv", "b.tsv"):
        (tmp_path / name).write_text("text\tlabel\n" + "".join(f"{name} {n}\t{n % 2}\n" for n in range(20)))
    task = build("classify", tmp_path, text=["text"], labels=["0", "1"], train=["a.tsv", "b.tsv"], val_fraction=0.5)
    ids = [example.id for split in ("train", "held_out") for example in task.read_split(split)]
    assert sorted(map(int, ids)) == list(range(40))
