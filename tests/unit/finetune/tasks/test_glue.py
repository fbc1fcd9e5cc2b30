"""The tasks of GLUE are read as they are distributed, and what is submitted is what its judges want."""

import zipfile

import numpy as np
import pytest

from finetune.config import TaskDataConfig
from finetune.data.examples import Split
from finetune.tasks.glue import GLUE_LAYOUTS
from finetune.tasks.registry import build_task
from finetune.trainer.results import merge_glue_submissions

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
    layout = GLUE_LAYOUTS[name]
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
        for split in ("train", *task.dev_splits):
            found = task.read_split(split)
            assert [example.label for example in found] == ANSWERS[name]
            assert all(len(example.texts) == len(GLUE_LAYOUTS[name].columns.texts) for example in found)
        for split in task.test_splits:
            assert [example.label for example in task.read_split(split)] == [None] * 3
    assert ", line " in found[0].place


def submitted(task, folder, logits):
    splits = {name: task.read_split(name) for name in task.test_splits}
    predictions = {
        name: task.to_predictions(Split(name, examples, []), {"logits": logits}) for name, examples in splits.items()
    }
    task.write_submission(folder, predictions)
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
    n_classes = len(GLUE_LAYOUTS[name].columns.labels)
    logits = np.eye(3)[[1, 0, 2]] if n_classes == 3 else np.eye(2)[[1, 0, 1]]
    content = submitted(build(name, tmp_path), tmp_path, logits.astype(np.float32))
    assert sorted(content) == files
    for text in content.values():
        assert text == "index\tprediction\n" + "".join(f"{i}\t{answer}\n" for i, answer in enumerate(answers))


def test_scores_of_sts_b_stay_on_its_scale(tmp_path):
    write_glue(tmp_path, "glue/sts-b")
    content = submitted(build("glue/sts-b", tmp_path), tmp_path, np.array([-0.5, 2.34567, 7], np.float32))
    assert content == {"STS-B.tsv": "index\tprediction\n0\t0.0\n1\t2.34567\n2\t5.0\n"}


def test_runs_are_gathered_into_one_submission(tmp_path):
    for run, name, rows in (("a", "WNLI.tsv", 146), ("b", "MRPC.tsv", 1725)):
        (tmp_path / run / "predictions").mkdir(parents=True)
        (tmp_path / run / "predictions" / name).write_text("index\tprediction\n" + "0\t1\n" * rows)
    missing = merge_glue_submissions([tmp_path / "a", tmp_path / "b"], tmp_path / "all.zip")
    assert zipfile.ZipFile(tmp_path / "all.zip").namelist() == ["MRPC.tsv", "WNLI.tsv"]
    assert len(missing) == 9 and "AX.tsv" in missing
    (tmp_path / "a" / "predictions" / "WNLI.tsv").write_text("index\tprediction\n0\t1\n")
    with pytest.raises(ValueError, match=r"WNLI.tsv has 1 .*146"):
        merge_glue_submissions([tmp_path / "a"], tmp_path / "all.zip")
