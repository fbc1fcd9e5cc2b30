import gzip
import itertools
import json
import os

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xlpre.text import corpus, document
from xlpre.text.corpus import TextConfig, list_units, read_documents, read_units, source_files
from xlpre.text.readers import ByteCounter


def read(source, **settings):
    return list(read_documents(TextConfig(source=str(source), **settings)))


def test_an_empty_line_ends_a_document_and_spaces_are_single(tmp_path):
    (tmp_path / "a.txt").write_text("\n\none  two\nthree\n\n \n four\t4\n")
    assert read(tmp_path / "a.txt") == [["one two", "three"], ["four 4"]]


def test_gz_jsonl_and_parquet_hold_the_same_documents_as_txt(tmp_path):
    texts = ["one\ntwo", "dreißig 三十"]
    expected = [["one", "two"], ["dreißig 三十"]]
    (tmp_path / "a.txt").write_text("\n\n".join(texts))
    with gzip.open(tmp_path / "b.txt.gz", "wt") as file:
        file.write("\n\n".join(texts))
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "d.parquet")
    for name in ("a.txt", "b.txt.gz", "c.jsonl", "d.parquet"):
        assert read(tmp_path / name) == expected, name
    assert read(tmp_path / "*") == expected * 4


def test_rows_may_be_lines_with_empty_ones_between_documents(tmp_path):
    rows = ["one", "two", "", "three"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"line": row}) + "\n" for row in rows))
    assert read(tmp_path / "a.jsonl", row_type="lines", column="line") == [["one", "two"], ["three"]]


