import json
import re
import shutil

import numpy as np
import pytest

from xlpre.data.sparse_index import sample_pages
from xlpre.data.store import FORMAT, INDEXES, TokenStore
from xlpre.data.store_builder import write_store
from xlpre.text import special_tokens
from xlpre.text.sentencepiece_tokenizer import SENTENCEPIECE_VERSION, SentencePieceTokenizer
from xlpre.text.tokenizer import TokenizerConfig
from xlpre.text.tokenizer_training import train_tokenizer


def test_the_splits_together_are_the_corpus(store, documents, tokenizer):
    def texts(split):
        ids = np.asarray(split.tokens)
        ends = np.flatnonzero(ids == special_tokens.EOD) + 1
        return {tokenizer.decode(document) for document in np.split(ids, ends[:-1])}

    train_texts, val_texts = texts(store.train), texts(store.validation)
    assert not train_texts & val_texts
    assert train_texts | val_texts == {tokenizer.decode(tokenizer.encode_document(d)[0]) for d in documents}
    assert 0.02 < len(val_texts) / (len(val_texts) + len(train_texts)) < 0.2


def test_sentence_ends_increase_to_the_end_of_the_split(store):
    for split in (store.train, store.validation):
        assert (np.diff(split.sentence_ends) > 0).all()
        assert split.sentence_ends[-1] == split.document_ends[-1] == len(split)
        assert (split.tokens[split.document_ends - 1] == special_tokens.EOD).all()
        assert np.isin(split.document_ends, split.sentence_ends).all()


def test_unigram_counts_are_those_of_the_training_split(store):
    assert (store.unigram == np.bincount(store.train.tokens, minlength=store.vocab_size)).all()


def test_the_same_text_gives_the_same_bytes(store, documents, tokenizer, tmp_path):
    again = write_store(tmp_path / "again", documents, tokenizer, 0.1, {}, {})
    assert again.fingerprint == store.fingerprint
    assert (again.path / "train/tokens.bin").read_bytes() == (store.path / "train/tokens.bin").read_bytes()


def test_a_truncated_file_is_named(store, tmp_path):
    broken = shutil.copytree(store.path, tmp_path / "broken")
    path = broken / "val" / "tokens.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"val/tokens.bin has \d+ bytes, but it had \d+ bytes when the store"):
        TokenStore(broken)


def test_a_failing_source_leaves_nothing_behind(tmp_path, documents, tokenizer):
    def failing():
        yield from documents[:100]
        raise ValueError("the disk is gone")

    with pytest.raises(ValueError, match="the disk is gone"):
        write_store(tmp_path / "store", failing(), tokenizer, 0.1, {}, {})
    assert list(tmp_path.iterdir()) == []


def test_another_vocabulary_is_refused_with_both_hashes(store, documents):
    other = train_tokenizer(documents, TokenizerConfig(vocab_size=250))
    with pytest.raises(ValueError, match=f"{store.meta['vocabulary_sha256'][:12]}.*{other.sha256[:12]}"):
        store.check_vocabulary(other, "other.model")


def test_a_store_records_the_preprocessing_of_its_text(documents, tokenizer, tmp_path):
    uncased = SentencePieceTokenizer(tokenizer.content, preprocess="uncased")
    store = write_store(tmp_path / "store", documents[:100], uncased, 0.1, {}, {})
    assert TokenStore(store.path).tokenizer().preprocess == "uncased"
    store.check_vocabulary(uncased, "same.model")
    with pytest.raises(ValueError, match="tokenizer.preprocess=none is invalid: .* Set tokenizer.preprocess=uncased"):
        store.check_vocabulary(tokenizer, "same.model")


