import csv
import io
import json
import zipfile
from pathlib import Path

import pytest

from finetune import compare
from finetune.trainer.results import FORMAT, Result, merge_glue_submissions, read_run, result_paths, summarize
from xlpre.common.tables import to_csv, to_markdown


def make_result(seed, score, metric="accuracy", lr=2e-5):
    return Result(
        name="a",
        task="glue/rte",
        seed=seed,
        main_metric=f"dev/{metric}",
        metrics={f"dev/{metric}": score, "dev/loss": 1 - score},
        chance_threshold=0.58,
        model_step=20,
        lr=lr,
        steps=40,
        train_seconds=65.0,
    )


def test_runs_are_summarized_by_median_spread_and_number_at_chance():
    summary = summarize([make_result(1, 0.7), make_result(2, 0.53), make_result(3, 0.75)])
    assert summary.medians == {"dev/accuracy": 0.7, "dev/loss": pytest.approx(0.3)} and summary.n_at_chance == 1
    text = summary.describe()
    for part in ("glue/rte", "dev/accuracy", "0.7000", "0.5300", "0.7500", "0.1153", "1 of 3", "0.5800"):
        assert part in text
    (row,) = csv.DictReader(io.StringIO(to_csv([summary.to_row()])))
    assert (row["median"], row["min"], row["max"], row["std"]) == ("0.7000", "0.5300", "0.7500", "0.1153")
    assert (row["runs"], row["at chance"], row["time per run"]) == ("3", "1", "1 min 5 s")
    lines = to_markdown([summary.to_row(), summary.to_row()]).splitlines()
    assert len(lines) == 4 and len({line.count("|") for line in lines}) == 1


def test_a_run_is_read_in_the_order_of_seeds_without_copies_of_their_folders(tmp_path):
    for folder, seed in (("seed_10", 10), ("seed_2", 2), ("seed_2_backup", 2)):
        make_result(seed, seed / 100).write(tmp_path / folder / "result.json", {"format": FORMAT})
    assert [path.parent.name for path in result_paths(tmp_path)] == ["seed_2", "seed_10"]
    assert read_run(tmp_path).scores == [0.02, 0.1]


def test_one_run_has_no_spread():
    summary = summarize([make_result(1, 0.7)])
    assert summary.describe() == "result of glue/rte: dev/accuracy 0.7000" and summary.to_row()["std"] == ""


def test_a_run_at_chance_level_names_the_baseline_the_threshold_and_a_remedy():
    warning = summarize([make_result(1, 0.178, lr=2e-5)]).chance_warning()
    assert warning.startswith(
        "accuracy 0.178 is no better than always predicting one class (0.580 or less counts as chance)"
    )
    assert "Try another learning rate than optim.lr=2e-5" in warning


def test_there_is_no_chance_warning_if_every_run_has_learned():
    assert not summarize([make_result(1, 0.7), make_result(2, 0.6)]).chance_warning()


@pytest.mark.parametrize(
    ("metric", "baseline"),
    [("matthews", "random guessing"), ("ndcg@10", "a random order"), ("f1", "a trivial baseline")],
)
def test_a_chance_warning_names_the_baseline_of_the_metric(metric, baseline):
    warning = summarize([make_result(1, 0.2, metric)]).chance_warning()
    assert f"{metric} 0.200 is no better than {baseline}" in warning


def test_a_comparison_skips_unfinished_runs_and_prints_their_names(tmp_path, capsys):
    (tmp_path / "mine" / "seed_1").mkdir(parents=True)
    make_result(1, 0.7).write(tmp_path / "mine" / "seed_1" / "result.json", {"format": FORMAT})
    (tmp_path / "pretrained").mkdir()
    compare.main([f"{tmp_path}/mine", f"{tmp_path}/pretrained"])
    out, err = capsys.readouterr()
    assert "0.7000" in out and len(out.splitlines()) == 3
    assert "skipped" in err and err.endswith(f": {tmp_path}/pretrained\n")
    for names in (["pretrained"], ["mine", "mime"]):  # nothing is finished, and a folder that does not exist
        with pytest.raises(ValueError, match=f"{names[-1]} is invalid: it has no seed_"):
            compare.main([f"{tmp_path}/{name}" for name in names])


def test_a_folder_without_results_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has no .*result.json"):
        read_run(tmp_path)


def write_glue_run(folder, file, n_rows):
    """Write a finished run with predictions for a test file of GLUE."""
    make_result(1, 0.7).write(folder / "seed_1" / "result.json", {"format": FORMAT})
    (folder / "predictions").mkdir()
    (folder / "predictions" / file).write_text("index\tprediction\n" + "0\t1\n" * n_rows)
    return str(folder)


def test_the_command_prints_csv_and_merges_predictions(tmp_path, capsys):
    runs = [write_glue_run(tmp_path / "a", "WNLI.tsv", 146), write_glue_run(tmp_path / "b", "MRPC.tsv", 1725)]
    compare.main([*runs, "--csv"])
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert rows == [read_run(Path(run)).to_row() | {"runs": "1", "at chance": "0", "steps": "40"} for run in runs]
    compare.main([*runs, "--submission", str(tmp_path / "all.zip")])
    message = capsys.readouterr().err
    assert message.startswith(f"{tmp_path}/all.zip: incomplete, missing AX.tsv, CoLA.tsv, MNLI-m.tsv, ")
    assert zipfile.ZipFile(tmp_path / "all.zip").namelist() == ["MRPC.tsv", "WNLI.tsv"]


def test_predictions_that_do_not_make_a_submission_are_refused(tmp_path):
    first, second = (Path(write_glue_run(tmp_path / name, "WNLI.tsv", 146)) for name in ("first", "second"))
    other, none = Path(write_glue_run(tmp_path / "other", "mine.tsv", 3)), tmp_path / "none"
    for runs, message in (
        (
            [first, second],
            r"second/predictions/WNLI.tsv and .*first/predictions/WNLI.tsv are .* the same task. Name only",
        ),
        ([other, none], r"none: no predictions for a test file of GLUE. Name folders of GLUE runs"),
    ):
        with pytest.raises(ValueError, match=message):
            merge_glue_submissions(runs, tmp_path / "all.zip")
    assert not (tmp_path / "all.zip").exists()
    merge_glue_submissions([first, other], tmp_path / "all.zip")
    assert zipfile.ZipFile(tmp_path / "all.zip").namelist() == ["WNLI.tsv"]


@pytest.mark.parametrize("content", [{"kept_step": 20, "facts": {"format": 2}}, {"manifest": {"format": FORMAT - 1}}])
def test_a_result_of_an_older_version_is_refused_in_one_sentence(tmp_path, content):
    (tmp_path / "result.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"result.json was written by another version.*another name"):
        Result.read(tmp_path / "result.json")


@pytest.mark.parametrize("content", ["", "[]", json.dumps({"manifest": {"format": FORMAT}}), "{"])
def test_a_damaged_result_is_refused_with_a_remedy(tmp_path, content):
    (tmp_path / "result.json").write_text(content)
    with pytest.raises(ValueError, match=r"result.json is not a valid result.*Remove it"):
        Result.read(tmp_path / "result.json")


def test_a_bar_in_a_table_cell_is_escaped():
    assert to_markdown([{"row": "pre | norm", "loss": 1.5}]).splitlines()[2] == r"| pre \| norm | 1.5 |"