def test_a_dataset_is_read_by_name_through_datasets(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    assert read(f"hf:{tmp_path / 'set'}") == [["one"], ["two"]]


def test_a_dataset_that_was_saved_to_disk_is_read_split_by_split(tmp_path):
    import datasets

    rows = datasets.Dataset.from_dict({"text": [str(number) for number in range(9)]})
    rows.save_to_disk(tmp_path / "one", num_shards=2)
    datasets.DatasetDict({"train": rows, "other": rows.select([3])}).save_to_disk(tmp_path / "several")
    assert read(f"hf:{tmp_path / 'one'}") == read(f"hf:{tmp_path / 'several'}") == [[str(n)] for n in range(9)]
    assert read(f"hf:{tmp_path / 'several'}", split="other") == [["3"]]
    with pytest.raises(ValueError, match=r"could not be loaded: Bad split: none. .*'train', 'other'"):
        read(f"hf:{tmp_path / 'several'}", split="none")


def test_a_limit_stops_after_the_document_that_reaches_it(tmp_path):
    (tmp_path / "a.txt").write_text("\n\n".join(["x" * 100] * 50))
    assert len(read(tmp_path / "a.txt", limit_mb=1000)) == 10


def test_docstrings_are_always_there_and_read_as_prose():
    found = list(itertools.islice(read_documents(TextConfig(source="docstrings")), 40))
    assert len(found) == 40
    assert all(">>>" not in paragraph for document in found for paragraph in document)


BAD = {
    "nothing.txt": (None, "matches no file"),
    "bytes.txt": (b"fine\n\xff\xfe broken\n", "bytes.txt, line 2: not UTF-8"),
    "wide.txt": ("fine\n".encode("utf-16"), "wide.txt, line 1: UTF-16, .* convert it: iconv"),
    "cut.txt.gz": (gzip.compress(b"some text\n" * 9999)[:60], "cut.txt.gz, after line"),
    "flipped.txt.gz": (gzip.compress(b"some text %d\n" * 99)[:12] + b"\xff" * 40, "flipped.txt.gz, after line"),
    "noise.txt.gz": (b"no gzip at all", "noise.txt.gz, after line 0: cannot be read: .*; get it anew"),
    "empty.txt.gz": (b"", "empty.txt.gz, after line 0: cannot be read: it has 0 bytes, and what is packed has some"),
    "empty.jsonl.zst": (b"", "empty.jsonl.zst, after line 0: cannot be read: it has 0 bytes"),
    "broken.jsonl": (b'{"text": "one"}\n{"text": \n', "broken.jsonl, line 2: not JSON"),
    "half.jsonl": (rb'{"text": "one \ud83d"}', r"half.jsonl, line 1: \\ud83d is an unpaired surrogate"),
    "deep.jsonl": (b'{"text": ' + b"[" * 99999, "deep.jsonl, line 1: cannot be read as JSON"),
    "long.jsonl": (b'{"text": "one"}\n{"text": ' + b"9" * 5000 + b"}", "long.jsonl, line 2: cannot be read as JSON"),
    "list.jsonl": (b"[1]\n", "list.jsonl, line 1: must be a JSON object"),
    "field.jsonl": (b'{"body": "one"}\n', "set text.column to one of body"),
    "blank.jsonl": (
        b'{"text": "one"}\n\n\n{"text": 4}\n',
        "blank.jsonl, line 4: 'text' must be text, not 4. Remove",
    ),
    "null.jsonl": (b'{"id": 1, "text": null}\n', "'text' is null, .*; remove the row, or set text.column to one of id"),
    "array.jsonl": (b'[\n  {"text": "one"}\n]\n', r"line 1: not JSON .* one JSON document .*: jq -c '\.\[\]' FILE"),
    "rows.jsonl": (b'[{"text": "one"},\n{"text": "two"}]\n', r"line 1: not JSON .* one JSON document .*: jq -c"),
    "indented.jsonl": (b'{\n  "text": "one"\n}\n', r"line 1: not JSON .* one JSON document .*: jq -c \. FILE"),
    "whole.jsonl": (b'[{"text": "one"}, {"text": "two"}]\n', r"line 1: must be a JSON object.* one JSON document .*: jq -c"),
    "mac.txt": (b"one\rtwo\r\rthree\r", r"mac.txt, line 1: lines end with \\r, .*; convert it: tr"),
    "noise.parquet": (b"no parquet", "noise.parquet: cannot be read as parquet"),
    "picture.png": (b"x", "must be a .txt, .jsonl or .parquet file"),
    "empty.txt": (b"\n \n\n", "holds no text at all"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_read_is_named_with_its_line(name, tmp_path):
    content, message = BAD[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / name)


def test_parquet_counts_rows_from_the_files_first_and_may_be_empty(tmp_path):
    table = pyarrow.table({"text": ["one"] * 50 + [None]})
    pyarrow.parquet.write_table(table, tmp_path / "null.parquet", row_group_size=20)
    with pytest.raises(ValueError, match="null.parquet, row 51: 'text' must be text, not null. Remove the row\.$"):
        read(tmp_path / "null.parquet")
    broken = pyarrow.Array.from_buffers(pyarrow.string(), 1, pyarrow.array([b"\xff"]).buffers())
    pyarrow.parquet.write_table(pyarrow.table({"text": broken}), tmp_path / "bytes.parquet")
    with pytest.raises(ValueError, match="bytes.parquet, within 1,024 rows after row 0: not UTF-8"):
        read(tmp_path / "bytes.parquet")
    pyarrow.parquet.ParquetWriter(tmp_path / "none.parquet", table.schema).close()
    (tmp_path / "a.txt").write_text("one")
    with pytest.raises(ValueError, match="holds no text at all"):
        read(tmp_path / "none.parquet")
    mixture = {f"{tmp_path}/none.parquet": 1.0, f"{tmp_path}/a.txt": 1.0}
    assert list(read_documents(TextConfig(mixture=mixture, max_chars=1000000))) == [["one"]]


def test_a_file_may_have_the_name_of_a_glob(tmp_path):
    (tmp_path / "a[1].txt").write_text("one")
    (tmp_path / "a1.txt").write_text("two")
    assert list(read_documents(TextConfig(source=f"{tmp_path}/a[1].txt"))) == [["one"]]
    assert list(read_documents(TextConfig(source=f"{tmp_path}/*[1].txt"))) == [["two"]]


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is a folder"):
        read(tmp_path)


@pytest.mark.parametrize("settings", [{"held_out": 0}, {"held_out": 0.9}, {"limit_mb": 0}])
def test_senseless_settings_are_refused(settings):
    with pytest.raises(ValueError, match=r"text\."):
        TextConfig(**settings)


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path):
    (tmp_path / "gone.txt").symlink_to("/nowhere/a.txt")
    (tmp_path / "circle.txt").symlink_to("circle.txt")
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "away.txt").symlink_to("pipe.txt")  # as /dev/stdin may be
    for name, message in (
        ("gone.txt", "gone.txt is a link to /nowhere/a.txt, where there is no file"),
        ("circle.txt", "circle.txt is a link to circle.txt, where there is no file"),
        ("pipe.txt", "pipe.txt is a pipe or a device; write what it holds to a file"),
        ("away.txt", "away.txt is a pipe or a device; write what it holds to a file"),
    ):
        for find in (read, lambda source: source_files(TextConfig(source=str(source)))):
            with pytest.raises(ValueError, match=message):
                find(tmp_path / f"{name[:-1]}*")


@settings(max_examples=60, deadline=None)
@given(
    paragraphs=st.lists(
        st.sampled_from(["", "", "one", "two words", "a longer line, of some words", " \t "]), max_size=60
    ),
    unit=st.integers(1, 50),
    ending=st.sampled_from(["", "\n", "\r\n"]),
)
def test_a_file_cut_into_units_holds_the_same_documents(tmp_path_factory, paragraphs, unit, ending):
    path = tmp_path_factory.mktemp("cut") / "a.txt"
    path.write_bytes(("\r\n" if ending == "\r\n" else "\n").join(paragraphs).encode() + ending.encode())
    config = TextConfig(source=str(path))
    before, corpus.UNIT_BYTES = corpus.UNIT_BYTES, 1 << 30
    try:
        (whole,) = list_units(config)
        expected = list(read_units(whole, config, ByteCounter()))
        corpus.UNIT_BYTES = unit
        cut = list_units(config)
    finally:
        corpus.UNIT_BYTES = before
    assert [document for units in cut for document in read_units(units, config, ByteCounter())] == expected


def test_a_line_without_end_is_refused(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("xlpre.text.readers.MAX_LINE_BYTES", 1 << 20)
    path = tmp_path / "a.txt"
    with open(path, "wb") as file:
        file.write(b"Ba be.\n\n" + b"bi " * 500_000)
    with pytest.raises(ValueError, match="a.txt, line 3: longer than 1 MB; put a paragraph on a line"):
        list(read_documents(TextConfig(source=str(path))))
    path.write_bytes(b"Ba\n\x00\x01\x02")
    with pytest.raises(ValueError, match="a.txt, line 2: a zero byte at byte 0 of the line; is it a text file"):
        list(read_documents(TextConfig(source=str(path))))


def test_a_document_without_end_is_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(document, "MAX_DOCUMENT_CHARS", 20)
    (tmp_path / "a.txt").write_text("ten letter\n" * 5)
    assert [len(document) for document in read_documents(TextConfig(source=f"{tmp_path}/a.txt"))] == [2, 2, 1]
