"""What a user of fine-tuning gets wrong is one sentence with file and line, and leaves nothing half-written."""

import json
import os
import shutil
from pathlib import Path

import pytest

from finetune import predict
from finetune.run import main
from finetune.tasks.custom import read_label_names
from finetune.trainer.inference import read_input
from tests.conftest import write_folder
from tests.integration.conftest import run
from tests.integration.test_bad_input import check_sentence
from xlpre.common.cli_main import run_main
from xlpre.text.tokenizer import TokenizerConfig
from xlpre.text.tokenizer_training import train_tokenizer


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    """A model and examples."""
    folder = tmp_path_factory.mktemp("input")
    write_folder(folder / "model", tokenizer)
    rows = [("ba be", "good"), ("bi bo", "bad"), ("bu da", "good")]
    (folder / "train.tsv").write_text("text\tlabel\n" + "".join(f"{a}\t{b}\n" for a, b in rows))
    (folder / "dev.tsv").write_text("text\tlabel\nba be\tgood\n")
    (folder / "other.tsv").write_text("text\tlabel\nbi bo\tbad\n")
    (folder / "unknown.tsv").write_text("text\tlabel\nba be\tgood\nbi bo\tfine\n")
    (folder / "empty.tsv").write_text("text\tlabel\n\tgood\n")
    (folder / "cut.jsonl").write_text('{"text": "ba", "label": "good"}\n{"text": "be", "lab')
    return folder


def refused(capsys, message):
    with pytest.raises(SystemExit) as ended:
        run_main(main)
    assert ended.value.code == 2
    check_sentence(capsys.readouterr().err, message)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["task=clasify"], "task=clasify: there is no such task; did you mean classify?"),
        (["task="], "task is not set; say task=NAME"),
        (["init_from="], "init_from= is invalid"),
        (["init_from=nowhere"], "init_from.*nowhere"),
        (["name=.."], "name ('..') names folders"),
        ([f"run_dir={__file__}"], "is there already and is no folder; set another run_dir"),
        (["data.text=[sentence]"], "train.tsv, line 2: there is no column 'sentence'; there are text, label"),
        (["data.label=kind"], "train.tsv, line 2: there is no column 'kind'"),
        (["data.dev=[unknown.tsv]"], "unknown.tsv, line 3: the label 'fine' in 'label' is none of bad, good"),
        (["data.dev=[empty.tsv]"], "empty.tsv, line 2: the text in 'text' is empty"),
        (["data.test=[empty.tsv]"], "empty.tsv, line 2: the text in 'text' is empty"),
        (["data.dev=[cut.jsonl]"], "cut.jsonl, line 2: not JSON"),
        (["data.dev=[none.tsv]"], "none.tsv: there is no such file; in"),
        (["data.txt=[a]"], "did you mean 'data.text'?"),
        (["task=regress"], "train.tsv, line 2: 'good' in 'label' is no number"),
        (["task=glue/mrpc", "data.train=[]", "data.dev=[]", "data.text=[]"], "train.tsv, line 2: there is no column 'Quality'"),
        (["train.global_batch_size=3", "train.accumulation=2"], "train.global_batch_size (3) must be a multiple of 1 processes times"),
        (["schedule.warmup_steps=9"], "schedule.warmup_steps (9) must be below train.steps (4)"),
        (["train.batch_warmup_steps=2", "train.accumulation=2"], "train.batch_warmup_steps (2) has no place in fine-tuning"),
        (["optim.layer_decay=2"], "optim.layer_decay (2.0) must be above 0"),
        (["model.pooling=mean"], "model.pooling: Invalid value 'mean', expected one of"),
        (["data.dev=[]", "data.val_fraction=0.01"], "data.val_fraction=0.01 of its 3 examples are none; raise it, or name data.dev"),
        (["seeds=0"], "seeds (0) must be at least 1"),
        (["data.long_text=memory", "data.text=[text, label]"], "train.tsv, line 2: data.long_text=memory reads one text, and here are 2"),
        (["data.text=[text, text]"], "task=classify needs data.text: [COLUMN] with the text, or two columns; it is ['text', 'text']"),
        (["data.labels=[good]"], "data.labels (good) must be two labels or more, each once"),
        (["data.labels=[good, bad, good]"], "data.labels (good, bad, good) must be two labels or more, each once"),
        (["data.labels=[yes, no]"], "the label 'good' in 'label' is none of True, False; YAML reads yes and no without quotes"),
        (["task=rank", "data.text=[]"], "train.tsv, line 1: has 2 columns, not QUERY Q0 DOCUMENT RANK SCORE TAG"),
    ],
)  # fmt: skip
def test_a_wrong_word_is_refused_before_anything_is_written(folder, tmp_path, monkeypatch, capsys, args, message):
    usual = ["task=classify", f"init_from={folder / 'model'}", f"data.dir={folder}", "data.train=[train.tsv]"]
    usual += ["data.dev=[dev.tsv]", "data.text=[text]", "train.steps=4", "train.global_batch_size=2"]
    monkeypatch.setattr("sys.argv", ["run.py", *usual, f"run_dir={tmp_path / 'run'}", *args])
    refused(capsys, message)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("a.csv", "text,label\nba,\nbe,good\n", "a.csv, line 2: the label in 'label' is empty; fill it in, or remove the row"),
        ("a.csv", "text,label\n", "a.csv: holds no example"),
        ("a.csv", "text,label,text\nba,good,be\n", "a.csv, line 1: two columns are called 'text'; rename one"),
        ("a.csv", "text,label\n\u200b,good\nba,bad\n", "a.csv, line 2: of '\\u200b' the vocabulary reads nothing; remove it"),
        ("a.jsonl", '{"text": "ba", "label": null}', "a.jsonl, line 1: the label in 'label' is empty"),
        ("a.jsonl", '{"text": "ba", "label": ["good"]}', "a.jsonl, line 1: 'label' is ['good'], where a label is needed"),
        ("a.jsonl", '{"text": "ba \\ud83d", "label": "good"}', "a.jsonl, line 1: \\ud83d is an unpaired surrogate"),
        ("a.jsonl", '{"text": ' + "[" * 99999, "a.jsonl, line 1: cannot be read as JSON"),
        ("a.jsonl", '{"text": "ba", "label": ' + "9" * 5000 + "}", "a.jsonl, line 1: cannot be read as JSON"),
    ],
)  # fmt: skip
def test_training_examples_that_are_none_are_named(folder, tmp_path, monkeypatch, capsys, file, content, message):
    shutil.copytree(folder, tmp_path / "in", copy_function=shutil.copy)
    (tmp_path / "in" / file).write_text(content)
    args = ["task=classify", f"init_from={folder / 'model'}", f"data.dir={tmp_path / 'in'}", f"data.train=[{file}]"]
    args += ["data.dev=[dev.tsv]", "data.text=[text]", f"run_dir={tmp_path / 'run'}"]
    monkeypatch.setattr("sys.argv", ["run.py", *args])
    refused(capsys, message)
    assert not (tmp_path / "run").exists()


