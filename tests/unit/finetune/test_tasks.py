"""Each task reads its files as they are distributed, and writes what its judges want."""

import csv
import json
import zipfile

import numpy as np
import pytest

from finetune.config import TaskDataConfig
from finetune.examples import Split
from finetune.glue import LAYOUTS
from finetune.race import with_option
from finetune.table import gather
from finetune.tasks import NAMES, build_task

TRAIN = {  # two rows of each file, as distributed
    "glue/cola": ("CoLA", "gj04\t1\t\tA good one.\ngj04\t0\t*\tOne a good.\n"),
    "glue/sst-2": ("SST-2", "sentence\tlabel\na fine film \t1\ndull \t0\n"),
    "glue/mrpc": ("MRPC", "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t1\t2\tA b .\tB a .\n0\t3\t4\tC .\tD .\n"),
    "glue/qqp": ("QQP", "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n7\t1\t2\tWho?\tWhat?\t1\n8\t1\t2\tWho?\n9\t3\t4\tWhy?\t\t0\n"),
    "glue/sts-b": ("STS-B", "index\tgenre\tsentence1\tsentence2\tscore\n0\tmain\tA.\tB.\t5.000\n1\tmain\tC.\tD.\t0.250\n"),
    "glue/mnli": ("MNLI", "index\tsentence1\tsentence2\tlabel1\tgold_label\n0\tA.\tB.\tneutral\tneutral\n1\tC.\tD.\tneutral\tentailment\n"),
    "glue/qnli": ("QNLI", "index\tquestion\tsentence\tlabel\n0\tWho?\tHe.\tentailment\n1\tWhy?\tIt.\tnot_entailment\n"),
    "glue/rte": ("RTE", "index\tsentence1\tsentence2\tlabel\n0\tA.\tB.\tnot_entailment\n1\tC.\tD.\tentailment\n"),
    "glue/wnli": ("WNLI", "index\tsentence1\tsentence2\tlabel\n0\tA.\tB.\t1\n1\tC.\tD.\t0\n"),
}  # fmt: skip
ANSWERS = {
    "glue/cola": [1, 0],
    "glue/sst-2": [1, 0],
    "glue/mrpc": [1, 0],
    "glue/qqp": [1, 0],
    "glue/sts-b": [5.0, 0.25],
    "glue/mnli": [2, 1],
    "glue/qnli": [0, 1],
    "glue/rte": [1, 0],
    "glue/wnli": [1, 0],
}


def build(name, folder, **data):
    return build_task(name, TaskDataConfig(dir=str(folder), **data), "last")


def write_glue(folder, name):
    """Training and dev files with the rows above, test files with the texts alone."""
    layout = LAYOUTS[name]
    sub, rows = TRAIN["glue/mnli" if name == "glue/ax" else name]
    place = folder / sub
    place.mkdir()
    for file in ("train.tsv", *layout.dev):
        (place / file).write_text(rows)
    texts = layout.columns.texts
    lines = ["\t".join(("index", *texts)), *("\t".join((str(i), *("X y.",) * len(texts))) for i in range(3))]
    for file in layout.test:
        (place / file).parent.mkdir(exist_ok=True)
        (place / file).write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("name", TRAIN)
def test_the_tasks_of_glue_are_read_as_distributed(name, tmp_path):
    write_glue(tmp_path, name)
    for folder in (tmp_path, tmp_path / TRAIN[name][0]):  # all of GLUE, or the task alone
        task = build(name, folder)
        for split in ("train", *task.dev):
            found = task.read(split)
            assert [example.answer for example in found] == ANSWERS[name]
            assert all(len(example.texts) == len(LAYOUTS[name].columns.texts) for example in found)
        for split in task.test:
            assert [example.answer for example in task.read(split)] == [None] * 3
    assert ", line " in found[0].place


def submitted(task, folder, logits):
    splits = {name: task.read(name) for name in task.test}
    predictions = {
        name: task.predictions(Split(name, examples, []), {"logits": logits}) for name, examples in splits.items()
    }
    task.submit(folder, predictions)
    with zipfile.ZipFile(folder / "submission.zip") as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


