"""A vocabulary is refused for another text than that of its training record."""

import json
import shutil

import pytest

from xlpre.text.corpus import TextConfig
from xlpre.text.tokenizer import TokenizerConfig
from xlpre.text.tokenizer_training import check_training_record, record_path, training_lines, write_training_record

SETTINGS = TokenizerConfig(vocab_size=300)


@pytest.fixture
def texts(tmp_path):
    """Return a folder with two files."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, text in (("a.txt", "one"), ("b.txt", "three")):
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def saved(texts, tokenizer, tmp_path):
    """Return the path of a vocabulary whose training record names both files."""
    path = tmp_path / "words.model"
    tokenizer.save(path)
    write_training_record(path, tokenizer, of(texts), SETTINGS)
    return path


def of(folder, glob="*.txt", **settings):
    return TextConfig(source=f"{folder}/{glob}", **settings)


def test_moved_files_and_other_globs_are_the_same_text(saved, texts, tokenizer, tmp_path):
    moved = shutil.move(texts, tmp_path / "moved")
    (tmp_path / "more").mkdir()
    shutil.copy(tmp_path / "moved" / "a.txt", tmp_path / "more")
    for text in (
        of(moved),
        of(moved, "?.txt", val_fraction=0.1, num_processes=3, deduplicate=True),
        TextConfig(mixture={f"{moved}/b.txt": 2, f"{tmp_path}/more/a.txt": 0.5}),
    ):
        check_training_record(saved, tokenizer, text, SETTINGS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({"glob": "a.txt"}, r"missing: b.txt \(5 bytes\)"),
        ({"glob": "*"}, r"new: c.jsonl \(2 bytes\)"),
        ({"max_chars": 100}, r"with text.max_chars=null, not 100"),
        ({"column": "body"}, r"with text.column=text, not body"),
    ],
)
def test_another_text_is_refused_with_the_difference_and_remedies(saved, texts, tokenizer, text, message):
    (texts / "c.jsonl").write_text("{}")
    with pytest.raises(
        ValueError,
        match=rf"tokenizer.path=.*words.model is invalid: .*{message}.* Set another .* delete .*words.model.json",
    ):
        check_training_record(saved, tokenizer, of(texts, **text), SETTINGS)


def test_a_file_of_another_size_is_another_text(saved, texts, tokenizer):
    (texts / "b.txt").write_text("three and more")
    with pytest.raises(ValueError, match=r"missing: b.txt \(5 bytes\); new: b.txt \(14 bytes\)"):
        check_training_record(saved, tokenizer, of(texts), SETTINGS)


def test_a_source_without_files_is_recorded_by_its_name(saved, texts, tokenizer):
    text = TextConfig(mixture={"docstrings": 1, "hf:owner/data": 1})
    with pytest.raises(ValueError, match=r"missing: a.txt \(3 bytes\) and 1 more; new: docstrings and 1 more"):
        check_training_record(saved, tokenizer, text, SETTINGS)
    write_training_record(saved, tokenizer, text, SETTINGS)
    check_training_record(saved, tokenizer, text, SETTINGS)


def test_other_training_settings_are_refused(saved, texts, tokenizer):
    for change in ({"preprocess": "uncased"}, {"train_chars": 100}):
        with pytest.raises(ValueError, match=r"with tokenizer\.(preprocess=none|train_chars=100000000), not"):
            check_training_record(saved, tokenizer, of(texts), TokenizerConfig(vocab_size=300, **change))


@pytest.mark.parametrize("record", [None, "", "[1]", "{}", '{"sha256": "of another vocabulary", "sources": []}'])
def test_a_vocabulary_without_a_valid_record_is_accepted(saved, texts, tokenizer, record):
    record_path(saved).unlink()
    if record is not None:
        record_path(saved).write_text(record)
    check_training_record(saved, tokenizer, of(texts, "a.txt"), SETTINGS)


def test_a_record_of_another_format_is_refused(saved, texts, tokenizer):
    record = json.loads(record_path(saved).read_text())
    del record["format"]  # as written before format 2
    record_path(saved).write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"words.model is invalid: another version .*words.model.json. Delete"):
        check_training_record(saved, tokenizer, of(texts), SETTINGS)


def test_keys_missing_in_the_record_are_not_compared(saved, texts, tokenizer):
    record = json.loads(record_path(saved).read_text())
    del record["tokenizer.train_chars"]
    record_path(saved).write_text(json.dumps(record))
    check_training_record(saved, tokenizer, of(texts), TokenizerConfig(vocab_size=300, train_chars=1000000))


def test_a_long_document_does_not_make_up_the_whole_sample():
    documents = [["x" * 50] * 4000, *[["y" * 20]] * 5000]  # 200,000 and 100,000 characters
    for order in (documents, documents[::-1]):
        lines = list(training_lines(order, 60_000, "none"))
        n_chars = {letter: sum(map(len, (line for line in lines if letter in line))) for letter in "xy"}
        assert 30_000 <= sum(n_chars.values()) <= 60_000 and n_chars["x"] == pytest.approx(2 * n_chars["y"], rel=0.2)
