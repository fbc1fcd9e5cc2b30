"""A vocabulary is not taken for one of another text, if it says what it was learned from."""

import json
import shutil

import pytest

from xlpre.text.corpus import TextConfig
from xlpre.text.tokenizer import TokenizerConfig
from xlpre.text.tokenizer_training import check_training_record, record_path, write_training_record

SETTINGS = TokenizerConfig(vocab_size=300)


@pytest.fixture
def texts(tmp_path):
    """Two files of one folder."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, text in (("a.txt", "one"), ("b.txt", "three")):
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def saved(texts, tokenizer, tmp_path):
    """The vocabulary, which says that it was learned from both."""
    path = tmp_path / "words.model"
    tokenizer.save(path)
    write_training_record(path, tokenizer, of(texts), SETTINGS)
    return path


def of(folder, glob="*.txt", **settings):
    return TextConfig(source=f"{folder}/{glob}", **settings)


def test_the_same_text_is_known_again_where_it_was_moved_to_and_named_otherwise(saved, texts, tokenizer, tmp_path):
    moved = shutil.move(texts, tmp_path / "moved")
    (tmp_path / "more").mkdir()
    shutil.copy(tmp_path / "moved" / "a.txt", tmp_path / "more")
    for text in (
        of(moved),
        of(moved, "?.txt", held_out=0.1, workers=3, deduplicate=True),
        TextConfig(mixture={f"{moved}/b.txt": 2, f"{tmp_path}/more/a.txt": 0.5}),
    ):
        check_training_record(saved, tokenizer, text, SETTINGS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({"glob": "a.txt"}, r"one with b.txt \(5 bytes\); set"),
        ({"glob": "*"}, r"one without c.jsonl \(2 bytes\); set"),
        ({"limit_mb": 1.0}, r"text with text.max_chars=null, not 1.0; set"),
        ({"column": "body"}, r"text with text.column=text, not body; set"),
    ],
)
def test_another_text_is_refused_with_what_is_other_and_a_way_out(saved, texts, tokenizer, text, message):
    (texts / "c.jsonl").write_text("{}")
    with pytest.raises(
        ValueError, match=rf"words.model was learned from .*{message} another tokenizer.path, delete the"
    ):
        check_training_record(saved, tokenizer, of(texts, **text), SETTINGS)


def test_a_file_that_has_grown_is_another_text(saved, texts, tokenizer):
    (texts / "b.txt").write_text("three and more")
    with pytest.raises(ValueError, match=r"one with b.txt \(5 bytes\) and without b.txt \(14 bytes\)"):
        check_training_record(saved, tokenizer, of(texts), SETTINGS)


def test_a_source_without_files_is_known_by_its_name(saved, texts, tokenizer):
    text = TextConfig(mixture={"docstrings": 1, "hf:owner/data": 1})
    with pytest.raises(ValueError, match=r"with a.txt \(3 bytes\) and 1 more and without docstrings and 1 more; set"):
        check_training_record(saved, tokenizer, text, SETTINGS)
    write_training_record(saved, tokenizer, text, SETTINGS)
    check_training_record(saved, tokenizer, text, SETTINGS)


def test_what_is_done_to_the_text_first_is_known_too(saved, texts, tokenizer):
    for change in ({"preprocess": "uncased"}, {"train_mb": 1.0}):
        with pytest.raises(ValueError, match=r"text with tokenizer\.(preprocess=none|train_mb=100000000)"):
            check_training_record(saved, tokenizer, of(texts), TokenizerConfig(vocab_size=300, **change))


@pytest.mark.parametrize("said", [None, "", "[1]", "{}", '{"sha256": "of another vocabulary", "sources": []}'])
def test_a_vocabulary_that_says_nothing_of_itself_is_taken(saved, texts, tokenizer, said):
    record_path(saved).unlink()
    if said is not None:
        record_path(saved).write_text(said)
    check_training_record(saved, tokenizer, of(texts, "a.txt"), SETTINGS)


def test_what_was_not_said_yet_is_not_compared(saved, texts, tokenizer):
    said = json.loads(record_path(saved).read_text())
    del said["tokenizer.train_chars"]
    record_path(saved).write_text(json.dumps(said))
    check_training_record(saved, tokenizer, of(texts), TokenizerConfig(vocab_size=300, train_chars=1000000))
