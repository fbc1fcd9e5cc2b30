import gzip
import re

import hypothesis.strategies as st
import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings

from pretrain.config import PretrainConfig
from tests.conftest import examples, refused
from xlpre.data.store import TokenStore
from xlpre.data.store_builder import build_store
from xlpre.text import readers
from xlpre.text.corpus import TextConfig
from xlpre.text.readers import ByteCounter, read_parts
from xlpre.text.table_tokenizer import ByteTokenizer, WordTokenizer
from xlpre.text.tokenizer import TokenizerConfig
from xlpre.text.tokenizer_training import train_tokenizer

TEXT = "<page>\n  naïve  «x»\r\n\n\n\tend 中\x0c\x85 of page  \n".encode() * 7 + b"\xff\xe4no newline"


def verbatim(source, val_source, **changes):
    return TextConfig(source=str(source), val_source=str(val_source), line_type="verbatim", num_processes=1, **changes)


def stored_bytes(split):
    return bytes((np.asarray(split.tokens, np.int64) - 9).astype(np.uint8))


@settings(max_examples=examples(120))
@given(st.lists(st.sampled_from([b"a", "é".encode(), "中".encode(), b" ", b"\n", b"\xff"])), st.data())
def test_the_parts_of_a_range_are_its_bytes(tmp_path_factory, tokens, data):
    content = b"".join(tokens)
    begin = data.draw(st.integers(0, len(content)))
    end = data.draw(st.none() | st.integers(begin, len(content)))
    path = tmp_path_factory.mktemp("parts") / "file"
    path.write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "PART_BYTES", data.draw(st.integers(1, 9)))
        parts = list(read_parts(path, counter := ByteCounter(), begin, end))
    expected = content[begin:end]
    assert "".join(parts).encode(errors="surrogateescape") == expected and counter.n_bytes == len(expected)
    # a word is never cut if there is white space to cut at
    assert all(part[-1] in " \n" or not ({*part[:-1]} & {*" \n"}) for part in parts[:-1])


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst", ".tokens"])
def test_a_store_of_bytes_is_the_file(tmp_path, suffix):
    path = tmp_path / f"enwik{suffix}"
    compressed = {".gz": gzip.compress, ".zst": lambda text: pyarrow.compress(text, "zstd", asbytes=True)}
    path.write_bytes(compressed.get(suffix, bytes)(TEXT))
    config = verbatim(f"{path}[:200]", f"{path}[200:]")
    build_store(tmp_path / "store", config, ByteTokenizer())
    store = TokenStore(tmp_path / "store")
    assert stored_bytes(store.train) == TEXT[:200] and stored_bytes(store.validation) == TEXT[200:]
    assert store.train.document_ends.tolist() == [200] and store.meta["sentencepiece"] == store.upgrade_note == ""
    assert store.tokenizer().kind == "bytes" and store.unigram.sum() == 200


@pytest.mark.parametrize("max_chars", [1, 30, 150, 1000])
def test_max_chars_is_the_exact_length_of_a_verbatim_text(tmp_path, max_chars, monkeypatch):
    monkeypatch.setattr(readers, "PART_BYTES", 40)
    text = "one two\nthree\n" * 20
    for name in "ab":
        (tmp_path / name).write_text(text)
    build_store(tmp_path / "store", verbatim(tmp_path / "a", tmp_path / "b", max_chars=max_chars), ByteTokenizer())
    store = TokenStore(tmp_path / "store")
    assert stored_bytes(store.train) == stored_bytes(store.validation) == text[:max_chars].encode()


def test_words_of_a_benchmark_are_counted_in_the_training_text_only(tmp_path):
    (tmp_path / "wiki.train.tokens").write_text(" \n = Title = \n \n the cat . \n the end . \n")
    (tmp_path / "wiki.valid.tokens").write_text(" the new cat \n \n")
    text = verbatim(tmp_path / "wiki.train.tokens", tmp_path / "wiki.valid.tokens")
    tokenizer = WordTokenizer(["=", "the", ".", "cat"])
    store = build_store(tmp_path / "store", text, tokenizer)
    assert store.validation.tokens.tolist() == [10, 0, 12, 8, 8]  # an empty line is one token, and there is no <eod>
    assert len(store.train.tokens) == 3 + 3 + 3 + 5  # words and five line ends


