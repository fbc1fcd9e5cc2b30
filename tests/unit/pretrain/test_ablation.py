"""Rows of an ablation: what is checked, what a run is told, and what is made of its metrics."""

import dataclasses
import json
from pathlib import Path

import pytest

from pretrain.ablate import main
from pretrain.config import PretrainConfig
from pretrain.tools.ablation import Ablation, table
from tests.conftest import REPOSITORY
from xlpre.config.loader import load_config, save_config

BASE = "name: mine\nmodel: {n_layer: 2}\n"


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Write an ablation with these rows, and work where its runs will be."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text(BASE)

    def write(rows: dict[str, list[str]], **more) -> Path:
        path = tmp_path / "some.yaml"
        path.write_text(json.dumps({"base": "base.yaml", "rows": rows, **more}))
        return path

    return write


def measure(run: str, seed: int, losses: list, unigram: float = 6.0) -> None:
    folder = Path("runs/some") / run / f"seed_{seed}"
    folder.mkdir(parents=True)
    about = {"val_unigram_loss": unigram, "val_accuracy": 0.25}
    lines = [
        {
            "step": k,
            "tokens": k * 500_000,
            "train_seconds": k * 60.0,
            "val_loss": loss,
            "val_bpb": loss,
            **about,
        }
        for k, loss in enumerate(losses)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_run_is_the_base_with_the_words_of_its_row_and_reads_the_text_of_the_base(written):
    ablation = Ablation(written({"plain": [], "none": ["model.mem_len=0"]}, seeds=2, common=["optim.lr=0.5"]))
    assert [(run.row, run.seed) for run in ablation.runs] == [("plain", 1), ("none", 1), ("plain", 2), ("none", 2)]
    run = ablation.runs[-1]
    base = load_config(PretrainConfig, "base.yaml", ["optim.lr=0.5", "model.mem_len=0"])
    theirs = {"name": run.config.name, "run_dir": run.config.run_dir, "seed": 2}
    assert run.config == dataclasses.replace(base, **theirs)
    assert run.config.data.store_dir == "stores/mine"
    assert load_config(PretrainConfig, run.words[1], run.words[2:]) == run.config
    assert len({run.folder for run in ablation.runs}) == 4


def test_what_was_made_with_other_settings_is_not_shown_as_what_the_row_says_now(written):
    measure("high", 1, [9.0, 5.0])
    folder = Path("runs/some/high/seed_1")
    for words, message in (
        (["optim.lr=1e-2", "train.steps=7", "train.log_every=9"], None),
        (["optim.lr=1e-3"], "runs/some/high/seed_1 was made with optim.lr=0.001, row high says 0.01 now"),
        (["optim.lr=1e-2", "schedule.decay=constant"], "schedule.decay=constant, row high says"),
        (["optim.lr=1e-2", "eval.num_windows=3"], "eval.num_windows=3, row high says"),
        (["optim.lr=1e-2", "init=other"], "was made with init=other, row high says  now"),
    ):
        save_config(load_config(PretrainConfig, "base.yaml", words), folder / "config.yaml")
        if message is None:
            assert table(Ablation(written({"high": ["optim.lr=1e-2"]})))[0]["held-out loss"] == "5.000"
            continue
        with pytest.raises(ValueError, match=message):
            table(Ablation(written({"high": ["optim.lr=1e-2"]})))


@pytest.mark.parametrize(
    ("rows", "only", "message"),
    [
        ({"a": ["model.memlen=0"]}, [], r"row a: model.memlen=0: there is no setting 'model.memlen'.*model.mem_len"),
        ({"a": [], "b": ["train.steps=0"]}, [], r"row b: .*train.steps \(0\) must be at least 1"),
        ({"a": ["seed=3"]}, [], r"row a: seed=3 is decided by the row's name and number"),
        ({"a": []}, ["c"], r"has no row 'c'; it has a$"),
        ({"a/b": []}, [], r"row 'a/b': its name is that of a folder and must not .* hold a slash"),
        ({}, [], r"needs `base:`"),
    ],
)
def test_a_row_that_is_wrong_is_told_before_anything_runs(written, rows, only, message):
    with pytest.raises(ValueError, match=message):
        Ablation(written(rows), rows=only)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seeds", "0"], r"--seeds \(0\) must be at least 1"),
        (["--jobs", "0"], r"--jobs \(0\) must be at least 1"),
        (["--processes", "0"], r"--processes \(0\) must be at least 1"),
        (["--processes", "3"], r"row a with --processes 3: train.global_batch_size \(32\) .* set train.global_batch_size=30"),
    ],
)
def test_a_number_that_is_wrong_is_told_before_anything_runs(written, words, message):
    with pytest.raises(ValueError, match=message):
        main([str(written({"a": []})), "--print", *words])


