"""Assembly of a store: no document is in both splits, and each document occurs as often as its weight says."""

import subprocess
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import REPOSITORY, examples, make_documents
from xlpre.data import store_builder
from xlpre.data.shards import has_shards
from xlpre.data.store_builder import build_store, write_store
from xlpre.text.corpus import TextConfig
from xlpre.text.sentencepiece_tokenizer import SentencePieceTokenizer
from xlpre.text.table_tokenizer import ByteTokenizer
from xlpre.text.tokenizer import TokenizerConfig
from xlpre.text.tokenizer_training import train_tokenizer


def write_text(folder):
    """Write a.txt with 40 documents. Return the file, and settings that read all .txt files of the folder."""
    file = folder / "a.txt"
    file.write_text("\n\n".join("\n".join(document) for document in make_documents(40)))
    return file, TextConfig(source=f"{folder}/*.txt", val_fraction=0.3, num_processes=1)


def after_encoding(action):
    """Return a function that encodes all text, and then calls `action`."""
    encode_all = store_builder.encode_all
    return lambda *args: (encode_all(*args), action())


def texts(split, tokenizer):
    return [tokenizer.decode(ids) for ids in np.split(np.asarray(split.tokens), split.document_ends[:-1])]


@settings(max_examples=examples(15))
@given(copies=st.lists(st.integers(1, 4), min_size=40, max_size=40), deduplicate=st.booleans(), seed=st.integers(0, 9))
def test_no_validation_document_is_in_the_training_split(tmp_path_factory, tokenizer, copies, deduplicate, seed):
    folder = tmp_path_factory.mktemp("text")
    documents = [document for document, n in zip(make_documents(40, seed), copies, strict=True) for _ in range(n)]
    for name, half in (("a", documents[::2]), ("b", documents[1::2])):
        (folder / f"{name}.txt").write_text("\n\n".join("\n".join(document) for document in half))
    config = TextConfig(source=f"{folder}/*.txt", val_fraction=0.3, deduplicate=deduplicate, num_processes=1)
    store = build_store(folder / "store", config, tokenizer)
    train_texts, val_texts = texts(store.train, tokenizer), texts(store.validation, tokenizer)
    assert not set(train_texts) & set(val_texts)
    assert len(train_texts) + len(val_texts) == (40 if deduplicate else len(documents))


def test_encoded_text_survives_if_the_files_disappear_before_the_store_is_complete(tmp_path, tokenizer, monkeypatch):
    text, config = write_text(tmp_path)
    monkeypatch.setattr(store_builder, "encode_all", after_encoding(lambda: text.rename(tmp_path / "moved")))
    with pytest.raises(ValueError, match="no file"):
        build_store(tmp_path / "store", config, tokenizer)
    assert has_shards(tmp_path / ".store.unfinished")


def test_text_that_changes_while_it_is_read_is_refused(tmp_path, tokenizer, monkeypatch):
    _, config = write_text(tmp_path)
    with monkeypatch.context() as patch:
        add_file = after_encoding(lambda: (tmp_path / "b.txt").write_text("Ba di."))
        patch.setattr(store_builder, "encode_all", add_file)
        with pytest.raises(ValueError, match=r"b\.txt was added, removed or changed while"):
            build_store(tmp_path / "store", config, tokenizer)
    assert build_store(tmp_path / "store", config, tokenizer).meta["files"].keys() == {
        f"{tmp_path}/{name}" for name in ("a.txt", "b.txt")
    }


def test_a_store_is_written_where_a_link_leads(tmp_path, tokenizer):
    _, config = write_text(tmp_path)
    (tmp_path / "large_disk").mkdir()
    (tmp_path / "store").symlink_to(tmp_path / "large_disk" / "store")
    build_store(tmp_path / "store", config, tokenizer)
    assert (tmp_path / "store").is_symlink() and (tmp_path / "large_disk" / "store" / "meta.json").exists()