def test_labels_are_told_apart_without_the_spaces_around_them_and_a_long_text_is_csv(tmp_path):
    (tmp_path / "a.csv").write_text(f"text,label\nba,good \nbe,bad\n{'ba ' * 100000},good\n")
    assert read_label_names([tmp_path / "a.csv"], "label") == ["bad", "good"]
    spellings = ["-0", "0", "00", "000", "01", "1"]
    (tmp_path / "b.csv").write_text("text,label\n" + "".join(f"ba,{label}\n" for label in spellings[::-1]))
    assert read_label_names([tmp_path / "b.csv"], "label") == spellings


def test_runs_with_other_settings_or_dev_examples_are_refused_in_a_folder_of_runs_and_change_nothing(folder, tmp_path):
    args = ["task=classify", f"init_from={folder / 'model'}", f"data.dir={folder}", "data.train=[train.tsv]"]
    args += [
        "data.dev=[dev.tsv]",
        "data.text=[text]",
        "train.steps=2",
        "train.global_batch_size=2",
        f"run_dir={tmp_path / 'run'}",
    ]
    assert run("finetune/run.py", *args).returncode == 0
    there = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    for changed, message in [
        (["seed=2", "optim.lr=0.5"], "was made with optim.lr="),
        (["data.dev=[other.tsv]"], "was made with measured."),
        (["data.labels=[good, bad]"], "was made with labels="),
    ]:
        done = run("finetune/run.py", *args, *changed)
        assert done.returncode == 2
        check_sentence(done.stderr, message)
        assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == there


def test_a_folder_with_another_vocabulary_is_refused(folder, documents, tmp_path, monkeypatch, capsys):
    model = shutil.copytree(folder / "model", tmp_path / "model")
    train_tokenizer(documents, TokenizerConfig(vocab_size=250)).save(model / "spiece.model")
    args = [
        "task=classify",
        f"init_from={model}",
        f"data.dir={folder}",
        "data.train=[train.tsv]",
        "data.dev=[dev.tsv]",
        "data.text=[text]",
    ]
    monkeypatch.setattr("sys.argv", ["run.py", *args])
    refused(capsys, "is not the vocabulary that the model was saved with")