def test_a_validation_source_of_documents_is_stored_as_validation_text(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("Ba be.\n\nDi do.\n\n" * 20)
    (tmp_path / "b.txt").write_text("Go ga.\n\nDi do.\n")
    config = TextConfig(source=str(tmp_path / "a.txt"), val_source=str(tmp_path / "b.txt"), num_processes=1)
    store = build_store(tmp_path / "store", config, tokenizer)
    assert len(store.train.document_ends) == 40 and len(store.validation.document_ends) == 2
    assert {*store.meta["files"]} == {str(tmp_path / "a.txt"), str(tmp_path / "b.txt")}


def test_validation_text_that_is_part_of_the_training_text_is_refused(tmp_path):
    (tmp_path / "a").write_bytes(TEXT)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    a, link, middle = tmp_path / "a", tmp_path / "link", len(TEXT) // 2
    store = build_store(tmp_path / "store", verbatim(f"{a}[:{middle}]", f"{link}[{middle}:]"), ByteTokenizer())
    assert stored_bytes(store.train) + stored_bytes(store.validation) == TEXT
    for source, val_source in ((a, link), (f"{a}[:{middle}]", f"{link}[{middle - 1}:]")):
        with pytest.raises(ValueError, match=r"text\.val_source is invalid: .* is part of text\.source too"):
            build_store(tmp_path / "other", verbatim(source, val_source), ByteTokenizer())


def test_a_vocabulary_of_more_than_65536_words_has_32_bit_ids(tmp_path):
    (tmp_path / "a").write_text("\n".join(f"w{i}" for i in range(70_000)))
    (tmp_path / "b").write_text("w1 w2")
    text = verbatim(tmp_path / "a", tmp_path / "b")
    with open(tmp_path / "a") as lines:
        tokenizer = train_tokenizer([list(lines)], TokenizerConfig(kind="words", vocab_size=100_000))
    store = build_store(tmp_path / "store", text, tokenizer)
    assert store.train.tokens.dtype == np.uint32 and store.train.tokens.max() == 70_008 == len(tokenizer) - 1
    assert store.tokenizer().sha256 == tokenizer.sha256


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a[5:5]", r"a\[5:5\] is invalid: the range has no bytes. Set"),
        ("a[0:9999]", r"a ends at byte \d+, before byte 9999"),
        ("a[9000:9999]", r"a ends at byte (?!9000)\d+, before byte 9999"),
        ("a[9000:]", r"a ends at byte (?!9000)\d+, before byte 9000"),
        ("docstrings", "reads text files"),
        ("b*", "no file matches"),
    ],
)
def test_an_invalid_source_of_verbatim_text_is_refused(tmp_path, monkeypatch, source, message):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "v"):
        (tmp_path / name).write_bytes(TEXT)
    with pytest.raises(ValueError, match=message):
        build_store(tmp_path / "store", verbatim(source, "v"), ByteTokenizer())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("empty", "empty is invalid: it holds no text"),
        ("missing", "missing is invalid: no file matches it"),
        ("folder", "folder is invalid: it is a folder"),
        ("a[5:5]", r"a\[5:5\] is invalid: the range has no bytes"),
    ],
)
def test_the_error_of_a_validation_source_names_its_setting(tmp_path, name, message):
    (tmp_path / "a").write_bytes(TEXT)
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=rf"^text\.val_source={re.escape(str(tmp_path))}/{message}"):
        build_store(tmp_path / "store", verbatim(tmp_path / "a", tmp_path / name), ByteTokenizer())


def test_verbatim_text_needs_a_validation_source_and_a_table():
    with pytest.raises(ValueError) as error:
        PretrainConfig(text=TextConfig(line_type="verbatim"))
    refused(error, "text.line_type", "verbatim", "Set text.val_source")
    with pytest.raises(ValueError) as error:
        PretrainConfig(text=TextConfig(line_type="verbatim", val_source="b"))
    refused(error, "text.line_type", "verbatim", "Set tokenizer.kind")
