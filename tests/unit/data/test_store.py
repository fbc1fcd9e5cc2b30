import json
import re
import shutil

import numpy as np
import pytest

from xlpre.data.store import FORMAT, TokenStore
from xlpre.data.store_builder import write_store
from xlpre.text import special_tokens
from xlpre.text.tokenizer import Tokenizer, TokenizerConfig
from xlpre.text.tokenizer_training import train_tokenizer


def test_training_and_held_out_documents_together_are_the_corpus(store, documents, tokenizer):
    def texts(part):
        ids = np.asarray(part.tokens)
        ends = np.flatnonzero(ids == 7) + 1
        return {tokenizer.decode(one) for one in np.split(ids, ends[:-1])}

    train_texts, held_out = texts(store.train), texts(store.validation)
    assert not train_texts & held_out
    assert train_texts | held_out == {tokenizer.decode(tokenizer.encode_document(d)[0]) for d in documents}
    assert 0.02 < len(held_out) / (len(held_out) + len(train_texts)) < 0.2


def test_sentence_ends_rise_to_the_end_of_the_part(store):
    for part in (store.train, store.validation):
        assert (np.diff(part.sentence_ends) > 0).all()
        assert part.sentence_ends[-1] == part.document_ends[-1] == len(part)
        assert (part.tokens[part.document_ends - 1] == special_tokens.EOD).all()
        assert np.isin(part.document_ends, part.sentence_ends).all()


def test_unigram_counts_are_those_of_the_training_part(store):
    assert (store.unigram == np.bincount(store.train.tokens, minlength=store.vocab_size)).all()


def test_the_same_text_gives_the_same_bytes(store, documents, tokenizer, tmp_path):
    again = write_store(tmp_path / "again", documents, tokenizer, 0.1, {}, {})
    assert again.fingerprint == store.fingerprint
    assert (again.path / "train/tokens.bin").read_bytes() == (store.path / "train/tokens.bin").read_bytes()


def test_a_store_cut_by_one_byte_names_the_file(store, tmp_path):
    broken = shutil.copytree(store.path, tmp_path / "broken")
    path = broken / "val" / "tokens.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"val/tokens.bin: \d+ bytes where"):
        TokenStore(broken)


def test_a_source_that_dies_leaves_nothing_behind(tmp_path, documents, tokenizer):
    def dying():
        yield from documents[:100]
        raise ValueError("the disk is gone")

    with pytest.raises(ValueError, match="the disk is gone"):
        write_store(tmp_path / "store", dying(), tokenizer, 0.1, {}, {})
    assert list(tmp_path.iterdir()) == []


def test_a_store_of_another_vocabulary_names_both_hashes(store, documents):
    other = train_tokenizer(documents, TokenizerConfig(vocab_size=250))
    with pytest.raises(ValueError, match=f"{store.meta['vocabulary_sha256'][:12]}.*{other.sha256[:12]}"):
        store.check_vocabulary(other, "other.model")


def test_a_store_keeps_how_its_text_was_preprocessed(documents, tokenizer, tmp_path):
    uncased = Tokenizer(tokenizer.model, preprocess="uncased")
    made = write_store(tmp_path / "store", documents[:100], uncased, 0.1, {}, {})
    assert TokenStore(made.path).tokenizer().preprocess == "uncased"
    made.check_vocabulary(uncased, "same.model")
    with pytest.raises(
        ValueError, match="made with tokenizer.preprocess=uncased, not none; set tokenizer.preprocess=uncased"
    ):
        made.check_vocabulary(tokenizer, "same.model")


