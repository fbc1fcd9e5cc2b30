import gzip
import itertools
import json
import os
import re

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import examples
from xlpre.text import corpus, document
from xlpre.text.corpus import (
    TextConfig,
    list_units,
    list_val_units,
    read_documents,
    read_units,
    sample_lines,
    source_files,
)
from xlpre.text.hub import read_hf_rows


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


def test_with_row_type_lines_an_empty_row_ends_a_document(tmp_path):
    rows = ["one", "two", "", "three"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"line": row}) + "\n" for row in rows))
    assert read(tmp_path / "a.jsonl", row_type="lines", column="line") == [["one", "two"], ["three"]]


def test_a_dataset_folder_is_read_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    assert read(f"hf:{tmp_path / 'set'}") == [["one"], ["two"]]


def test_a_name_on_the_hub_may_end_with_a_configuration(monkeypatch):
    import datasets

    loaded = []

    def load(name, config, split, streaming):
        loaded.append((name, config))
        if name.count("/") > 1:  # as `datasets` does, without asking the Hub
            raise FileNotFoundError(f"Couldn't find any data file at {name}.")
        if name == "data/config":
            raise datasets.exceptions.DatasetNotFoundError(name)
        return datasets.Dataset.from_dict({"text": ["one"]}).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load)
    for name in ("owner/data/config", "owner/data", "data/config"):
        assert [*read_hf_rows(f"hf:{name}", "train")] == [{"text": "one"}]
    assert loaded == [("owner/data", "config"), ("owner/data", None), ("data/config", None), ("data", "config")]


def test_a_dataset_saved_to_disk_is_read_by_split(tmp_path):
    import datasets

    rows = datasets.Dataset.from_dict({"text": [str(number) for number in range(9)]})
    rows.save_to_disk(tmp_path / "one", num_shards=2)
    datasets.DatasetDict({"train": rows, "other": rows.select([3])}).save_to_disk(tmp_path / "several")
    assert read(f"hf:{tmp_path / 'one'}") == read(f"hf:{tmp_path / 'several'}") == [[str(n)] for n in range(9)]
    assert read(f"hf:{tmp_path / 'several'}", split="other") == [["3"]]
    with pytest.raises(ValueError, match=r"could not be loaded: Bad split: none. .*'train', 'other'"):
        read(f"hf:{tmp_path / 'several'}", split="none")


def test_an_error_of_a_dataset_names_its_setting():
    sources = {
        "text.source": TextConfig(source="hf:./nope"),
        "text.mixture": TextConfig(mixture={"hf:./nope": 1}),
        "text.val_source": TextConfig(val_source="hf:./nope"),
    }
    for key, config in sources.items():
        with pytest.raises(ValueError, match=f"^{key}='hf:./nope' could not be loaded"):
            list_val_units(config) if config.val_source else list_units(config)


def test_a_parquet_file_without_row_groups_has_no_text(tmp_path):
    pyarrow.parquet.ParquetWriter(tmp_path / "a.parquet", pyarrow.schema([("text", pyarrow.string())])).close()
    assert sample_lines(TextConfig(source=f"{tmp_path}/a.parquet"), 100) == []


def test_max_chars_stops_after_the_document_that_reaches_it(tmp_path):
    (tmp_path / "a.txt").write_text("\n\n".join(["x" * 100] * 50))
    assert len(read(tmp_path / "a.txt", max_chars=1000)) == 10


def test_docstrings_are_prose():
    sample = list(itertools.islice(read_documents(TextConfig(source="docstrings")), 40))
    assert len(sample) == 40
    assert all(">>>" not in paragraph for document in sample for paragraph in document)