@pytest.mark.parametrize(
    ("name", "files", "answers"),
    [
        ("glue/cola", ["CoLA.tsv"], ["1", "0", "1"]),
        ("glue/mnli", ["AX.tsv", "MNLI-m.tsv", "MNLI-mm.tsv"], ["entailment", "contradiction", "neutral"]),
        ("glue/ax", ["AX.tsv"], ["entailment", "contradiction", "neutral"]),
        ("glue/rte", ["RTE.tsv"], ["not_entailment", "entailment", "not_entailment"]),
        ("glue/qnli", ["QNLI.tsv"], ["not_entailment", "entailment", "not_entailment"]),
    ],
)
def test_a_submission_has_the_names_the_header_and_the_labels_of_glue(name, files, answers, tmp_path):
    write_glue(tmp_path, name)
    n_classes = len(LAYOUTS[name].columns.labels)
    logits = np.eye(3)[[1, 0, 2]] if n_classes == 3 else np.eye(2)[[1, 0, 1]]
    content = submitted(build(name, tmp_path), tmp_path, logits.astype(np.float32))
    assert sorted(content) == files
    for text in content.values():
        assert text == "index\tprediction\n" + "".join(f"{i}\t{answer}\n" for i, answer in enumerate(answers))


def test_scores_of_sts_b_stay_on_its_scale(tmp_path):
    write_glue(tmp_path, "glue/sts-b")
    content = submitted(build("glue/sts-b", tmp_path), tmp_path, np.array([-0.5, 2.34567, 7], np.float32))
    assert content == {"STS-B.tsv": "index\tprediction\n0\t0.0\n1\t2.3457\n2\t5.0\n"}


def test_runs_are_gathered_into_one_submission(tmp_path):
    for run, name, rows in (("a", "WNLI.tsv", 146), ("b", "MRPC.tsv", 1725)):
        (tmp_path / run / "predictions").mkdir(parents=True)
        (tmp_path / run / "predictions" / name).write_text("index\tprediction\n" + "0\t1\n" * rows)
    missing = gather([tmp_path / "a", tmp_path / "b"], tmp_path / "all.zip")
    assert zipfile.ZipFile(tmp_path / "all.zip").namelist() == ["MRPC.tsv", "WNLI.tsv"]
    assert len(missing) == 9 and "AX.tsv" in missing
    (tmp_path / "a" / "predictions" / "WNLI.tsv").write_text("index\tprediction\n0\t1\n")
    with pytest.raises(ValueError, match=r"WNLI.tsv has 1 answers; a submission has 146"):
        gather([tmp_path / "a"], tmp_path / "all.zip")


def write_race(folder):
    for split in ("train", "dev", "test"):
        for level, answers in (("middle", "AB"), ("high", "D")):
            (folder / split / level).mkdir(parents=True)
            content = {
                "article": "A passage.",
                "questions": ["It is _ .", "What?"][: len(answers)],
                "options": [["a", "b", "c", "d"]] * len(answers),
                "answers": list(answers),
                "id": f"{level}1.txt",
            }
            (folder / split / level / "1.txt").write_text(json.dumps(content))


def test_race_is_read_level_by_level_with_options_in_blanks(tmp_path, tokenizer):
    write_race(tmp_path)
    task = build("race", tmp_path, max_len=32)
    first, second, third = task.read("dev")
    assert first.texts == ("A passage.", "It is a .", "It is b .", "It is c .", "It is d .")
    assert second.texts[4] == "What? d"
    assert [(x.answer, x.group) for x in (first, second, third)] == [(0, "middle"), (1, "middle"), (3, "high")]
    assert [x.group for x in build("race/high", tmp_path).read("train")] == ["high"]
    items = task.encode([first, second, third], tokenizer)
    assert [len(item.rows) for item in items] == [4, 4, 4]
    logits = np.eye(4)[[0, 2, 3]].astype(np.float32)
    found = task.measure(Split("dev", [first, second, third], items), {"logits": logits})
    assert found == {"accuracy": 2 / 3, "accuracy_high": 1.0, "accuracy_middle": 0.5}
    assert task.predictions(Split("dev", [first], []), {"logits": logits[1:2]})[0]["prediction"] == "C"