@pytest.mark.parametrize(
    "name", ["unigram.bin", "vocabulary.model", "train/tokens.bin", "val/documents.bin", "train/sentences_index.bin"]
)
def test_a_file_with_a_changed_byte_is_named(store, tmp_path, name):
    broken = shutil.copytree(store.path, tmp_path / "broken")
    content = bytearray((broken / name).read_bytes())
    content[len(content) // 2] ^= 4
    (broken / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name} does not match its checksum"):
        TokenStore(broken)


def test_the_index_files_sample_every_page_and_a_store_of_format_5_gets_along_without_them(store, tmp_path):
    assert len(store.train.sentence_samples) > 0
    for split in (store.train, store.validation):
        assert np.array_equal(split.sentence_samples, sample_pages(split.sentence_ends))
        assert np.array_equal(split.document_samples, sample_pages(split.document_ends))
    older = shutil.copytree(store.path, tmp_path / "older")
    meta = {**store.meta, "format": 5}
    for name in INDEXES:
        (older / name).unlink()
        for key in ("bytes", "sha256"):
            meta[key] = {file: value for file, value in meta[key].items() if file != name}
    (older / "meta.json").write_text(json.dumps(meta))
    older_store = TokenStore(older)
    assert older_store.fingerprint == store.fingerprint
    for position in range(0, len(store.train), 7):
        search = [split.sentence_index.searchsorted(position) for split in (store.train, older_store.train)]
        assert search[0] == search[1]


def test_a_store_of_an_older_format_is_refused(store, tmp_path):
    older = shutil.copytree(store.path, tmp_path / "older")
    meta = json.loads((older / "meta.json").read_text())
    (older / "meta.json").write_text(json.dumps({**meta, "format": 3}))
    with pytest.raises(
        ValueError, match=rf"format is 3, .* reads formats 5 and {FORMAT}\. Prepare it again with pretrain/prepare.py"
    ):
        TokenStore(older)


def test_a_store_names_the_version_of_sentencepiece_that_encoded_it(store, tmp_path):
    assert (store.meta["sentencepiece"], store.upgrade_note) == (SENTENCEPIECE_VERSION, "")
    older = shutil.copytree(store.path, tmp_path / "older")
    (older / "meta.json").write_text(json.dumps({**store.meta, "sentencepiece": "0.1.9"}))
    older_store = TokenStore(older)
    assert older_store.fingerprint == store.fingerprint  # the same tokens: runs on it resume
    assert re.search(
        rf"encoded with sentencepiece 0.1.9; the installed {SENTENCEPIECE_VERSION} ", older_store.upgrade_note
    )


def test_a_path_without_a_store_is_refused_with_a_hint(store, tmp_path):
    with pytest.raises(ValueError, match="there is no token store. Run pretrain/prepare.py"):
        TokenStore(tmp_path / "none")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("Ba be bi.")
    (tmp_path / "texts" / "meta.json").write_text('{"format": 2}')  # of something else
    for path in (tmp_path / "texts", tmp_path / "texts" / "a.txt"):
        with pytest.raises(
            ValueError, match=rf"data.store_dir={path} is invalid: it is not a token store. Name a folder"
        ):
            TokenStore(path)
    shutil.copytree(store.path, tmp_path / "all" / "mine")
    with pytest.raises(ValueError, match=r"it is not a token store. Did you mean .*all/mine\?"):
        TokenStore(tmp_path / "all")


@pytest.mark.parametrize("content", [None, "{", "3"])
def test_a_store_without_a_valid_meta_json_is_damaged(store, tmp_path, content):
    broken = shutil.copytree(store.path, tmp_path / "broken")
    (broken / "meta.json").unlink()
    if content:
        (broken / "meta.json").write_text(content)
    with pytest.raises(ValueError, match=r"meta.json cannot be read .* The store is damaged"):
        TokenStore(broken)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[(key, value) for key in ("source", "files", "bytes", "sha256") for value in (None, "x", [])],
        *[("bytes", {}), ("sha256", {}), ("files", {"a.txt": [1]}), ("vocab_size", 1e30), ("train_n_tokens", -1)],
        *[
            ("sentencepiece", None),
            ("val_n_sentences", 1),
            ("dtype", "int64"),
            ("preprocess", "uncased"),
            ("fingerprint", "x"),
        ],
    ],
)
def test_an_inconsistent_meta_json_is_refused(store, tmp_path, key, value):
    broken = shutil.copytree(store.path, tmp_path / "broken")
    meta = json.loads((broken / "meta.json").read_text())
    (broken / "meta.json").write_text(json.dumps({**meta, key: value}))
    with pytest.raises(ValueError, match=r"meta.json is invalid: \w+ was changed. The store is damaged"):
        TokenStore(broken)


def test_with_line_type_sentences_each_line_is_a_sentence(documents, tokenizer, tmp_path):
    store = write_store(tmp_path / "store", documents, tokenizer, 0.1, {}, {}, line_type="sentences")
    n_lines = sum(map(len, documents))
    assert sum(len(split.sentence_ends) for split in (store.train, store.validation)) == n_lines
    assert special_tokens.EOP not in store.train.tokens


def test_too_few_documents_for_a_validation_split_are_refused(tmp_path, tokenizer):
    with pytest.raises(ValueError, match=r"text.val_fraction=0.001 is invalid: it leaves no document"):
        write_store(tmp_path / "store", [["Ba be bi."]], tokenizer, 0.001, {}, {})


def test_an_empty_validation_split_is_refused_with_the_smallest_fraction(tmp_path, tokenizer):
    few = [[f"Ba be bi {vowel}."] for vowel in "aeiou"]
    with pytest.raises(ValueError, match=r"no document of 5 .* Set text.val_fraction=0\.\d+, the smallest") as refusal:
        write_store(tmp_path / "store", few, tokenizer, 1e-6, {}, {})
    smallest = float(re.search(r"Set text.val_fraction=([\d.]+)", str(refusal.value))[1])
    assert write_store(tmp_path / "store", few, tokenizer, smallest, {}, {}).meta["val_n_documents"] == 1
    with pytest.raises(ValueError, match="no document of 1 .* Provide more documents"):
        write_store(tmp_path / "one", few[:1], tokenizer, 0.4, {}, {})


def test_ids_of_a_small_vocabulary_are_16_bit(store):
    meta = json.loads((store.path / "meta.json").read_text())
    assert store.train.tokens.dtype == np.uint16
    assert meta["train_n_tokens"] == len(store.train)