INVALID_FILES = {
    "nothing.txt": (None, "text.source=.*nothing.txt is invalid: no file"),
    "bytes.txt": (b"fine\n\xff\xfe broken\n", "bytes.txt, line 2: not UTF-8"),
    "wide.txt": ("fine\n".encode("utf-16"), "wide.txt, line 1: the file is UTF-16, .* iconv"),
    "cut.txt.gz": (gzip.compress(b"some text\n" * 9999)[:60], "cut.txt.gz, after line"),
    "flipped.txt.gz": (gzip.compress(b"some text %d\n" * 99)[:12] + b"\xff" * 40, "flipped.txt.gz, after line"),
    "noise.txt.gz": (b"no gzip at all", "noise.txt.gz, after line 0: cannot be read: .* download it again"),
    "empty.txt.gz": (b"", "empty.txt.gz, after line 0: cannot be read: an empty file"),
    "empty.jsonl.zst": (b"", "empty.jsonl.zst, after line 0: cannot be read: an empty file"),
    "broken.jsonl": (b'{"text": "one"}\n{"text": \n', "broken.jsonl, line 2: not JSON"),
    "half.jsonl": (rb'{"text": "one \ud83d"}', r"half.jsonl, line 1: \\ud83d is an unpaired surrogate"),
    "deep.jsonl": (b'{"text": ' + b"[" * 99999, "deep.jsonl, line 1: cannot be read as JSON"),
    "long.jsonl": (b'{"text": "one"}\n{"text": ' + b"9" * 5000 + b"}", "long.jsonl, line 2: cannot be read as JSON"),
    "list.jsonl": (b"[1]\n", "list.jsonl, line 1: must be a JSON object"),
    "field.jsonl": (
        b'{"body": "one"}\n',
        "text.column=text is invalid: .*field.jsonl, line 1 .* Set text.column .* to one of body",
    ),
    "blank.jsonl": (
        b'{"text": "one"}\n\n\n{"text": 4}\n',
        "blank.jsonl, line 4: 'text' must be text, not 4. Remove",
    ),
    "null.jsonl": (
        b'{"id": 1, "text": null}\n',
        "line 1: 'text' must be text, not null. .* set text.column to one of id",
    ),
    "array.jsonl": (b'[\n  {"text": "one"}\n]\n', r"line 1: not JSON .* one JSON document, .*: jq -c '\.\[\]' FILE"),
    "rows.jsonl": (b'[{"text": "one"},\n{"text": "two"}]\n', r"line 1: not JSON .* one JSON document, .*: jq -c"),
    "indented.jsonl": (b'{\n  "text": "one"\n}\n', r"line 1: not JSON .* one JSON document, .*: jq -c \. FILE"),
    "whole.jsonl": (
        b'[{"text": "one"}, {"text": "two"}]\n',
        r"line 1: must be a JSON object.* one JSON document, .*: jq -c",
    ),
    "mac.txt": (b"one\rtwo\r\rthree\r", r"mac.txt, line 1: lines end with \\r, .* tr"),
    "noise.parquet": (b"no parquet", "noise.parquet: cannot be read as parquet"),
    "picture.png": (b"x", "must be a .txt, .jsonl or .parquet file"),
    "empty.txt": (b"\n \n\n", "text.source=.* is invalid: it holds no text"),
}


@pytest.mark.parametrize("name", INVALID_FILES)
def test_an_invalid_file_is_refused_with_its_line(name, tmp_path):
    content, message = INVALID_FILES[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / name)


def test_rows_of_parquet_are_counted_from_the_start_of_the_file(tmp_path):
    table = pyarrow.table({"text": ["one"] * 50 + [None]})
    pyarrow.parquet.write_table(table, tmp_path / "null.parquet", row_group_size=20)
    with pytest.raises(ValueError, match=r"null.parquet, row 51: 'text' must be text, not null. Remove the row\.$"):
        read(tmp_path / "null.parquet")
    broken = pyarrow.Array.from_buffers(pyarrow.string(), 1, pyarrow.array([b"\xff"]).buffers())
    pyarrow.parquet.write_table(pyarrow.table({"text": broken}), tmp_path / "bytes.parquet")
    with pytest.raises(ValueError, match="bytes.parquet, within 1,024 rows after row 0: not UTF-8"):
        read(tmp_path / "bytes.parquet")
    pyarrow.parquet.ParquetWriter(tmp_path / "none.parquet", table.schema).close()
    (tmp_path / "a.txt").write_text("one")
    with pytest.raises(ValueError, match="text.source=.* is invalid: it holds no text"):
        read(tmp_path / "none.parquet")
    mixture = {f"{tmp_path}/none.parquet": 1.0, f"{tmp_path}/a.txt": 1.0}
    assert list(read_documents(TextConfig(mixture=mixture, max_chars=1000000))) == [["one"]]


def test_a_file_name_may_contain_glob_characters(tmp_path):
    (tmp_path / "a[1].txt").write_text("one")
    (tmp_path / "a1.txt").write_text("two")
    assert list(read_documents(TextConfig(source=f"{tmp_path}/a[1].txt"))) == [["one"]]
    assert list(read_documents(TextConfig(source=f"{tmp_path}/*[1].txt"))) == [["two"]]


def test_a_file_that_several_links_lead_to_is_read_once(tmp_path):
    (tmp_path / "2024").mkdir()
    (tmp_path / "2024" / "a.txt").write_text("Ba di.\n")
    (tmp_path / "latest").symlink_to(tmp_path / "2024")
    (tmp_path / "self").symlink_to(tmp_path)
    assert list(read_documents(TextConfig(source=f"{tmp_path}/**/*.txt"))) == [["Ba di."]]


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is invalid: it is a folder"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [("val_fraction", 0), ("val_fraction", 0.9), ("max_chars", 0), ("num_processes", 0), ("mixture", {"a.txt": 0})],
)
def test_an_invalid_setting_is_refused_with_its_key_and_value(key, value):
    with pytest.raises(ValueError, match=rf"text\.{key}={re.escape(str(value))} is invalid: .* (Set|Remove)"):
        TextConfig(**{key: value})