def test_a_long_passage_is_cut_and_the_end_of_an_option_kept(tmp_path, tokenizer):
    write_race(tmp_path)
    task = build("race", tmp_path, max_len=32, max_option_len=8)
    example = task.example({"article": "ba " * 90, "question": "be " * 30, "options": ["bi", "bo", "bu", "da"]}, "")
    for row, option in zip(task.encode([example], tokenizer)[0].rows, ("bi", "bo", "bu", "da"), strict=True):
        assert len(row.ids) == 32 and (row.segments == 1).sum() == 9
        assert tokenizer.decode(row.ids[row.segments == 1]).endswith(option)
    assert with_option("a _ b _", "x") == "a x b x"


def test_corpora_are_read_as_distributed_and_a_part_held_out(tmp_path):
    place = tmp_path / "ag_news_csv"
    place.mkdir()
    for name, count in (("train", 200), ("test", 5)):
        with open(place / f"{name}.csv", "w", newline="") as file:
            writer = csv.writer(file, quoting=csv.QUOTE_ALL)
            writer.writerows([number % 4 + 1, f'A "title" {number}', "one\\ntwo"] for number in range(count))
    task = build("ag-news", tmp_path)
    train, held_out, test = (task.read(split) for split in ("train", *task.dev, *task.test))
    assert len(train) + len(held_out) == 200 and 5 < len(held_out) < 45
    assert not {x.texts for x in train} & {x.texts for x in held_out}
    assert test[1].texts == ('A "title" 1 one\ntwo',) and [x.answer for x in test] == [0, 1, 2, 3, 0]
    assert task.predictions(Split("test", test[:1], []), {"logits": np.eye(4)[:1]})[0]["prediction"] == "World"


def test_imdb_is_read_from_its_folders(tmp_path):
    for split in ("train", "test"):
        for label in ("neg", "pos"):
            (tmp_path / "aclImdb" / split / label).mkdir(parents=True)
            for number in range(20):
                (tmp_path / "aclImdb" / split / label / f"{number}_3.txt").write_text(f"So<br />{number} {label}")
    task = build("imdb", tmp_path)
    assert [x.answer for x in task.read("test")] == [0] * 20 + [1] * 20
    assert task.read("test")[0].texts == ("So 0 neg",)
    assert len(task.read("train")) + len(task.read("held_out")) == 40


def test_own_files_bring_their_labels_and_columns(tmp_path):
    (tmp_path / "a.csv").write_text("topic,one,two\n10,A,B\n9,C,D\n10,E,F\n")
    (tmp_path / "b.jsonl").write_text('{"topic": 9, "one": "X", "two": "Y"}\n')
    task = build("classify", tmp_path, train=["a.csv"], dev=["b.jsonl"], text=["two", "one"], label="topic")
    assert task.labels == ["9", "10"]
    assert [x.texts for x in task.read("train")] == [("B", "A"), ("D", "C"), ("F", "E")]
    assert task.read("b")[0].answer == 0
    again = build_task("classify", TaskDataConfig(**task.settings()), "last")  # as a saved folder has it
    assert again.example({"one": "X", "two": "Y"}, "").texts == ("Y", "X") and again.labels == task.labels