@pytest.mark.parametrize("path", sorted((REPOSITORY / "configs/ablations").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_rows_of_every_file_are_good_and_each_changes_something_else(path):
    ablation = Ablation(path, seeds=1)
    shapes = {str(dataclasses.replace(run.config, name="same", run_dir="same")) for run in ablation.runs}
    assert len(shapes) == len(ablation.rows)


def test_a_table_whose_first_row_is_not_there_yet_says_what_the_others_are_set_against(written):
    ablation = Ablation(written({"plain": [], "low": ["optim.lr=1e-3"], "high": ["optim.lr=1"]}))
    measure("low", 1, [9.0, 5.5])
    measure("high", 1, [9.0, 6.0])
    low, high = table(ablation)
    assert (low["against low"], high["against low"]) == ("+0.000", "+0.500")
    measure("plain", 1, [9.0, 5.0])
    assert [line["against the first"] for line in table(ablation)] == ["+0.000", "+0.500", "+1.000"]


def test_the_table_has_medians_over_seeds_and_where_a_run_left_word_frequencies(written):
    ablation = Ablation(
        written(
            {
                "plain": [],
                "better": ["model.mem_len=0"],
                "other": ["data.seq_len=600"],
                "early": ["optim.lr=1"],
                "unborn": ["optim.lr=2"],
            }
        ),
        seeds=3,
    )
    for seed, losses in enumerate(([9.0, 5.95, 5.8], [9.0, 5.85, 5.6], [9.0, 6.1, 5.95]), 1):
        measure("plain", seed, losses)
    measure("better", 1, [9.0, 5.5, 5.25])
    measure("other", 1, [9.0, None, None], unigram=6.5)
    measure("early", 1, [9.0, 5.5])
    plain, better, other, early = table(ablation)
    assert (plain["held-out loss"], plain["lowest to highest"], plain["runs"]) == ("5.800", "5.600 to 5.950", "3")
    assert plain["below them from, M"] == "0.50 to 1.00 (1 never)"
    assert (early["against the first"], early["after as many tokens"]) == ("-0.300", "-0.450 (0.50 M)")
    assert (better["against the first"], better["after as many tokens"]) == ("-0.550", "-0.550 (1.00 M)")
    assert (better["below them from, M"], better["changes"]) == (
        "0.50",
        "model.mem_len=0",
    )
    assert (other["against the first"], other["below them from, M"], other["held-out loss"]) == (
        "other targets",
        "never",
        "inf",
    )


def test_table_and_picture_can_be_made_of_runs_that_are_still_going(written, capsys):
    path = written({"plain": [], "other": ["model.mem_len=0"]})
    with pytest.raises(ValueError, match="holds no measured run; start it with --run"):
        main([str(path), "--table"])
    measure("other", 1, [9.0, 5.5])
    main([str(path), "--table"])
    assert "| other | model.mem_len=0 | 1 | 0.50 |" in capsys.readouterr().out
    assert {file.name for file in Path("runs/some").iterdir()} == {"other", "table.md", "table.csv", "curves.png"}


def test_a_table_of_some_rows_stands_beside_that_of_all(written):
    measure("base", 1, [9.0, 5.0])
    measure("other", 1, [9.0, 4.0])
    file = written({"base": [], "other": []})
    main([str(file), "--table"])
    main([str(file), "--table", "--rows", "other"])
    rows = {name: Path(f"runs/some/{name}.md").read_text().count("\n") - 2 for name in ("table", "some_table")}
    assert rows == {"table": 2, "some_table": 1} and Path("runs/some/some_curves.png").exists()


def test_each_command_can_be_typed(written, capsys):
    path = written({"plain": [], "other": ["eval.sentences=[a ____ b]"]})
    main([str(path), "--print", "optim.lr=0.25", "--processes", "2"])
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("torchrun --standalone --nproc_per_node 2 ") and "optim.lr=0.25" in first
    assert "'eval.sentences=[a ____ b]'" in second
