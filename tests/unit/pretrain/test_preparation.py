"""Making and reusing a vocabulary and a store."""

import dataclasses
import json
import re

import pytest

from pretrain.config import PretrainConfig
from pretrain.tools.preparation import make_store, make_tokenizer
from xlpre.config.cli import ExplicitKeys
from xlpre.data.window_layout import DataConfig
from xlpre.text import corpus, special_tokens
from xlpre.text.corpus import TextConfig
from xlpre.text.tokenizer import TokenizerConfig


@pytest.fixture
def config(text_file, tokenizer, tmp_path):
    tokenizer.save(tmp_path / "words.model")
    return PretrainConfig(
        text=TextConfig(source=str(text_file), val_fraction=0.1),
        tokenizer=TokenizerConfig(path=str(tmp_path / "words.model"), vocab_size=300),
        data=DataConfig(store_dir=str(tmp_path / "store")),
    )


def change(config, group, **settings):
    return dataclasses.replace(config, **{group: dataclasses.replace(getattr(config, group), **settings)})


def test_line_type_and_preprocessing_reach_the_store(config):
    config = change(change(config, "text", line_type="sentences"), "tokenizer", preprocess="cased")
    assert make_tokenizer(config).preprocess == "cased"
    store = make_store(config)
    assert special_tokens.EOP not in store.train.tokens
    assert store.tokenizer().preprocess == "cased" and store.meta["source"]["line_type"] == "sentences"


def test_a_vocabulary_is_reused_for_its_text_only_and_encodes_any(config, text_file, tmp_path):
    config = change(config, "tokenizer", path=str(tmp_path / "trained.model"))
    trained = make_tokenizer(config)
    assert make_tokenizer(config).sha256 == trained.sha256
    other = tmp_path / "other.txt"
    other.write_text(text_file.read_text() + "\n\none more")
    config = change(config, "text", source=str(other))
    with pytest.raises(ValueError, match=r"trained.model is invalid: .* delete \S*trained.model.json"):
        make_tokenizer(config)
    assert make_store(config).tokenizer().sha256 == trained.sha256
    (tmp_path / "trained.model.json").unlink()
    assert make_tokenizer(config).sha256 == trained.sha256


def test_an_upgrade_of_sentencepiece_is_reported_and_nothing_is_made_again(config, tmp_path, capsys):
    config = change(config, "tokenizer", path=str(tmp_path / "trained.model"))
    vocabulary, store = make_tokenizer(config), make_store(config)
    assert "note:" not in capsys.readouterr().out
    for file in (tmp_path / "trained.model.json", store.path / "meta.json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), "sentencepiece": "0.1.9"}))
    assert make_tokenizer(config).sha256 == vocabulary.sha256 and make_store(config).fingerprint == store.fingerprint
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert len(notes) == 2 and all("with sentencepiece 0.1.9; the installed" in note for note in notes)


def test_a_vocabulary_that_lacks_characters_of_the_text_is_reported(config, text_file, tmp_path, capsys):
    other = tmp_path / "other.txt"
    other.write_text(text_file.read_text() + "\n\nБа бе Ди до 中文字" * 2000)
    make_store(change(config, "text", source=str(other)))
    assert re.search(
        r"warning: \d\d% of the characters .* have no piece in tokenizer.path=.*words.model", capsys.readouterr().out
    )


def test_a_path_that_is_not_a_store_is_refused_and_not_deleted(config, text_file):
    for path in (text_file, text_file.parent):
        with pytest.raises(ValueError, match=r"the folder exists and is not a token store"):
            make_store(change(config, "data", store_dir=str(path)))


def test_a_text_with_too_few_documents_leaves_no_files(config, tmp_path):
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"text.val_fraction=1e-09 is invalid: it leaves no document"):
        make_store(change(config, "text", val_fraction=1e-9))
    assert sorted(tmp_path.iterdir()) == before


def test_an_interrupted_preparation_names_the_folder_of_its_progress(config, text_file, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "SMALL_UNIT_BYTES", 0)  # one unit per file
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_bytes(text_file.read_bytes())
    (tmp_path / "texts" / "b.txt").write_bytes(b"Ba be.\n\xff")
    with pytest.raises(ValueError, match=r"b.txt, line 2.* is kept in .*/\.store\.unfinished"):
        make_store(change(config, "text", source=str(tmp_path / "texts" / "*.txt"), num_processes=1))


@pytest.mark.parametrize(
    ("group", "settings", "message"),
    [
        ("text", {"line_type": "sentences"}, r"text\.line_type=paragraphs"),
        ("tokenizer", {"preprocess": "cased"}, r"tokenizer\.preprocess=cased is invalid: .*preprocess=none"),
    ],
)
def test_a_store_with_other_settings_is_refused_by_the_name_of_the_setting(config, group, settings, message):
    make_store(config)
    with pytest.raises(ValueError, match=message):
        make_store(change(config, group, **settings))


@pytest.mark.parametrize(("val_fraction", "is_reported"), [(0.1, False), (0.005, True)])
def test_a_validation_text_of_a_few_documents_is_reported(config, capsys, val_fraction, is_reported):
    store = make_store(change(config, "text", val_fraction=val_fraction))
    n_documents = store.meta["val_n_documents"]
    assert (n_documents < 16) == is_reported
    warning = f"warning: the validation text has {n_documents} document"
    assert (warning in capsys.readouterr().out) == is_reported


def test_another_vocabulary_size_on_the_command_line_is_reported_and_one_of_a_preset_is_not(config, capsys):
    config, key = change(config, "tokenizer", vocab_size=500), frozenset({"tokenizer.vocab_size"})
    for keys, reported in ((ExplicitKeys(args=key), True), (ExplicitKeys(file=key), False)):
        make_store(config, keys)
        assert (
            "tokenizer.vocab_size=500 is ignored: the existing vocabulary has 300" in capsys.readouterr().out
        ) == reported
