"""Invalid input of fine-tuning is refused in one sentence, before anything is written."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from finetune import predict
from finetune.config import TaskDataConfig
from finetune.tasks.registry import build_task
from finetune.trainer.inference import predict_lines, read_input
from tests.conftest import only_error, refused, write_folder
from tests.integration.conftest import call, run
from tests.parity.test_huggingface_heads import make_finetuned
from xlpre.conversion.task_model_folder import save_task_model
from xlpre.text import readers
from xlpre.text.tokenizer import TokenizerConfig
from xlpre.text.tokenizer_training import train_tokenizer

SCRIPT = "finetune/run.py"


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    """A model and examples."""
    folder = tmp_path_factory.mktemp("input")
    write_folder(folder / "model", tokenizer)
    rows = [("ba be", "good"), ("bi bo", "bad"), ("bu da", "good")]
    (folder / "train.tsv").write_text("text\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in rows))
    (folder / "dev.tsv").write_text("text\tlabel\nba be\tgood\n")
    (folder / "other.tsv").write_text("text\tlabel\nbi bo\tbad\n")
    (folder / "unknown.tsv").write_text("text\tlabel\nba be\tgood\nbi bo\tfine\n")
    (folder / "empty.tsv").write_text("text\tlabel\n\tgood\n")
    (folder / "truncated.jsonl").write_text('{"text": "ba", "label": "good"}\n{"text": "be", "lab')
    return folder


def finetune_args(folder, run_dir, *overrides):
    args = {
        "task": "classify",
        "init_from": folder / "model",
        "data.dir": folder,
        "data.train": "[train.tsv]",
        "data.dev": "[dev.tsv]",
        "data.text": "[text]",
        "train.steps": 4,
        "train.global_batch_size": 2,
        "run_dir": run_dir,
    }
    return [*(f"{key}={value}" for key, value in args.items()), *overrides]


def check_refused(result, message):
    """Check that a command failed with one error, which matches `message`."""
    assert result.returncode == 2, result.stdout + result.stderr
    assert re.search(message, only_error(result.stderr)), result.stderr


@pytest.mark.parametrize(
    ("override", "key", "value", "remedy"),
    [
        ("task=clasify", "task", "clasify", "classify"),
        ("optim.layer_decay=2", "optim.layer_decay", 2.0, "at most 1"),
        ("schedule.warmup_steps=9", "schedule.warmup_steps", 9, "train.steps=4"),
        ("model.pooling=mean", "model.pooling", "mean", "last"),
        ("num_seeds=0", "num_seeds", 0, "num_seeds=1"),
        ("data.labels=[good]", "data.labels", "[good]", ""),
        ("data.labels=[good, bad, good]", "data.labels", "[good, bad, good]", ""),
    ],
)
def test_an_invalid_setting_is_refused_with_its_value_and_a_remedy(folder, tmp_path, override, key, value, remedy):
    refused(call(SCRIPT, *finetune_args(folder, tmp_path / "run", override)), key, value, remedy)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task="], "task=.*task=NAME"),
        (["init_from="], "init_from="),
        (["init_from=nowhere"], "init_from.*nowhere"),
        (["name=.."], r"name='?\.\."),
        ([f"run_dir={__file__}"], "run_dir"),
        (["data.text=[sentence]"], "train.tsv, line 1: .*'sentence'.* text, label"),
        (["data.label=kind"], "train.tsv, line 1: .*'kind'"),
        (["data.dev=[unknown.tsv]"], "unknown.tsv, line 3: label 'fine' .*bad, good"),
        (["data.dev=[empty.tsv]"], "empty.tsv, line 2: .*'text' is empty"),
        (["data.test=[empty.tsv]"], "empty.tsv, line 2: .*'text' is empty"),
        (["data.dev=[truncated.jsonl]"], "truncated.jsonl, line 2: not JSON"),
        (["data.dev=[none.tsv]"], "none.tsv: no such file"),
        (["data.txt=[a]"], "'data.text'"),
        (["task=regress"], "train.tsv, line 2: 'good' in column 'label'"),
        (["task=glue/mrpc", "data.train=null", "data.dev=null", "data.text=null"], "train.tsv, line 1: .*'Quality'"),
        (
            ["train.global_batch_size=3", "train.micro_batch_size=2"],
            "train.micro_batch_size=2 .*train.global_batch_size=3",
        ),
        (["data.dev=null", "data.val_fraction=0.01"], "data.val_fraction=0.01 .*one each. Raise it"),
        (["data.long_text=memory", "data.text=[text, label]"], "train.tsv, line 2: data.long_text=memory .*has 2"),
        (["data.text=[text, text]"], "data.text=.*task=classify"),
        (["data.labels=[yes, no]"], "label 'good' .*True, False.*YAML"),
        (["task=rank", "data.text=null"], "train.tsv, line 1: .*QUERY Q0 DOCUMENT RANK SCORE TAG"),
    ],
)
def test_settings_that_contradict_the_data_are_refused_before_anything_is_written(folder, tmp_path, overrides, message):
    check_refused(call(SCRIPT, *finetune_args(folder, tmp_path / "run", *overrides)), message)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("a.csv", "text,label\nba,\nbe,good\n", "a.csv, line 2: .*'label' is empty"),
        ("a.csv", "text,label\n", "a.csv contains no example"),
        ("a.csv", "text,label,text\nba,good,be\n", "a.csv, line 1: .*'text'.*Rename"),
        ("a.csv", "text,label\n\u200b,good\nba,bad\n", r"a.csv, line 2: '\\u200b' has no tokens"),
        ("a.jsonl", '{"text": "ba", "label": null}', "a.jsonl, line 1: .*'label' is empty"),
        ("a.jsonl", '{"text": "ba", "label": ["good"]}', r"a.jsonl, line 1: .*'label' is \['good'\]"),
        ("a.jsonl", '{"text": "ba \\ud83d", "label": "good"}', r"a.jsonl, line 1: .*\\ud83d"),
        ("a.jsonl", '{"text": ' + "[" * 99999, "a.jsonl, line 1: .*JSON"),
        ("a.jsonl", '{"text": "ba", "label": ' + "9" * 5000 + "}", "a.jsonl, line 1: .*JSON"),
    ],
)
def test_an_invalid_training_file_is_refused_with_its_line(folder, tmp_path, file, content, message):
    shutil.copytree(folder, tmp_path / "in", copy_function=shutil.copy)
    (tmp_path / "in" / file).write_text(content)
    args = finetune_args(tmp_path / "in", tmp_path / "run", f"data.train=[{file}]")
    check_refused(call(SCRIPT, *args), message)
    assert not (tmp_path / "run").exists()


def test_all_invalid_rows_of_all_files_are_reported_in_one_error(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "in", copy_function=shutil.copy)
    rows = ["good,ba", ",ba", "good", "bad,", *(",be" for _ in range(9)), "bad,be"]
    (tmp_path / "in" / "rows.csv").write_text("label,text\n" + "".join(f"{row}\n" for row in rows))
    (tmp_path / "in" / "dev.csv").write_text("label,text\nugly,ba\ngood,be\n")
    args = finetune_args(tmp_path / "in", tmp_path / "run", "data.train=[rows.csv]", "data.dev=[dev.csv]")
    result = call(SCRIPT, *args)
    check_refused(result, r"rows.csv, line 3: the label")
    problems = [
        r"rows.csv, line 3: the label in column 'label' is empty\. ",
        r"rows.csv, line 4: the row has 1 column instead of 2 ",
        r"rows.csv, line 5: the text in column 'text' is empty\. ",
        r"rows.csv, line 6, 7, 8, 9, 10, 11, 12: the label in column 'label' is empty\. ",
        r"^  13 rows are invalid, 3 more than listed here\.$",
    ]
    lines = result.stderr[result.stderr.index("error: ") :].splitlines()
    assert len(lines) == len(problems) and all(map(re.search, problems, lines)), lines
    for column in ("data.label=topic", "data.text=[title]"):  # a mistake in the settings, not in all rows
        check_refused(call(SCRIPT, *args, column), r"rows.csv, line 1: there is no column '\w+'\. Columns: label, text")


def test_a_folder_with_runs_of_other_settings_is_refused_and_not_changed(folder, tmp_path):
    args = finetune_args(folder, tmp_path / "run", "train.steps=2")
    assert run(SCRIPT, *args).returncode == 0

    def read_files():
        return {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}

    before = read_files()
    for overrides, message in [
        (["seed=2", "optim.lr=0.5"], "optim.lr="),
        (["data.dev=[other.tsv]"], "dev"),
        (["data.labels=[good, bad]"], "labels="),
    ]:
        check_refused(call(SCRIPT, *args, *overrides), message)
        assert read_files() == before


def test_a_model_folder_with_another_vocabulary_is_refused(folder, documents, tmp_path):
    model = shutil.copytree(folder / "model", tmp_path / "model")
    train_tokenizer(documents, TokenizerConfig(vocab_size=250)).save(model / "spiece.model")
    args = finetune_args(folder, tmp_path / "run", f"init_from={model}")
    check_refused(call(SCRIPT, *args), "spiece.model")


def test_predicting_with_a_model_that_was_not_fine_tuned_is_refused(folder):
    with pytest.raises(ValueError, match="task.json"):
        predict.main([str(folder / "model")])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("ba", r"line 2 .*2 texts \(one and two\).* has 1\. Separate .* one tab"),
        ('{"one": "ba"}', "line 2: .*'two'.* one"),
        ('{"one": "ba", "two": 3}', "line 2: .*'two' is 3"),
        ('{"one": ', "line 2: not JSON"),
        ("{sic} ba", r'line 2: not JSON .*\{"one": '),
        ('["ba"]', r"line 2 .*2 texts \(one and two\).* has 1\. Separate .* one tab"),
    ],
)
def test_an_invalid_line_is_refused_after_predicting_those_before_it(tokenizer, tmp_path, capsys, line, message):
    settings = {"text": ["one", "two"], "labels": ["good", "bad"]}
    task = build_task("classify", TaskDataConfig(**settings), "last")
    save_task_model(tmp_path / "model", make_finetuned(tokenizer, task, "last"))
    (tmp_path / "lines").write_text(f"{json.dumps({'one': 'ba', 'two': ''})}\n{line}\n")
    with pytest.raises(ValueError, match=message):
        predict.main([str(tmp_path / "model"), str(tmp_path / "lines")])
    assert json.loads(capsys.readouterr().out)["prediction"] in settings["labels"]


def test_a_pair_may_be_a_list_and_an_interactive_line_is_predicted_before_the_next_is_read(tokenizer):
    task = build_task("classify", TaskDataConfig(text=["one", "two"], labels=["good", "bad"]), "last")
    n_read, model = 0, make_finetuned(tokenizer, task, "last")

    def typed_lines():
        nonlocal n_read
        for n_read, line in enumerate(("ba\tbe", '["ba", "be"]', "[ba]\tbe"), 1):
            yield f"line {n_read}", line

    predictions = [
        (n_read, prediction["probabilities"]) for prediction in predict_lines(model, task, typed_lines(), chunk_size=1)
    ]
    assert [number for number, _ in predictions] == [1, 2, 3]
    assert predictions[0][1] == predictions[1][1] != predictions[2][1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("ba\tbe", r"reads 1 text \(one\), but the line has 2\. Remove the tab\.$"),
        ('["ba", "be"]', r"has 2\. Remove the other texts\.$"),
    ],
)
def test_a_line_with_two_texts_for_a_model_of_one_is_refused_with_what_to_remove(tokenizer, line, message):
    task = build_task("classify", TaskDataConfig(text=["one"], labels=["good", "bad"]), "last")
    with pytest.raises(ValueError, match=message):
        list(predict_lines(make_finetuned(tokenizer, task, "last"), task, [("line 1", line)]))


@pytest.mark.parametrize("label", ["bad", "unclear", ""])
def test_predictions_ignore_the_label_column(tokenizer, label):
    task = build_task("classify", TaskDataConfig(text=["one"], label="topic", labels=["good", "bad"]), "last")
    model = make_finetuned(tokenizer, task, "last")
    expected = list(predict_lines(model, task, [("line 1", "ba")]))
    assert list(predict_lines(model, task, [("line 1", {"one": "ba", "topic": label})])) == expected


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.txt"])
def test_a_table_is_read_by_its_columns_and_other_files_line_by_line(tmp_path, name):
    separator = "," if name == "a.csv" else "\t"
    (tmp_path / name).write_text(f"label{separator}text\ngood{separator}ba\nbad{separator}be\n")
    assert [fields["text"] for _, fields in read_input(tmp_path / name, ("text",))] == ["ba", "be"]
    for lines in (tmp_path / "b.tsv", tmp_path / "b.txt"):
        lines.write_text("ba\tbe\nbi\tbo\n")
        assert [line for _, line in read_input(lines, ("text",))] == ["ba\tbe", "bi\tbo"]


def test_a_squad_file_is_read_question_by_question(tmp_path, monkeypatch):
    paragraphs = [
        {"context": word, "qas": [{"id": f"{word} {n}", "question": "fa?"} for n in (1, 2)]} for word in ("ba", "be")
    ]
    monkeypatch.setattr(readers, "MAX_LINE_BYTES", 100)  # the file is one line
    (tmp_path / "test-v2.0.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    lines = read_input(tmp_path / "test-v2.0.json", (), is_squad=True)
    expected = [("ba 1", "ba"), ("ba 2", "ba"), ("be 1", "be"), ("be 2", "be")]
    assert [(fields["id"], fields["context"]) for _, fields in lines] == expected
    (tmp_path / "dev.json.jsonl").write_text('{"id": 1}\n')  # the last suffix counts
    lines = read_input(tmp_path / "dev.json.jsonl", (), is_squad=True)
    assert [line for _, line in lines] == ['{"id": 1}']


def test_standard_input_is_read_like_a_file(tmp_path):
    (tmp_path / "lines").write_bytes(b'\xef\xbb\xbf{"text": "ba"}\r\nb\re\n\xff\n')
    with open(tmp_path / "lines", "rb") as file:
        original_stdin = os.dup(0)
        os.dup2(file.fileno(), 0)
        try:
            lines = read_input(None, ("text",))
            assert [next(lines), next(lines)] == [("stdin, line 1", '{"text": "ba"}'), ("stdin, line 2", "b\re")]
            with pytest.raises(ValueError, match="stdin, line 3: not UTF-8"):
                next(lines)
        finally:
            os.dup2(original_stdin, 0)
            os.close(original_stdin)


def test_a_pipe_and_a_table_on_standard_input_are_refused_with_the_right_way(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(
        ValueError, match="pipe is invalid: it is a pipe. Pass its text as standard input, without FILE"
    ):
        next(read_input(tmp_path / "pipe", ("text",)))
    lines = [(0, "label\ttext\n"), (0, "good\tba\n")]
    monkeypatch.setattr("finetune.trainer.inference.read_lines", lambda path: iter(lines))
    with pytest.raises(
        ValueError, match="stdin, line 1 is invalid: it names the columns of a table. Pass the table as FILE"
    ):
        next(read_input(None, ("text",)))


def test_a_file_with_the_name_stdin_is_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stdin").write_text("ba\n")
    assert list(read_input(Path("stdin"), ("text",))) == [("stdin, line 1", "ba")]