def test_an_error_ends_the_preparation_of_many_files(tmp_path):
    """Their tasks exceed the buffer of a pipe, which nobody reads after the error."""
    (tmp_path / "a").mkdir()
    for i in range(1200):
        (tmp_path / "a" / f"{i:04}.txt").write_bytes(b"\xff\n" if i == 0 else b"Ba di.\n")
    ByteTokenizer().save(tmp_path / "tokenizers" / "many.model")
    args = ("name=many", "tokenizer.kind=bytes", "text.source=a/*.txt", "text.num_processes=2")
    result = subprocess.run(
        [sys.executable, str(REPOSITORY / "pretrain/prepare.py"), *args],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 2 and "0000.txt, line 1: not UTF-8" in result.stderr


def test_a_mixture_repeats_each_source_as_often_as_its_weight(tmp_path, tokenizer):
    documents = make_documents(1200)
    sources = (documents[:300], documents[300:600], documents[600:])
    for name, source in zip("abc", sources, strict=True):
        (tmp_path / f"{name}.txt").write_text("\n\n".join("\n".join(document) for document in source))
    mixture = {f"{tmp_path}/a.txt": 2.5, f"{tmp_path}/b.txt": 1.0, f"{tmp_path}/c.txt": 0.25}
    store = build_store(tmp_path / "store", TextConfig(mixture=mixture, val_fraction=0.1, num_processes=2), tokenizer)
    train_texts, val_texts = texts(store.train, tokenizer), texts(store.validation, tokenizer)
    count_of = Counter(train_texts)
    counts = [[count_of[" ".join(document)] for document in source] for source in sources]
    mean = [
        sum(source) / sum(1 for n in source if n or weight < 1)
        for source, weight in zip(counts, mixture.values(), strict=True)
    ]
    assert set(counts[0]) <= {0, 2, 3} and abs(mean[0] - 2.5) < 0.15
    assert set(counts[1]) <= {0, 1} and mean[1] == 1
    assert abs(sum(counts[2]) / 600 - 0.25 * 0.9) < 0.06
    assert len(val_texts) == len(set(val_texts)) and not set(train_texts) & set(val_texts)


def test_a_weight_below_one_drops_no_document_of_another_source(tmp_path, tokenizer):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("\n\n".join("\n".join(document) for document in make_documents(200)))

    def splits_of(**weights):
        mixture = {f"{tmp_path}/{name}.txt": weight for name, weight in weights.items()}
        config = TextConfig(mixture=mixture, deduplicate=True, val_fraction=0.2, num_processes=1)
        store = build_store(tmp_path / "_".join(map(str, weights.values())), config, tokenizer)
        return sorted(texts(store.train, tokenizer)), sorted(texts(store.validation, tokenizer))

    assert splits_of(a=0.5, b=1.0) == splits_of(b=1.0) == splits_of(a=0.25, b=1.0)


def test_unicode_of_every_plane_survives(tmp_path):
    characters = [chr(plane * 0x10000 + offset) for plane in (1, 2, 3, 14, 15, 16) for offset in (0x100, 0x101)]
    characters += list("aßжעبअ中한あ😀")
    words = [a + b for a in characters for b in characters[::3]]
    documents = [[" ".join(words[i::7])] for i in range(7)] * 3
    tokenizer = train_tokenizer(documents, TokenizerConfig(vocab_size=60, character_coverage=1.0))
    store = write_store(tmp_path / "store", documents, tokenizer, 0.3, {}, {})
    assert set(texts(store.train, tokenizer)) | set(texts(store.validation, tokenizer)) == {d[0] for d in documents}


def test_more_than_65536_pieces_are_32_bit_ids(tmp_path, tokenizer, documents):
    class LargeTokenizer(SentencePieceTokenizer):
        pieces = [*tokenizer.pieces, *(f"▁{i}" for i in range(70_000))]

        def __len__(self):
            return len(self.pieces)

    store = write_store(tmp_path / "store", documents[:200], LargeTokenizer(tokenizer.content), 0.1, {}, {})
    assert store.train.tokens.dtype == np.uint32


def test_no_text_of_a_validation_source_is_in_the_training_split_without_duplicates(tmp_path, tokenizer):
    documents = make_documents(60)
    for name, part in (("train", documents[:50]), ("val", documents[40:])):
        (tmp_path / f"{name}.txt").write_text("\n\n".join("\n".join(document) for document in part))
    settings = {"source": f"{tmp_path}/train.txt", "val_source": f"{tmp_path}/val.txt", "num_processes": 1}
    store = build_store(tmp_path / "store", TextConfig(**settings, deduplicate=True), tokenizer)
    train_texts, val_texts = texts(store.train, tokenizer), texts(store.validation, tokenizer)
    assert (len(train_texts), len(val_texts)) == (40, 20) and not set(train_texts) & set(val_texts)


def test_validation_text_is_read_first_and_can_be_replaced(tmp_path, tokenizer, monkeypatch):
    _, config = write_text(tmp_path)
    (tmp_path / "val").mkdir()
    empty, good = tmp_path / "val" / "empty.txt", tmp_path / "val" / "good.txt"
    empty.write_text("\n")
    good.write_text("Ba di bu.")
    encoded, encode = [], store_builder.encoded_documents.encode
    monkeypatch.setattr(
        store_builder.encoded_documents, "encode", lambda batch, *rest: encoded.extend(batch) or encode(batch, *rest)
    )
    with pytest.raises(ValueError, match=r"text.val_source=\S+empty.txt is invalid: it holds no text"):
        build_store(tmp_path / "store", replace(config, val_source=str(empty)), tokenizer)
    assert not encoded
    with monkeypatch.context() as patch:
        patch.setattr(store_builder, "_assemble", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            build_store(tmp_path / "store", replace(config, val_source=str(good)), tokenizer)
    n_encoded = len(encoded)
    other = tmp_path / "val" / "other.txt"
    other.write_text("Bu di ba.")
    build_store(tmp_path / "store", replace(config, val_source=str(other)), tokenizer)
    assert encoded[n_encoded:] == [["Bu di ba."]]


def test_text_that_changes_without_changing_its_size_is_refused(tmp_path, tokenizer, monkeypatch):
    file, config = write_text(tmp_path)
    content = file.read_text()
    monkeypatch.setattr(store_builder, "encode_all", after_encoding(lambda: file.write_text(content.swapcase())))
    with pytest.raises(ValueError, match=r"a\.txt was added, removed or changed while"):
        build_store(tmp_path / "store", config, tokenizer)