def test_a_dataset_is_read_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    for split, count in (("train", 4), ("test", 2)):
        rows = [{"text": f"Ba {number}", "label": number % 2} for number in range(count)]
        (tmp_path / "data" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = f"hf:{tmp_path / 'data'}"
    task = build_task(
        "classify", TaskDataConfig(train=[f"{source}:train"], dev=[f"{source}:test"], text=["text"]), "last"
    )
    assert task.labels == ["0", "1"] and task.dev == ("test",)
    assert [(x.texts, x.answer) for x in task.read("test")] == [(("Ba 0",), 0), (("Ba 1",), 1)]
    assert task.read("test")[1].place == f"{source}:test, row 2"
    with pytest.raises(ValueError, match="name its split"):
        build_task("classify", TaskDataConfig(train=[source], text=["text"]), "last")


def test_examples_to_predict_may_leave_the_truth_open_and_others_may_not(tmp_path):
    (tmp_path / "train.tsv").write_text("text\tlabel\nx\tgood\ny\tbad\n")
    (tmp_path / "open.jsonl").write_text('{"text": "x", "label": -1}\n{"text": "y", "label": ""}\n{"text": "z"}\n')
    settings = {"train": ["train.tsv"], "text": ["text"]}
    task = build("classify", tmp_path, test=["open.jsonl"], **settings)
    assert [x.answer for x in task.read("open")] == [None] * 3
    with pytest.raises(ValueError, match="line 1: the label '-1' in 'label' is none of bad, good"):
        build("classify", tmp_path, dev=["open.jsonl"], **settings).read("open")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("glue/mprc", "glue/mrpc"), ("mrpc", "glue/mrpc"), ("GLUE/CoLA", "glue/cola"), ("sst2", "glue/sst-2"), ("race/low", "race")],
)  # fmt: skip
def test_a_misspelt_task_names_the_nearest(name, nearest):
    with pytest.raises(ValueError, match=f"there is no such task; did you mean {nearest}"):
        build_task(name, TaskDataConfig(), "last")
    with pytest.raises(ValueError, match="there are glue/cola"):
        build_task("zzzzzz", TaskDataConfig(), "last")


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("classify", "regress")])
def test_a_task_without_its_folder_says_what_it_should_hold(name, tmp_path):
    for folder, message in ((tmp_path / "no", "there is no such folder; it should hold"), ("", "set data.dir")):
        with pytest.raises(ValueError, match=message):
            build(name, folder).read("train")


def test_settings_that_a_task_has_no_use_for_are_refused(tmp_path):
    with pytest.raises(ValueError, match="data.text=.* has no effect on task=glue/cola"):
        build("glue/cola", tmp_path, text=["a"])
    with pytest.raises(ValueError, match="data.train=.* has no effect on task=race"):
        build("race", tmp_path, train=["a"])


def test_a_wrong_row_is_named_with_its_line(tmp_path):
    (tmp_path / "a.tsv").write_text("text\tlabel\nx\tgood\ny\tbad\n")
    (tmp_path / "b.tsv").write_text("text\tlabel\nx\tgood\n\tbad\ny\tfine\n")
    task = build("classify", tmp_path, train=["a.tsv"], dev=["b.tsv"], text=["text"])
    with pytest.raises(ValueError, match=r"b.tsv, line 3: the text in 'text' is empty"):
        task.read("b")
    (tmp_path / "c.tsv").write_text("text\tlabel\nx\ta\n")
    with pytest.raises(ValueError, match="holds the label 'a' only; at least two"):
        build("classify", tmp_path, train=["c.tsv"], text=["text"])
    with pytest.raises(ValueError, match="both called a"):
        build("classify", tmp_path, train=["a.tsv"], dev=["x/a.tsv", "y/a.tsv"], text=["text"])
    with pytest.raises(ValueError, match=r"data.text: \[COLUMN\]"):
        build("classify", tmp_path, train=["a.tsv"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answers": ["E", "B"]}, "question 1: the answer 'E' is none of A, B, C, D"),
        ({"options": [["a", "b"], ["a", "b", "c", "d"]]}, "question 1: .* must be 4 options"),
        ({"answers": ["A"]}, "2 questions, 2 lists of options and 1 answers"),
        ({"article": ""}, "question 1: article, question and options must be texts"),
        ({"questions": None}, "there is no column 'questions'"),
    ],
)
def test_a_wrong_question_of_race_is_named_with_its_file(change, message, tmp_path):
    write_race(tmp_path)
    path = tmp_path / "dev" / "middle" / "1.txt"
    content = {**json.loads(path.read_text()), **change}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    with pytest.raises(ValueError, match=f"1.txt.*{message}"):
        build("race", tmp_path).read("dev")
    path.write_text(path.read_text()[:-5])
    with pytest.raises(ValueError, match="1.txt: not JSON"):
        build("race", tmp_path).read("dev")
