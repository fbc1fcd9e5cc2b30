"""Model folders whose vocabulary is a table."""

import json

import pytest

from tests.conftest import write_folder
from tests.unit.conversion.folders import make
from xlpre.conversion.model_folder import load_folder, save_huggingface, save_tensorflow
from xlpre.inference.cloze import cloze_batch, predict_blanks
from xlpre.text.special_tokens import EOP, MASK
from xlpre.text.table_tokenizer import ByteTokenizer, CharacterTokenizer, WordTokenizer

TABLES = [ByteTokenizer(), CharacterTokenizer(["\n", " ", "a"]), WordTokenizer(["the", "cat", "sat"])]
EACH = pytest.mark.parametrize("table", TABLES, ids=lambda table: table.kind)


@EACH
def test_a_folder_is_read_back_with_its_table(table, tmp_path):
    folder = load_folder(write_folder(tmp_path / "model", table))
    assert folder.tokenizer.pieces == table.pieces and folder.tokenizer.sha256 == table.sha256
    assert folder.provenance["vocabulary_kind"] == table.kind and not (tmp_path / "model" / "spiece.model").exists()


@EACH
@pytest.mark.parametrize("save", [save_huggingface, save_tensorflow])
def test_other_formats_are_refused_and_nothing_is_written(table, save, tmp_path):
    folder = make(table, vocab_size=len(table))
    with pytest.raises(
        ValueError,
        match=f"with a vocabulary of {table.kind} is invalid for this format: .* Use the model folder of xlpre as it is",
    ):
        save(tmp_path / "other", folder)
    assert not (tmp_path / "other").exists()


def test_a_missing_or_other_table_is_refused(tmp_path):
    path = write_folder(tmp_path / "model", TABLES[2])
    WordTokenizer(["the", "dog", "sat"]).save(path / "vocabulary.json")
    with pytest.raises(
        ValueError, match=r"vocabulary.json \(sha256 .*another vocabulary .* Put the original vocabulary.json"
    ):
        load_folder(path)
    (path / "vocabulary.json").unlink()
    with pytest.raises(ValueError, match=r"vocabulary.json does not exist. Copy the whole folder"):
        load_folder(path)


def test_a_folder_that_was_saved_before_there_were_tables_has_a_sentencepiece_model(tmp_path, tokenizer):
    path = write_folder(tmp_path / "model", tokenizer)
    provenance = json.loads((path / "provenance.json").read_text())
    del provenance["vocabulary_kind"]
    (path / "provenance.json").write_text(json.dumps(provenance))
    assert load_folder(path).tokenizer.kind == "sentencepiece"


def test_a_blank_is_a_word(tmp_path):
    batch = cloze_batch("the ____ sat", TABLES[2])
    assert batch.input_ids[0, :3].tolist() == [9, MASK, 11] and EOP not in batch.input_ids
    folder = load_folder(write_folder(tmp_path / "model", TABLES[2]))
    words = [piece for piece, _ in predict_blanks(folder.model(), folder.tokenizer, "the ____").predictions[0]]
    assert {*words[:3]} == {"the", "cat", "sat"}


@pytest.mark.parametrize("table", TABLES[:2], ids=lambda table: table.kind)
def test_blanks_of_bytes_and_characters_are_refused(table):
    with pytest.raises(ValueError, match=f"is invalid for a vocabulary of {table.kind}: a blank is one token"):
        cloze_batch("the ____ sat", table)
