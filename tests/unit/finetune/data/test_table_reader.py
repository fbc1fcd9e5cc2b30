import gzip

import pyarrow
import pyarrow.parquet
import pytest

from finetune.config import TaskDataConfig
from finetune.data.sources import Columns, TableSource
from finetune.data.table_reader import get_class_index, get_number, get_text, read_rows
from finetune.tasks.custom import read_label_names


def rows(path, **options):
    return list(read_rows(path, **options))


def test_tsv_csv_and_jsonl_rows_have_their_line_numbers(tmp_path):
    (tmp_path / "a.tsv").write_bytes('\ufeffa\tb\n"x\ty"\r\n\n1\t2\n'.encode())
    (tmp_path / "a.csv").write_text('a,b\n"1, ""2""\nmore",3\n4,5\n')
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n\n{"a": "x"}\n')
    assert rows(tmp_path / "a.tsv") == [
        (f"{tmp_path}/a.tsv, line 2", {"a": '"x', "b": 'y"'}),
        (f"{tmp_path}/a.tsv, line 4", {"a": "1", "b": "2"}),
    ]
    assert rows(tmp_path / "a.csv") == [
        (f"{tmp_path}/a.csv, line 2", {"a": '1, "2"\nmore', "b": "3"}),
        (f"{tmp_path}/a.csv, line 4", {"a": "4", "b": "5"}),
    ]
    assert rows(tmp_path / "a.jsonl") == [
        (f"{tmp_path}/a.jsonl, line 1", {"a": 1}),
        (f"{tmp_path}/a.jsonl, line 3", {"a": "x"}),
    ]
    (tmp_path / "b.tsv.gz").write_bytes(gzip.compress(b"1\t2\n"))
    assert rows(tmp_path / "b.tsv.gz", names=("a", "b")) == [(f"{tmp_path}/b.tsv.gz, line 1", {"a": "1", "b": "2"})]


def test_parquet_rows_and_txt_columns_are_read(tmp_path):
    columns = {"text": ["x\ty", "z"], "label": [1, None], "answers": [{"text": ["x"]}, {"text": []}]}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    assert rows(tmp_path / "a.parquet") == [
        (f"{tmp_path}/a.parquet, row 1", {"text": "x\ty", "label": 1, "answers": {"text": ["x"]}}),
        (f"{tmp_path}/a.parquet, row 2", {"text": "z", "label": None, "answers": {"text": []}}),
    ]
    (tmp_path / "a.txt").write_bytes('\ufeffQuality\t#1 String\r\n1\tHe said "so .\r\n'.encode())
    assert rows(tmp_path / "a.txt") == [(f"{tmp_path}/a.txt, line 2", {"Quality": "1", "#1 String": 'He said "so .'})]


def test_unicode_line_separators_do_not_end_a_row(tmp_path):
    (tmp_path / "a.tsv").write_text("a\nx\u2028y\x85z\x0bw\n")
    assert rows(tmp_path / "a.tsv")[0][1] == {"a": "x\u2028y\x85z\x0bw"}


def test_a_folder_is_refused_with_the_name_of_the_dataset_in_it(tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path} is a folder.* hf:{tmp_path}:SPLIT"):
        rows(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tsv", b"a\tb\n1\n", "a.tsv, line 2: .*1 column instead of 2 .a, b."),
        ("a.tsv", b"a\n\xff\n", "a.tsv, line 2: not UTF-8"),
        ("a.csv", b'a\n"x" y\n', "a.csv, line 2: not CSV"),
        ("a.csv", b'a\nx\n"y\n', "a.csv, line 3: not CSV"),
        ("a.csv", b"text;label\nx, y;1\n", "a.csv, line 1: .*';'.* commas"),
        ("a.csv", b"a,b,a\n1,2,3\n", "a.csv, line 1: .*'a'.* Rename"),
        ("a.jsonl", b'{"a": 1}\n{"a": \n', "a.jsonl, line 2: not JSON"),
        ("a.jsonl", b"[1]\n", "a.jsonl, line 1: .*JSON object.* list"),
        ("a.tsv", b"", "a.tsv is empty"),
        ("a.parquet", b"PAR1", "a.parquet"),
        ("a.xlsx", b"", "a.xlsx is of kind '.xlsx'"),
    ],
)
def test_an_invalid_file_is_refused_with_its_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        rows(tmp_path / name)


def test_a_missing_file_is_refused_with_the_files_in_its_folder(tmp_path):
    (tmp_path / "train.csv").touch()
    with pytest.raises(ValueError, match="train.tsv: no such file.*: train.csv"):
        rows(tmp_path / "train.tsv")
    with pytest.raises(ValueError, match="no folder"):
        rows(tmp_path / "no" / "train.tsv")


def test_short_rows_are_skipped_if_allowed(tmp_path):
    (tmp_path / "a.tsv").write_text("a\tb\n1\n2\t3\n")
    assert [fields for _, fields in rows(tmp_path / "a.tsv", skip_short_rows=True)] == [{"a": "2", "b": "3"}]


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda fields: get_text(fields, "text", "f, line 2"), "f, line 2: .*'text' is empty"),
        (lambda fields: get_text(fields, "sentence", "f, line 2"), "f, line 2: .*no column 'sentence'.* text, label"),
        (lambda fields: get_text({"text": 3}, "text", "f, line 2"), "f, line 2: .*'text' is 3"),
        (lambda fields: get_class_index(fields, "label", ["0", "1"], "f"), "label 'maybe' in column 'label'.* 0, 1"),
        (
            lambda fields: get_class_index({"label": float("nan")}, "label", ["0", "nan"], "f"),
            "column 'label' is empty",
        ),
        (lambda fields: get_number(fields, "number", "f, line 2"), "f, line 2: 'many' in column 'number'"),
        (lambda fields: get_number({"number": "nan"}, "number", "f"), "not a number"),
        (lambda fields: get_number({"number": "1_000"}, "number", "f"), "not a number"),
    ],
)
def test_an_invalid_value_is_refused_with_its_location(read, message):
    with pytest.raises(ValueError, match=message):
        read({"text": " ", "label": "maybe", "number": "many"})


def test_labels_and_numbers_may_be_texts_or_numbers():
    assert get_class_index({"label": 1}, "label", ["0", "1"], "") == 1
    assert get_number({"n": "2.5"}, "n", "") == 2.5


def test_numeric_labels_ignore_a_decimal_point_and_text_labels_do_not(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        "\n".join(f'{{"label": {label}}}' for label in ("1", "1.0", '"1"', "2", "-0.0", "0"))
    )
    assert read_label_names([tmp_path / "a.jsonl"], "label") == ["0", "1", "2"]
    (tmp_path / "a.csv").write_text("label\n1\n1.0\n")
    assert read_label_names([tmp_path / "a.csv"], "label") == ["1", "1.0"]
    assert [get_class_index({"label": 1.0}, "label", labels, "") for labels in (["0", "1"], ["0.0", "1.0"])] == [1, 1]
    assert get_class_index({"label": 0.5}, "label", ["0.5", "1"], "") == 0


@pytest.mark.parametrize(
    ("label_names", "value", "label"),
    [
        (["0", "1"], -1, None),
        (["0", "1"], -1.0, None),
        (["0", "1"], "-1", None),
        (["-1", "1"], -1.0, 0),
        (["-1.0", "1.0"], -1.0, 0),
    ],
)
def test_minus_1_hides_the_label_unless_it_is_a_label_name(label_names, value, label):
    source = TableSource(Columns(("text",), "label", label_names), [], {}, {}, TaskDataConfig())
    assert source.parse_example({"text": "ba", "label": value}, "").label == label
