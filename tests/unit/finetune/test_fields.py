import gzip

import pyarrow
import pyarrow.parquet
import pytest

from finetune.config import TaskDataConfig
from finetune.data.sources import Columns, TableSource
from finetune.data.table_reader import class_of, number_of, read_rows, text_of
from finetune.tasks.custom import read_label_names


def rows(path, **more):
    return list(read_rows(path, **more))


def test_tabs_quotes_and_objects_are_read_with_their_lines(tmp_path):
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


def test_rows_of_parquet_and_columns_in_a_txt_file_are_read_as_others(tmp_path):
    columns = {"text": ["x\ty", "z"], "label": [1, None], "answers": [{"text": ["x"]}, {"text": []}]}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    assert rows(tmp_path / "a.parquet") == [
        (f"{tmp_path}/a.parquet, row 1", {"text": "x\ty", "label": 1, "answers": {"text": ["x"]}}),
        (f"{tmp_path}/a.parquet, row 2", {"text": "z", "label": None, "answers": {"text": []}}),
    ]
    (tmp_path / "a.txt").write_bytes('\ufeffQuality\t#1 String\r\n1\tHe said "so .\r\n'.encode())
    assert rows(tmp_path / "a.txt") == [(f"{tmp_path}/a.txt, line 2", {"Quality": "1", "#1 String": 'He said "so .'})]


def test_a_line_ends_at_its_end_and_at_nothing_else(tmp_path):
    (tmp_path / "a.tsv").write_text("a\nx\u2028y\x85z\x0bw\n")
    assert rows(tmp_path / "a.tsv")[0][1] == {"a": "x\u2028y\x85z\x0bw"}


def test_a_folder_is_refused_with_how_a_dataset_saved_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path} is a folder; name a file in it, or hf:{tmp_path}:SPLIT"):
        rows(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tsv", b"a\tb\n1\n", r"a.tsv, line 2: has 1 columns, not the 2 of a, b"),
        ("a.tsv", b"a\n\xff\n", r"a.tsv, line 2: not UTF-8"),
        ("a.csv", b'a\n"x" y\n', r"a.csv, line 2: not CSV"),
        ("a.csv", b'a\nx\n"y\n', r"a.csv, line 3: not CSV"),
        ("a.csv", b"text;label\nx, y;1\n", r"a.csv, line 1: its columns are apart by ';'.* write it with commas"),
        ("a.jsonl", b'{"a": 1}\n{"a": \n', r"a.jsonl, line 2: not JSON"),
        ("a.jsonl", b"[1]\n", r"a.jsonl, line 1: a JSON object is needed, not a list"),
        ("a.tsv", b"", r"a.tsv: empty"),
        ("a.parquet", b"PAR1", r"a.parquet: cannot be read as parquet"),
        ("a.xlsx", b"", r"a.xlsx is of kind '.xlsx'; it must be"),
    ],
)
def test_what_is_wrong_with_a_file_is_named_with_its_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        rows(tmp_path / name)


def test_a_file_that_is_not_there_is_named_with_those_that_are(tmp_path):
    (tmp_path / "train.csv").touch()
    with pytest.raises(ValueError, match=r"train.tsv: there is no such file; in .* there are train.csv"):
        rows(tmp_path / "train.tsv")
    with pytest.raises(ValueError, match="nor its folder"):
        rows(tmp_path / "no" / "train.tsv")


def test_cut_rows_are_spared_where_they_may_be(tmp_path):
    (tmp_path / "a.tsv").write_text("a\tb\n1\n2\t3\n")
    assert [fields for _, fields in rows(tmp_path / "a.tsv", spare_cut=True)] == [{"a": "2", "b": "3"}]


def test_what_is_wrong_with_a_field_is_named_with_its_place():
    fields = {"text": " ", "label": "maybe", "number": "many"}
    for call, message in [
        (lambda: text_of(fields, "text", "f, line 2"), r"f, line 2: the text in 'text' is empty"),
        (lambda: text_of(fields, "sentence", "f, line 2"), r"f, line 2: there is no column 'sentence'; there are text, label"),
        (lambda: text_of({"text": 3}, "text", "f, line 2"), r"f, line 2: 'text' is 3, where a text is needed"),
        (lambda: class_of(fields, "label", ["0", "1"], "f, line 2"), r"the label 'maybe' in 'label' is none of 0, 1"),
        (lambda: class_of({"label": float("nan")}, "label", ["0", "nan"], "f, line 2"), r"the label in 'label' is empty"),
        (lambda: number_of(fields, "number", "f, line 2"), r"f, line 2: 'many' in 'number' is no number"),
        (lambda: number_of({"number": "nan"}, "number", "f, line 2"), r"no number"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call()
    assert class_of({"label": 1}, "label", ["0", "1"], "") == 1 and number_of({"n": "2.5"}, "n", "") == 2.5


def test_a_label_that_is_a_number_is_the_same_with_a_point_and_one_that_is_a_text_is_as_it_stands(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        "\n".join(f'{{"label": {label}}}' for label in ("1", "1.0", '"1"', "2", "-0.0", "0"))
    )
    assert read_label_names([tmp_path / "a.jsonl"], "label") == ["0", "1", "2"]
    (tmp_path / "a.csv").write_text("label\n1\n1.0\n")
    assert read_label_names([tmp_path / "a.csv"], "label") == ["1", "1.0"]
    assert [class_of({"label": 1.0}, "label", labels, "") for labels in (["0", "1"], ["0.0", "1.0"])] == [1, 1]
    assert class_of({"label": 0.5}, "label", ["0.5", "1"], "") == 0


@pytest.mark.parametrize(
    ("labels", "truth", "answer"),
    [
        (["0", "1"], -1, None),
        (["0", "1"], -1.0, None),
        (["0", "1"], "-1", None),
        (["-1", "1"], -1.0, 0),
        (["-1.0", "1.0"], -1.0, 0),
    ],
)
def test_minus_1_leaves_the_truth_open_unless_it_is_a_label_however_that_is_written(labels, truth, answer):
    source = TableSource(Columns(("text",), "label", labels), [], {}, {}, TaskDataConfig())
    assert source.example({"text": "ba", "label": truth}, "").answer == answer
