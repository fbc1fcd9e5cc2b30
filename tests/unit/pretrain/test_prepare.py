import dataclasses

import pytest

from pretrain.config import PretrainConfig
from pretrain.prepare import make_store
from pretrain.train_tokenizer import make_tokenizer
from xlpre.data.layout import DataConfig
from xlpre.text import symbols
from xlpre.text.corpus import TextConfig
from xlpre.text.tokenizer import TokenizerConfig


@pytest.fixture
def config(text_file, tokenizer, tmp_path):
    tokenizer.save(tmp_path / "words.model")
    return PretrainConfig(
        text=TextConfig(source=str(text_file), held_out=0.1),
        tokenizer=TokenizerConfig(path=str(tmp_path / "words.model"), vocab_size=300),
        data=DataConfig(store=str(tmp_path / "store")),
    )


def change(config, group, **settings):
    return dataclasses.replace(config, **{group: dataclasses.replace(getattr(config, group), **settings)})


def test_what_a_line_is_and_how_text_is_preprocessed_reach_the_store(config):
    config = change(change(config, "text", lines="sentences"), "tokenizer", preprocess="cased")
    assert make_tokenizer(config).preprocess == "cased"
    store = make_store(config)
    assert symbols.EOP not in store.train.tokens
    assert store.tokenizer().preprocess == "cased" and store.meta["source"]["lines"] == "sentences"


@pytest.mark.parametrize(
    ("group", "settings", "message"),
    [
        ("text", {"lines": "sentences"}, r"text\.lines=paragraphs, not sentences"),
        ("tokenizer", {"preprocess": "cased"}, r"tokenizer\.preprocess=none, not cased"),
    ],
)
def test_a_store_made_otherwise_is_refused_by_the_settings_name(config, group, settings, message):
    make_store(config)
    with pytest.raises(ValueError, match=message):
        make_store(change(config, group, **settings))