@pytest.mark.parametrize("name", ["unigram.bin", "vocabulary.model", "train/tokens.bin", "val/documents.bin"])
def test_a_changed_byte_names_its_file(store, tmp_path, name):
    broken = shutil.copytree(store.path, tmp_path / "broken")
    content = bytearray((broken / name).read_bytes())
    content[len(content) // 2] ^= 4
    (broken / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name}: does not match its checksum"):
        TokenStore(broken)


def test_a_store_of_another_format_is_refused(store, tmp_path):
    older = shutil.copytree(store.path, tmp_path / "older")
    meta = json.loads((older / "meta.json").read_text())
    (older / "meta.json").write_text(json.dumps({**meta, "format": 1}))
    with pytest.raises(ValueError, match=f"format 1 is not {FORMAT}; the store is of another version"):
        TokenStore(older)


def test_what_is_no_store_is_not_called_damaged(store, tmp_path):
    with pytest.raises(ValueError, match="no store there; make it with pretrain/prepare.py"):
        TokenStore(tmp_path / "none")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("Ba be bi.")
    (tmp_path / "texts" / "meta.json").write_text('{"format": 2}')  # of something else
    for path in (tmp_path / "texts", tmp_path / "texts" / "a.txt"):
        with pytest.raises(ValueError, match=rf"{path} is not a token store; data.store_dir names what"):
            TokenStore(path)
    shutil.copytree(store.path, tmp_path / "all" / "mine")
    with pytest.raises(ValueError, match=r"is not a token store; did you mean .*all/mine\?"):
        TokenStore(tmp_path / "all")


@pytest.mark.parametrize("content", [None, "{", "3"])
def test_a_store_whose_meta_json_is_gone_or_cut_is_damaged(store, tmp_path, content):
    broken = shutil.copytree(store.path, tmp_path / "broken")
    (broken / "meta.json").unlink()
    if content:
        (broken / "meta.json").write_text(content)
    with pytest.raises(ValueError, match=r"meta.json: cannot be read .*the store is damaged"):
        TokenStore(broken)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[(key, value) for key in ("source", "files", "bytes", "sha256") for value in (None, "x", [])],
        *[("bytes", {}), ("sha256", {}), ("files", {"a.txt": [1]}), ("vocab_size", 1e30), ("train_n_tokens", -1)],
        *[("val_n_sentences", 1), ("dtype", "int64"), ("preprocess", "uncased"), ("fingerprint", "x")],
    ],
)
def test_a_meta_json_that_does_not_go_with_itself_is_damaged(store, tmp_path, key, value):
    broken = shutil.copytree(store.path, tmp_path / "broken")
    meta = json.loads((broken / "meta.json").read_text())
    (broken / "meta.json").write_text(json.dumps({**meta, key: value}))
    with pytest.raises(ValueError, match=r"meta.json: .* is not as it was written; the store is damaged"):
        TokenStore(broken)


def test_a_store_of_sentences_has_one_a_line(documents, tokenizer, tmp_path):
    made = write_store(tmp_path / "store", documents, tokenizer, 0.1, {}, {}, line_type="sentences")
    n_lines = sum(map(len, documents))
    assert sum(len(part.sentence_ends) for part in (made.train, made.validation)) == n_lines
    assert special_tokens.EOP not in made.train.tokens


def test_too_few_documents_to_hold_any_out_are_refused(tmp_path, tokenizer):
    with pytest.raises(ValueError, match=r"text.val_fraction=0.001 left no document in the val part"):
        write_store(tmp_path / "store", [["Ba be bi."]], tokenizer, 0.001, {}, {})


def test_a_text_of_few_documents_is_told_the_share_that_holds_one_out(tmp_path, tokenizer):
    few = [[f"Ba be bi {vowel}."] for vowel in "aeiou"]
    with pytest.raises(ValueError, match=r"of 5 documents; set text.val_fraction=0\.\d+, the least that") as refused:
        write_store(tmp_path / "store", few, tokenizer, 1e-6, {}, {})
    least = float(re.search(r"set text.val_fraction=([\d.]+)", str(refused.value))[1])
    assert write_store(tmp_path / "store", few, tokenizer, least, {}, {}).meta["val_n_documents"] == 1
    with pytest.raises(ValueError, match="of 1 documents; give more documents: an empty line ends one"):
        write_store(tmp_path / "one", few[:1], tokenizer, 0.4, {}, {})


def test_ids_are_16_bit_and_meta_counts_them(store):
    meta = json.loads((store.path / "meta.json").read_text())
    assert store.train.tokens.dtype == np.uint16
    assert meta["train_n_tokens"] == len(store.train)
