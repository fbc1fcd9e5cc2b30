"""GLUE tasks are read as distributed, and submissions have the official format."""

import json
import zipfile

import numpy as np
import pytest

from finetune.data.examples import Split
from finetune.tasks.glue import GLUE_LAYOUTS
from finetune.trainer.inference import _parse_line
from finetune.trainer.results import merge_glue_submissions
from tests.unit.finetune.conftest import build

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
LABELS = {
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


def write_glue(folder, name):
    """Write training and dev files with the rows above, and test files with the texts only."""
    layout = GLUE_LAYOUTS[name]
    subfolder, rows = TRAIN["glue/mnli" if name == "glue/ax" else name]
    task_folder = folder / subfolder
    task_folder.mkdir()
    for file in ("train.tsv", *layout.dev):
        (task_folder / file).write_text(rows)
    texts = layout.columns.texts
    lines = ["\t".join(("index", *texts)), *("\t".join((str(i), *("X y.",) * len(texts))) for i in range(3))]
    for file in layout.test:
        (task_folder / file).parent.mkdir(exist_ok=True)
        (task_folder / file).write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("name", TRAIN)
def test_glue_tasks_are_read_as_distributed(name, tmp_path):
    write_glue(tmp_path, name)
    for folder in (tmp_path, tmp_path / TRAIN[name][0]):  # all of GLUE, or the task only
        task = build(name, folder)
        for split in ("train", *task.dev_splits):
            examples = task.read_split(split)
            assert [example.label for example in examples] == LABELS[name]
            assert all(len(example.texts) == len(GLUE_LAYOUTS[name].columns.texts) for example in examples)
        for split in task.test_splits:
            assert [example.label for example in task.read_split(split)] == [None] * 3
    assert ", line " in examples[0].location


def submit(task, folder, logits):
    """Return the files of a submission with these logits in all test splits."""
    examples = {split: task.read_split(split) for split in task.test_splits}
    predictions = {
        split: task.to_predictions(Split(split, examples[split], []), {"logits": logits}) for split in examples
    }
    task.write_submission(folder, predictions)
    with zipfile.ZipFile(folder / "submission.zip") as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


@pytest.mark.parametrize(
    ("name", "files", "predictions"),
    [
        ("glue/cola", ["CoLA.tsv"], ["1", "0", "1"]),
        ("glue/mnli", ["AX.tsv", "MNLI-m.tsv", "MNLI-mm.tsv"], ["entailment", "contradiction", "neutral"]),
        ("glue/ax", ["AX.tsv"], ["entailment", "contradiction", "neutral"]),
        ("glue/rte", ["RTE.tsv"], ["not_entailment", "entailment", "not_entailment"]),
        ("glue/qnli", ["QNLI.tsv"], ["not_entailment", "entailment", "not_entailment"]),
    ],
)
def test_a_submission_has_the_file_names_header_and_labels_of_glue(name, files, predictions, tmp_path):
    write_glue(tmp_path, name)
    n_classes = len(GLUE_LAYOUTS[name].columns.label_names)
    logits = np.eye(3)[[1, 0, 2]] if n_classes == 3 else np.eye(2)[[1, 0, 1]]
    contents = submit(build(name, tmp_path), tmp_path, logits.astype(np.float32))
    assert sorted(contents) == files
    rows = "".join(f"{index}\t{prediction}\n" for index, prediction in enumerate(predictions))
    assert set(contents.values()) == {"index\tprediction\n" + rows}


def test_the_original_test_file_of_mrpc_is_submitted_as_mrpc(tmp_path):
    write_glue(tmp_path, "glue/mrpc")
    task = build("glue/mrpc", tmp_path, test=["msr_paraphrase_test.txt"])
    assert [*submit(task, tmp_path, np.zeros((3, 2), np.float32))] == ["MRPC.tsv"]


def test_a_test_file_of_cola_may_have_a_header_or_the_columns_of_the_training_file(tmp_path):
    write_glue(tmp_path, "glue/cola")
    rows = "gj04\t1\t\tThe a.\ngj04\t0\t*\tA the.\n"
    (tmp_path / "CoLA" / "labeled.tsv").write_text(rows)
    task = build("glue/cola", tmp_path, test=["labeled.tsv", "test.tsv"])
    assert [(x.texts, x.label) for x in task.read_split("labeled")] == [(("The a.",), 1), (("A the.",), 0)]
    assert len(task.read_split("test")) == 3


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("glue/rte", {"sentence1": "A.", "sentence2": "B.", "label": 0}),
        ("glue/mnli", {"sentence1": "A.", "sentence2": "B.", "gold_label": "-"}),
        ("race", {"article": "A.", "question": "B?", "options": ["C", "D", "E", "F"], "answer": 0}),
        ("squad/1.1", {"context": "A.", "question": "B?", "answers": ["A"]}),
    ],
)
def test_predictions_ignore_labels_of_any_form(name, fields, tmp_path):
    task = build(name, tmp_path)
    example = _parse_line(task, json.dumps({"id": None, **fields}), "line 1", 7)
    assert not example.label and example.id == "7"


def test_predictions_of_sts_b_are_clipped_to_its_bounds(tmp_path):
    write_glue(tmp_path, "glue/sts-b")
    contents = submit(build("glue/sts-b", tmp_path), tmp_path, np.array([-0.5, 2.34567, 7], np.float32))
    assert contents == {"STS-B.tsv": "index\tprediction\n0\t0.0\n1\t2.34567\n2\t5.0\n"}


def test_a_similarity_outside_the_bounds_of_sts_b_is_refused(tmp_path):
    write_glue(tmp_path, "glue/sts-b")
    (tmp_path / "STS-B" / "dev.tsv").write_text("index\tsentence1\tsentence2\tscore\n0\tA.\tB.\t5.5\n")
    with pytest.raises(ValueError, match="dev.tsv, line 2: score 5.5 .*between 0 and 5"):
        build("glue/sts-b", tmp_path).read_split("dev")


def test_a_test_index_that_is_there_twice_is_refused(tmp_path):
    write_glue(tmp_path, "glue/rte")
    (tmp_path / "RTE" / "test.tsv").write_text("index\tsentence1\tsentence2\n7\tA.\tB.\n7\tC.\tD.\n")
    with pytest.raises(ValueError, match="test.tsv: 2 rows .*index 7"):
        build("glue/rte", tmp_path).read_split("test")


def test_predictions_of_several_runs_are_merged_into_one_submission(tmp_path):
    for run, name, n_rows in (("a", "WNLI.tsv", 146), ("b", "MRPC.tsv", 1725)):
        (tmp_path / run / "predictions").mkdir(parents=True)
        (tmp_path / run / "predictions" / name).write_text("index\tprediction\n" + "0\t1\n" * n_rows)
    missing = merge_glue_submissions([tmp_path / "a", tmp_path / "b"], tmp_path / "all.zip")
    assert zipfile.ZipFile(tmp_path / "all.zip").namelist() == ["MRPC.tsv", "WNLI.tsv"]
    assert len(missing) == 9 and "AX.tsv" in missing
    (tmp_path / "a" / "predictions" / "WNLI.tsv").write_text("index\tprediction\n0\t1\n")
    with pytest.raises(ValueError, match="WNLI.tsv has 1 predictions.* 146"):
        merge_glue_submissions([tmp_path / "a"], tmp_path / "all.zip")