def test_broken_links_and_pipes_are_refused_without_reading_them(tmp_path):
    (tmp_path / "gone.txt").symlink_to("/nowhere/a.txt")
    (tmp_path / "circle.txt").symlink_to("circle.txt")
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "away.txt").symlink_to("pipe.txt")  # as /dev/stdin may be
    for name, message in (
        ("gone.txt", "gone.txt is invalid: it is a link to /nowhere/a.txt.* Repair or remove"),
        ("circle.txt", "circle.txt is invalid: it is a link to circle.txt.* Repair or remove"),
        ("pipe.txt", "pipe.txt is invalid: it is a pipe or a device. Write its content to a file"),
        ("away.txt", "away.txt is invalid: it is a pipe or a device. Write its content to a file"),
    ):
        for function in (read, lambda source: source_files(TextConfig(source=str(source)))):
            with pytest.raises(ValueError, match=message):
                function(tmp_path / f"{name[:-1]}*")


@settings(max_examples=examples(60))
@given(
    paragraphs=st.lists(
        st.sampled_from(["", "", "one", "two words", "a longer line, of some words", " \t "]), max_size=60
    ),
    unit_bytes=st.integers(1, 50),
    ending=st.sampled_from(["", "\n", "\r\n"]),
)
def test_a_file_read_in_units_has_the_same_documents(tmp_path_factory, paragraphs, unit_bytes, ending):
    path = tmp_path_factory.mktemp("cut") / "a.txt"
    path.write_bytes(("\r\n" if ending == "\r\n" else "\n").join(paragraphs).encode() + ending.encode())
    config = TextConfig(source=str(path))
    before, corpus.UNIT_BYTES = corpus.UNIT_BYTES, 1 << 30
    try:
        (one_group,) = list_units(config)
        expected = list(read_units(one_group, config))
        corpus.UNIT_BYTES = unit_bytes
        groups = list_units(config)
    finally:
        corpus.UNIT_BYTES = before
    assert [document for units in groups for document in read_units(units, config)] == expected


def test_too_long_lines_and_binary_files_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("xlpre.text.readers.MAX_LINE_BYTES", 1 << 20)
    path = tmp_path / "a.txt"
    with open(path, "wb") as file:
        file.write(b"Ba be.\n\n" + b"bi " * 500_000)
    with pytest.raises(ValueError, match="a.txt, line 3: the line is longer than 1 MB. Write one paragraph per line"):
        list(read_documents(TextConfig(source=str(path))))
    path.write_bytes(b"Ba\n\x00\x01\x02")
    with pytest.raises(ValueError, match="a.txt, line 2: there is a zero byte at byte 0 of the line"):
        list(read_documents(TextConfig(source=str(path))))


def test_a_too_long_document_is_split(tmp_path, monkeypatch):
    monkeypatch.setattr(document, "MAX_DOCUMENT_CHARS", 20)
    (tmp_path / "a.txt").write_text("ten letter\n" * 5)
    assert [len(document) for document in read_documents(TextConfig(source=f"{tmp_path}/a.txt"))] == [2, 2, 1]


def test_only_line_ends_divide_the_text_of_a_row(tmp_path):
    text = "a\u0085b\u2028c\fd\r\ne\nf\rg"
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}))
    assert read(tmp_path / "a.jsonl") == [["a b c d", "e", "f", "g"]]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{}", "line 1 is empty. Remove the row"),
        (r'{"text": "a\u0000"}', "line 1: there is a zero character in 'text'"),
    ],
)
def test_a_row_without_fields_or_with_a_zero_character_is_refused(row, message, tmp_path):
    (tmp_path / "a.jsonl").write_text(row)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "a.jsonl")


def test_a_long_row_is_refused_with_a_remedy_for_rows(tmp_path, monkeypatch):
    monkeypatch.setattr("xlpre.text.readers.MAX_LINE_BYTES", 1 << 10)
    for row, remedy in ((json.dumps({"text": "a " * 1000}), "into several rows"), ("[" + "1," * 1000 + "1]", "jq -c")):
        (tmp_path / "a.jsonl").write_text(row)
        with pytest.raises(ValueError, match=f"a.jsonl, line 1: the line is longer than .* {remedy}"):
            read(tmp_path / "a.jsonl")


def test_a_sample_has_the_requested_number_of_characters(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("ten letter\n" * 1000)
    for line_type in ("paragraphs", "verbatim"):
        lines = sample_lines(TextConfig(source=f"{tmp_path}/*.txt", line_type=line_type, val_source="val.txt"), 200)
        assert sum(map(len, lines)) == 200


def test_errors_name_the_mixture(tmp_path):
    with pytest.raises(ValueError, match=r"text.mixture=\S+missing.txt is invalid: no file matches it"):
        list(read_documents(TextConfig(mixture={f"{tmp_path}/missing.txt": 1.0})))
