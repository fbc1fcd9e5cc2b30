import dataclasses
import re

import pytest

from pretrain.config import PretrainConfig
from pretrain.tools.preparation import make_store, make_tokenizer
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


def test_what_a_line_is_and_how_text_is_preprocessed_reach_the_store(config):
    config = change(change(config, "text", line_type="sentences"), "tokenizer", preprocess="cased")
    assert make_tokenizer(config).preprocess == "cased"
    store = make_store(config)
    assert special_tokens.EOP not in store.train.tokens
    assert store.tokenizer().preprocess == "cased" and store.meta["source"]["lines"] == "sentences"


def test_a_vocabulary_is_learned_once_for_a_text_and_not_taken_for_another_but_prepares_any(
    config, text_file, tmp_path
):
    config = change(config, "tokenizer", path=str(tmp_path / "learned.model"))
    learned = make_tokenizer(config)
    assert make_tokenizer(config).sha256 == learned.sha256
    other = tmp_path / "other.txt"
    other.write_text(text_file.read_text() + "\n\none more")
    config = change(config, "text", source=str(other))
    with pytest.raises(
        ValueError, match=r"learned.model was learned from another text .* delete \S*learned.model.json to take it"
    ):
        make_tokenizer(config)
    assert make_store(config).tokenizer().sha256 == learned.sha256
    (tmp_path / "learned.model.json").unlink()
    assert make_tokenizer(config).sha256 == learned.sha256


def test_a_vocabulary_of_another_text_is_told(config, text_file, capsys):
    text_file.write_text(text_file.read_text() + "\n\nБа бе Ди до 中文字" * 2000)
    make_store(config)
    assert re.search(
        r"warning: \d\d% of the characters .* have no piece in tokenizer.path=.*words.model", capsys.readouterr().out
    )


def test_a_folder_of_something_else_is_not_to_be_deleted(config, text_file):
    for path in (text_file, text_file.parent):
        with pytest.raises(ValueError, match=r"is there already and is no token store; choose another data.store_dir"):
            make_store(change(config, "data", store=str(path)))


def test_a_text_with_too_few_documents_leaves_nothing(config, tmp_path):
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"text.val_fraction=1e-09 left no document in the val part"):
        make_store(change(config, "text", val_fraction=1e-9))
    assert sorted(tmp_path.iterdir()) == before


def test_what_is_kept_of_a_text_that_cannot_be_read_is_said(config, text_file, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "SMALL_UNIT_BYTES", 0)  # each file by itself
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_bytes(text_file.read_bytes())
    (tmp_path / "texts" / "b.txt").write_bytes(b"Ba be.\n\xff")
    with pytest.raises(
        ValueError, match=r"b.txt, line 2.* \(what is encoded is kept in .*/\.store\.unfinished; the same command"
    ):
        make_store(change(config, "text", source=str(tmp_path / "texts" / "*.txt"), workers=1))


@pytest.mark.parametrize(
    ("group", "settings", "message"),
    [
        ("text", {"line_type": "sentences"}, r"text\.lines=paragraphs, not sentences"),
        ("tokenizer", {"preprocess": "cased"}, r"tokenizer\.preprocess=none, not cased"),
    ],
)
def test_a_store_made_otherwise_is_refused_by_the_settings_name(config, group, settings, message):
    make_store(config)
    with pytest.raises(ValueError, match=message):
        make_store(change(config, group, **settings))