def test_predicting_with_a_model_that_was_not_fine_tuned_is_refused(folder):
    with pytest.raises(ValueError, match=r"has no task.json; it is a model that was not fine-tuned"):
        predict.main([str(folder / "model")])


def test_a_line_that_the_task_cannot_read_is_named_once_those_before_it_are_answered(
    tokenizer, folder, tmp_path, capsys
):
    from finetune.config import TaskDataConfig
    from finetune.tasks.registry import build_task
    from tests.parity.test_huggingface_heads import make
    from xlpre.conversion.task_model import save_task_model

    settings = {"text": ["one", "two"], "labels": ["good", "bad"]}
    task = build_task("classify", TaskDataConfig(**settings), "last")
    save_task_model(tmp_path / "model", make(tokenizer, task, "last"))
    for line, message in [
        ("ba", r"line 2: classify reads one and two; the line has 1 text"),
        ('{"one": "ba"}', r"line 2: there is no column 'two'; there are id, one"),
        ('{"one": "ba", "two": 3}', r"line 2: 'two' is 3, where a text is needed"),
        ('{"one": ', r"line 2: not JSON"),
        ("{sic} ba", r'line 2: not JSON .* a text that begins so is given as \{"one": '),
        ('["ba"]', r"line 2: classify reads one and two; the line has 1 text"),
    ]:
        (tmp_path / "lines").write_text(f"{json.dumps({'one': 'ba', 'two': ''})}\n{line}\n")
        with pytest.raises(ValueError, match=message):
            predict.main([str(tmp_path / "model"), str(tmp_path / "lines")])
        assert json.loads(capsys.readouterr().out)["prediction"] in settings["labels"]


def test_both_texts_may_stand_in_a_list_and_a_line_that_is_waited_for_is_answered_before_the_next_is_read(tokenizer):
    from finetune.config import TaskDataConfig
    from finetune.tasks.registry import build_task
    from tests.parity.test_huggingface_heads import make

    task = build_task("classify", TaskDataConfig(text=["one", "two"], labels=["good", "bad"]), "last")
    n_read, model = 0, make(tokenizer, task, "last")

    def typed():
        nonlocal n_read
        for n_read, line in enumerate(("ba\tbe", '["ba", "be"]', "[ba]\tbe"), 1):
            yield f"line {n_read}", line

    answers = [(n_read, one["probabilities"]) for one in predict.predict(model, task, typed(), chunk=1)]
    assert [number for number, _ in answers] == [1, 2, 3]
    assert answers[0][1] == answers[1][1] != answers[2][1]


@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
def test_a_file_with_columns_is_answered_row_by_row_and_other_lines_as_they_are(tmp_path, name):
    tab = "," if name == "a.csv" else "\t"
    (tmp_path / name).write_text(f"label{tab}text\ngood{tab}ba\nbad{tab}be\n")
    fields = [entry["text"] for _, entry in read_input(tmp_path / name, ("text",))]
    assert fields == ["ba", "be"]
    (tmp_path / "b.tsv").write_text("ba\tbe\nbi\tbo\n")
    assert [line for _, line in read_input(tmp_path / "b.tsv", ("text",))] == ["ba\tbe", "bi\tbo"]


def test_a_file_of_squad_as_distributed_is_answered_question_by_question(tmp_path):
    paragraphs = [
        {"context": word, "qas": [{"id": f"{word} {n}", "question": "fa?"} for n in (1, 2)]} for word in ("ba", "be")
    ]
    (tmp_path / "test-v2.0.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}, indent=1))
    entries = list(read_input(tmp_path / "test-v2.0.json", (), is_squad=True))
    assert [(fields["id"], fields["context"]) for _, fields in entries] == [
        ("ba 1", "ba"),
        ("ba 2", "ba"),
        ("be 1", "be"),
        ("be 2", "be"),
    ]


def test_what_comes_in_is_read_as_a_file_is(tmp_path, monkeypatch):
    content = b'\xef\xbb\xbf{"text": "ba"}\r\nb\re\n\xff\n'
    (tmp_path / "lines").write_bytes(content)
    with open(tmp_path / "lines", "rb") as file:
        before = os.dup(0)
        os.dup2(file.fileno(), 0)
        entries = read_input(None, ("text",))
        assert [next(entries), next(entries)] == [("stdin, line 1", '{"text": "ba"}'), ("stdin, line 2", "b\re")]
        with pytest.raises(ValueError, match="stdin, line 3: not UTF-8"):
            next(entries)
        os.dup2(before, 0)
        os.close(before)


def test_a_file_called_stdin_is_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stdin").write_text("ba\n")
    assert list(read_input(Path("stdin"), ("text",))) == [("stdin, line 1", "ba")]
