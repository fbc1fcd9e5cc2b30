import csv
import io

import pytest

from finetune import compare
from finetune.trainer.results import Result, read_run, summarize
from xlpre.common.tables import to_csv, to_markdown


def result(seed, score):
    return Result(
        name="a",
        task="glue/rte",
        seed=seed,
        score="dev/accuracy",
        scores={"dev/accuracy": score, "dev/loss": 1 - score},
        chance=0.58,
        kept_step=20,
        steps=40,
        seconds=65.0,
    )


def test_runs_become_median_spread_and_a_count_of_those_at_chance():
    summary = summarize([result(1, 0.7), result(2, 0.53), result(3, 0.75)])
    assert summary.medians == {"dev/accuracy": 0.7, "dev/loss": pytest.approx(0.3)} and summary.n_at_chance == 1
    assert summary.sentence() == (
        "glue/rte: dev/accuracy median 0.7000 of 3 runs (0.5300 to 0.7500, standard deviation 0.1153), 1 of 3 at chance (at most 0.5800)"
    )
    (row,) = csv.DictReader(io.StringIO(to_csv([summary.row()])))
    assert (row["median"], row["lowest"], row["highest"], row["deviation"]) == ("0.7000", "0.5300", "0.7500", "0.1153")
    assert (row["runs"], row["at chance"], row["time of a run"]) == ("3", "1", "1 min 5 s")
    lines = to_markdown([summary.row(), summary.row()]).splitlines()
    assert len(lines) == 4 and len({line.count("|") for line in lines}) == 1


def test_one_run_has_no_spread():
    summary = summarize([result(1, 0.7)])
    assert summary.sentence() == "glue/rte: dev/accuracy 0.7000" and summary.row()["deviation"] == ""


def test_a_table_leaves_out_what_is_no_finished_run_and_says_so(tmp_path, capsys):
    (tmp_path / "mine" / "seed_1").mkdir(parents=True)
    result(1, 0.7).write(tmp_path / "mine" / "seed_1" / "result.json", {"format": 1})
    (tmp_path / "pretrained").mkdir()
    compare.main([f"{tmp_path}/mine", f"{tmp_path}/pretrained"])
    out, err = capsys.readouterr()
    assert "0.7000" in out and len(out.splitlines()) == 3
    assert err == f"left out, as no run of a fine-tuning is finished there: {tmp_path}/pretrained\n"
    for words in (["pretrained"], ["mine", "mime"]):  # nothing, and what is not there
        with pytest.raises(ValueError, match=f"{words[-1]}: holds no seed_"):
            compare.main([f"{tmp_path}/{word}" for word in words])


def test_a_run_is_read_back_and_a_folder_without_one_refused(tmp_path):
    for seed in (2, 10):
        (tmp_path / f"seed_{seed}").mkdir()
        result(seed, 0.6 + seed / 100).write(tmp_path / f"seed_{seed}" / "result.json", {"format": 1})
    assert read_run(tmp_path).values == [0.62, 0.7]
    with pytest.raises(ValueError, match="it is not the folder of a finished fine-tuning"):
        read_run(tmp_path / "seed_2")


@pytest.mark.parametrize("content", ["", "[]", "{}", "{"])
def test_a_damaged_result_is_named_with_what_to_do(tmp_path, content):
    (tmp_path / "result.json").write_text(content)
    with pytest.raises(ValueError, match=r"result.json: cannot be read as a result .*; remove it"):
        Result.read(tmp_path / "result.json")


def test_a_bar_in_a_cell_moves_no_column():
    assert to_markdown([{"row": "pre | norm", "loss": 1.5}]).splitlines()[2] == r"| pre \| norm | 1.5 |"
