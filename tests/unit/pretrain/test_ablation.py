"""Ablations: checks of a file, settings of its runs, and the comparison."""

import dataclasses
import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from finetune.trainer.results import FORMAT, Result
from pretrain.ablate import main
from pretrain.config import PretrainConfig
from pretrain.tools.ablation.measures import Measure, read_measures, read_results
from pretrain.tools.ablation.pictures import draw_differences, draw_losses
from pretrain.tools.ablation.plan import Ablation
from pretrain.tools.ablation.stages import Finetuning, TextEvaluation
from pretrain.tools.ablation.table import (
    build_csv_table,
    build_stage_table,
    build_table,
    describe_stages,
    write_comparison,
)
from tests.conftest import REPOSITORY
from xlpre.config.loader import load_config, save_config
from xlpre.objectives.target_sampling import n_targets_per_part

BASE = "name: mine\nmodel: {n_layer: 2}\n"


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Change into a folder, and return a function that writes an ablation file there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text(BASE)

    def write_file(rows: dict[str, list[str]], **more) -> Path:
        path = tmp_path / "some.yaml"
        path.write_text(json.dumps({"base": "base.yaml", "rows": rows, **more}))
        return path

    return write_file


def write_metrics(run: str, seed: int, losses: list, unigram: float = 6.0, **more: float) -> None:
    folder = Path("runs/some") / run / f"seed_{seed}"
    folder.mkdir(parents=True)
    constants = {"val_unigram_loss": unigram, "val_accuracy": 0.25, **more}
    lines = [
        {
            "step": k,
            "tokens": k * 500_000,
            "train_seconds": k * 60.0,
            "val_loss": loss,
            "val_bpb": loss,
            **constants,
        }
        for k, loss in enumerate(losses)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_run_has_the_base_settings_with_overrides_and_the_text_of_the_base(write):
    ablation = Ablation(write({"plain": [], "none": ["model.mem_len=0"]}, num_seeds=2, common=["optim.lr=0.5"]))
    assert [(run.row, run.seed) for run in ablation.runs] == [("plain", 1), ("none", 1), ("plain", 2), ("none", 2)]
    run = ablation.runs[-1]
    base = load_config(PretrainConfig, "base.yaml", ["optim.lr=0.5", "model.mem_len=0"])
    run_settings = {"name": run.config.name, "run_dir": run.config.run_dir, "seed": 2}
    assert run.config == dataclasses.replace(base, **run_settings)
    assert run.config.data.store_dir == "stores/mine"
    assert load_config(PretrainConfig, run.args[1], run.args[2:]) == run.config
    assert len({run.folder for run in ablation.runs}) == 4


def test_a_run_with_other_settings_than_its_row_is_refused(write):
    write_metrics("high", 1, [9.0, 5.0])
    folder = Path("runs/some/high/seed_1")
    for overrides, message in (
        (["optim.lr=1e-2", "train.log_every=9"], None),
        (["optim.lr=1e-2", "train.steps=7"], r"train.steps=100000 .*train.steps=7"),
        (["optim.lr=1e-2", "train.hours=2"], r"train.hours=null .*train.hours=2"),
        (["optim.lr=1e-3"], r"row high: optim.lr=0.01 .*runs/some/high/seed_1 .*optim.lr=0.001"),
        (["optim.lr=1e-2", "schedule.decay=constant"], "schedule.decay=constant"),
        (["optim.lr=1e-2", "eval.num_windows=3"], "eval.num_windows=3"),
        (["optim.lr=1e-2", "init_from=other"], "init_from=other"),
    ):
        save_config(load_config(PretrainConfig, "base.yaml", overrides), folder / "config.yaml")
        if message is None:
            assert build_table(Ablation(write({"high": ["optim.lr=1e-2"]})))[0]["validation loss"] == "5.000"
            continue
        with pytest.raises(ValueError, match=message):
            build_table(Ablation(write({"high": ["optim.lr=1e-2"]})))


@pytest.mark.parametrize(
    ("rows", "only", "message"),
    [
        ({"a": ["model.memlen=0"]}, [], r"row a: .*model.memlen.*model.mem_len"),
        ({"a": [], "b": ["train.steps=0"]}, [], r"row b: .*train.steps.*at least 1"),
        ({"a": [], "b": ["seed=3"]}, [], r"row b: seed=3 is invalid"),
        ({"a": []}, ["c"], r"--rows=c is invalid: .*the rows a\b"),
        ({"a/b": []}, [], r"row 'a/b' is invalid: .*slash"),
        ({}, [], r"`base:`"),
    ],
)
def test_an_invalid_row_is_refused_before_any_run_starts(write, rows, only, message):
    with pytest.raises(ValueError, match=message):
        Ablation(write(rows), rows=only)


@pytest.mark.parametrize(
    ("common", "overrides", "rows", "message"),
    [
        (["model.memlen=0"], [], {"a": []}, r"^common: .*model.memlen"),
        (["name=x"], [], {"a": []}, r"^common: name=x is invalid"),
        ([], ["train.steps=0"], {"a": []}, r"^the command line: train.steps=0"),
        ([], ["seed=7"], {"a": []}, r"^seed=7 is invalid: pretrain/ablate.py sets seed"),
        (["train.steps=0"], [], {"a": ["train.steps=5"], "b": []}, r"^common: train.steps=0"),
        (["data.seq_len=64", "data.reuse_len=32"], [], {"a": [], "b": ["data.reuse_len=100"]}, r"^row b: "),
    ],
)
def test_an_error_names_the_part_of_the_file_that_causes_it(write, common, overrides, rows, message):
    with pytest.raises(ValueError, match=message):
        Ablation(write(rows, common=common), overrides)


def test_the_base_is_found_beside_a_file_in_a_linked_folder(write, tmp_path):
    path = write({"a": []})
    (tmp_path / "real/ablations").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real/ablations")
    settings = {"base": "../settings/base.yaml", "rows": {"a": []}}
    (tmp_path / "link/some.yaml").write_text(json.dumps(settings))
    (tmp_path / "real/settings").mkdir()
    path.with_name("base.yaml").rename(tmp_path / "real/settings/base.yaml")
    assert Ablation(Path("link/some.yaml")).runs[0].args[1] == "real/settings/base.yaml"


def test_an_error_of_the_base_file_is_not_one_of_a_row(write):
    path = write({"a": []})
    path.with_name("base.yaml").write_text("train: {steps: 0}")
    with pytest.raises(ValueError, match=r"^base \S*base.yaml: train.steps=0"):
        Ablation(path)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--seeds", "0"], r"--seeds=0 is invalid"),
        (["--jobs", "0"], r"--jobs=0 is invalid"),
        (["--processes", "0"], r"--processes=0 is invalid"),
        (["--processes", "3"], r"row a with --processes 3: train.global_batch_size=32 .*30"),
    ],
)
def test_an_invalid_number_is_refused_before_any_run_starts(write, args, message):
    with pytest.raises(ValueError, match=message):
        main([str(write({"a": []})), "--print", *args])


@pytest.mark.parametrize("path", sorted((REPOSITORY / "configs/ablations").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_rows_of_every_file_are_valid_and_different(path):
    ablation = Ablation(path, num_seeds=1)
    stages = ablation.runs or ablation.stages  # `model:` has no pretraining runs
    configs = {str(dataclasses.replace(stage.config, name="same", run_dir="same")) for stage in stages}
    assert len(configs) == len(stages)


# XLNet, arXiv:1906.08237v2, Table 6: what each row changes in its row 4
DENOISING = {"objective.name": "denoising", "objective.partial_k": 6.67, "objective.max_span": 1}
TABLE_6 = {
    "k_6": {},
    "bert": DENOISING
    | {"objective.next_sentence": True, "model.positions": "learned", "model.n_positions": 512, "model.mem_len": 0}
    | {"data.bidirectional": False},
    "denoising": DENOISING,
    "k_7": {"objective.partial_k": 7},
    "no_memory": {"model.mem_len": 0},
    "no_spans": {"objective.max_span": 1},
    "no_bidirectional": {"data.bidirectional": False},
    "next_sentence": {"objective.next_sentence": True},
}


# Transformer-XL, arXiv:1901.02860, Tables 6 and 7: what each row changes in the first one
SHAW, NO_RECURRENCE, HALF = {"model.positions": "shaw"}, {"model.mem_len": 0}, {"objective.loss_on": "second_half"}
TRANSFORMER_XL_TABLE_6 = {
    "recurrence": {},
    "shaw": SHAW | {"model.n_positions": 300},
    "half": HALF,
    "no_recurrence": NO_RECURRENCE,
    "no_recurrence_half": NO_RECURRENCE | HALF,
    "no_recurrence_shaw": NO_RECURRENCE | SHAW | {"model.n_positions": 150},
    "no_recurrence_shaw_half": NO_RECURRENCE | SHAW | {"model.n_positions": 150} | HALF,
    "no_recurrence_sinusoidal_half": NO_RECURRENCE | {"model.positions": "sinusoidal"} | HALF,
    "no_recurrence_learned_half": NO_RECURRENCE | {"model.positions": "learned", "model.n_positions": 150} | HALF,
}
TRANSFORMER_XL_TABLE_7 = {"recurrence": {}, "shaw": SHAW | {"model.n_positions": 64}, "no_recurrence": NO_RECURRENCE}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("xlnet_table6", TABLE_6),
        ("transformer_xl_table6", TRANSFORMER_XL_TABLE_6),
        ("transformer_xl_table7", TRANSFORMER_XL_TABLE_7),
    ],
)
def test_the_rows_of_a_published_ablation_change_exactly_what_the_paper_changes_in_the_first(name, expected):
    ablation = Ablation(REPOSITORY / f"configs/ablations/{name}.yaml", num_seeds=1)
    settings = {run.row: flatten(dataclasses.asdict(run.config)) for run in ablation.runs}
    _, base = next(iter(settings.items()))
    changes = {
        row: {key: value for key, value in flat.items() if value != base[key] and key not in ("name", "run_dir")}
        for row, flat in settings.items()
    }
    assert [*changes] == [*expected]
    assert {row: approximate(changed) for row, changed in changes.items()} == {
        row: approximate(e) for row, e in expected.items()
    }


def approximate(settings: dict) -> dict:
    return {key: round(value, 2) if isinstance(value, float) else value for key, value in settings.items()}


def test_the_base_rows_of_the_published_ablations_are_the_published_models():
    xlnet, wt103, lm1b = (
        Ablation(REPOSITORY / f"configs/ablations/{name}.yaml", num_seeds=1).runs[0].config
        for name in ("xlnet_table6", "transformer_xl_table6", "transformer_xl_table7")
    )
    assert (xlnet.objective.partial_k, xlnet.model.mem_len) == (6, 384)
    assert (wt103.model.mem_len, wt103.data.seq_len, wt103.model.n_layer) == (150, 150, 16)
    assert (lm1b.model.mem_len, lm1b.data.seq_len, lm1b.model.n_layer, lm1b.train.steps) == (32, 32, 20, 400_000)


def test_rows_predict_as_many_tokens_as_the_published_ones():
    runs = Ablation(
        REPOSITORY / "configs/ablations/xlnet_table6.yaml", rows=["k_6", "k_7", "denoising"], num_seeds=1
    ).runs
    counts = {run.row: sum(n_targets_per_part(512, 256, run.config.objective.partial_k)) for run in runs}
    assert counts == {"k_6": 85, "k_7": 73, "denoising": int(512 * 0.15)}


def flatten(settings: dict, prefix: str = "") -> dict:
    """Return the settings by key, such as `model.mem_len`."""
    flat = {}
    for key, value in settings.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def test_before_the_first_row_is_evaluated_the_others_are_not_compared(write):
    ablation = Ablation(write({"plain": [], "low": ["optim.lr=1e-3"], "high": ["optim.lr=1"]}))
    write_metrics("low", 1, [9.0, 5.5], val_minimal_pairs=60.0)
    write_metrics("high", 1, [9.0, 6.0], val_minimal_pairs=70.0)
    for line in build_table(ablation):
        columns = ("difference from plain", "difference at equal tokens", "by seed (95 % interval)")
        assert [line[column] for column in (*columns, "minimal pairs, difference")] == [""] * 4
    write_comparison(ablation)
    records = [json.loads(line) for line in Path("runs/some/results.jsonl").read_text().splitlines()]
    assert {(each["base"], each["difference"]) for each in records} == {("plain", None)} and len(records) == 4
    write_metrics("plain", 1, [9.0, 5.0])
    assert [line["difference from plain"] for line in build_table(ablation)] == ["0.000", "+0.500", "+1.000"]


def test_the_table_has_medians_over_seeds_and_tokens_to_beat_unigram(write):
    ablation = Ablation(
        write(
            {
                "plain": [],
                "better": ["model.mem_len=0"],
                "other": ["data.seq_len=600"],
                "early": ["optim.lr=1"],
                "unborn": ["optim.lr=2"],
            }
        ),
        overrides=["train.steps=2"],
        num_seeds=3,
    )
    for seed, losses in enumerate(([9.0, 5.95, 5.8], [9.0, 5.85, 5.6], [9.0, 6.1, 5.95]), 1):
        write_metrics("plain", seed, losses)
    write_metrics("better", 1, [9.0, 5.5, 5.25])
    write_metrics("other", 1, [9.0, None, None], unigram=6.5)
    write_metrics("early", 1, [9.0, 5.5])
    plain, better, other, early = build_table(ablation)
    assert (plain["validation loss"], plain["lowest to highest"], plain["runs"]) == ("5.800", "5.600 to 5.950", "3")
    beats, final, equal = "million tokens to beat the baseline", "difference from plain", "difference at equal tokens"
    assert plain[beats] == "0.50 to 1.00 (1 never)"
    assert (early[final], early[equal], early["runs"]) == ("-0.300", "-0.450 (0.50 M)", "1 (1 unfinished)")
    assert (better[final], better[equal]) == ("-0.550", "-0.550 (1.00 M)")
    assert (better[beats], better["settings"]) == (
        "0.50",
        "model.mem_len=0",
    )
    assert (other[final], other[beats], other["validation loss"]) == (
        "not comparable",
        "never",
        "inf",
    )


def test_differences_by_seed_have_intervals_and_are_marked_as_noise(write, capsys):
    for seed, plain in enumerate((5.0, 5.4, 5.2), 1):
        pairs = [50.0, 60.0, 55.0][seed - 1]
        write_metrics("plain", seed, [9.0, plain], val_minimal_pairs=pairs)
        write_metrics("better", seed, [9.0, plain - 0.1 - 0.001 * seed], val_minimal_pairs=pairs + 2 + 0.1 * seed)
        write_metrics("same", seed, [9.0, plain + (-0.2, 0.1, 0.1)[seed - 1]], val_minimal_pairs=pairs)
    ablation = Ablation(write({"plain": [], "better": ["optim.lr=1"], "same": ["optim.lr=2"]}), num_seeds=3)
    plain, better, same = build_table(ablation)
    interval = "by seed (95 % interval)"
    assert plain[interval] == "" and better[interval].startswith("-0.102 (-0.1") and "noise" not in better[interval]
    assert same[interval].endswith(", within noise")
    assert float(better["smallest detectable difference"]) < 0.01 < float(same["smallest detectable difference"])
    assert plain["minimal pairs"] == "55.0" and better["minimal pairs, difference"].startswith("+2.2 (")
    main([str(ablation.path), "--table", "--seeds", "3"])
    assert "within noise" in capsys.readouterr().out and Path("runs/some/differences.png").exists()
    records = [json.loads(line) for line in Path("runs/some/results.jsonl").read_text().splitlines()]
    assert [(record["measure"], record["row"]) for record in records] == [
        (measure, row) for measure in ("validation loss", "minimal pairs") for row in ("plain", "better", "same")
    ]
    better = records[1]
    assert better["difference"]["mean"] == pytest.approx(-0.102) and better["by_seed"]["1"] == pytest.approx(4.899)
    assert better["base"] == "plain"


def test_without_a_number_of_seeds_the_table_has_all_runs(write, capsys):
    for seed in (1, 2, 3):
        write_metrics("plain", seed, [9.0, 5.0 + 0.1 * seed])
        write_metrics("other", seed, [9.0, 4.0 + 0.2 * seed])
    path, differences = str(write({"plain": [], "other": ["model.mem_len=0"]})), Path("runs/some/differences.png")
    main([path, "--table"])
    assert re.search(r"^plain +3 ", capsys.readouterr().out, re.MULTILINE) and differences.exists()
    main([path, "--table", "--seeds", "1"])
    assert re.search(r"^plain +1 ", capsys.readouterr().out, re.MULTILINE) and not differences.exists()


def test_the_first_row_is_the_base_even_if_its_first_seed_is_missing(write, monkeypatch):
    def read(stage):
        is_missing = stage.row == "plain" and stage.seed == 1
        loss = 5.0 if stage.row == "plain" else 4.5
        return [] if is_missing else [{"loss": loss, "mem_len": 0, "n_targets": 9 + (stage.row == "masked")}]

    monkeypatch.setattr(TextEvaluation, "read", read)
    rows = {"plain": [], "other": ["model.mem_len=0"], "masked": ["objective.name=denoising"]}
    ablation = Ablation(write(rows, num_seeds=3, evaluate={"text": {"books": "books.txt"}}))
    measure = read_measures(ablation)["books, loss"]
    assert measure.base_row == "plain" and measure.not_comparable == {"masked"}
    assert measure.difference("other").mean == -0.5 and measure.difference("other").n_pairs == 2


def test_runs_in_progress_can_be_compared_and_are_marked(write, capsys):
    path = write({"plain": [], "other": ["model.mem_len=0"]})
    with pytest.raises(ValueError, match="no evaluated run.*--run"):
        main([str(path), "--table"])
    write_metrics("other", 1, [9.0, 5.5])
    main([str(path), "--table"])
    output = capsys.readouterr().out
    assert "use --seeds 3" in output and re.search(r"^other +1 \(1 unfinished\) +1.0 +5.500 ", output, re.MULTILINE)
    files = {file.name for file in Path("runs/some").iterdir()}
    assert files == {"other", "table.md", "table.csv", "results.jsonl", "losses.png"}
    table = Path("runs/some/table.md").read_text()
    assert "| other | model.mem_len=0 | 1 (1 unfinished) | 0.50 |" in table and "use --seeds 3" in table
    (record,) = [json.loads(line) for line in Path("runs/some/results.jsonl").read_text().splitlines()]
    assert record["seeds_unfinished"] == [1]


def test_the_picture_has_a_line_of_dots_per_row_sorted_by_loss(write):
    write_metrics("plain", 1, [9.0, 5.0])
    write_metrics("plain", 2, [9.0, 5.2])
    write_metrics("better", 1, [9.0, 4.5])
    write_metrics("elsewhere", 1, [9.0, 4.0], unigram=6.5)
    write_metrics("diverged", 1, [9.0, None])
    rows = {row: [f"optim.lr=1e-{n}"] for n, row in enumerate(("plain", "better", "elsewhere", "diverged"), 2)}
    axes = draw_losses(read_results(Ablation(write(rows, num_seeds=2))), "plain").axes[0]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["diverged", "plain", "better", "elsewhere (not comparable)"]
    dots = [(*line.get_xydata()[0], line.get_marker()) for line in axes.lines if line.get_marker() in ("o", ">")]
    assert sorted(dot for dot in dots if dot[2] == "o") == [(4.0, 3, "o"), (4.5, 2, "o"), (5.0, 1, "o"), (5.2, 1, "o")]
    assert [dot[1] for dot in dots if dot[2] == ">"] == [0]
    assert [text.get_text() for text in axes.texts] == ["inf", "5.100", "4.500", "4.000"]
    assert [line.get_xdata()[0] for line in axes.lines if line.get_label() == "median of plain"] == [5.1]


@pytest.fixture
def task(tmp_path):
    """Return the part of a file that fine-tunes on a task."""
    (tmp_path / "task.yaml").write_text("task: classify\ndata: {train: [words.csv], text: [text], label: label}\n")
    return {"base": "task.yaml", "seeds": 2, "tasks": {"topics": ["train.steps=7"], "others": ["data.text=[title]"]}}


def test_each_row_and_seed_is_pretrained_then_evaluated_and_fine_tuned(write, task):
    Path("pairs.jsonl").touch()
    evaluate = {"pairs": {"agreement": "pairs.jsonl --limit 5"}, "text": {"books": "books.txt --mem-len 0,8"}}
    rows = {"plain": [], "none": ["model.mem_len=0"]}
    ablation = Ablation(write(rows, num_seeds=2, evaluate=evaluate, finetune=task))
    after = ["agreement", "books", "topics", "others"]
    names = [stage.name for stage in ablation.stages]
    assert names[:2] == ["row plain, seed 1", "row none, seed 1"] and len(names) == 2 * 2 * (1 + len(after))
    assert names[2:6] == [f"row plain, seed 1, {key}" for key in after]
    pairs, text, topics, others = ablation.stages[2:6]
    model = "runs/some/plain/seed_1/model"
    assert pairs.arguments == [
        model,
        "--pairs",
        "pairs.jsonl",
        "--limit",
        "5",
        "--out",
        str(pairs.folder / "pairs.json"),
    ]
    assert text.arguments[:4] == [model, "books.txt", "--mem-len", "0,8"] and text.needs == (Path(model).parent,)
    assert f"init_from={model}" in topics.arguments and "num_seeds=2" in topics.arguments
    assert topics.config.train.steps == 7 and others.config.data.text == ["title"]
    assert len({stage.folder for stage in ablation.stages}) == len(names)


def test_rows_of_fine_tuning_settings_start_from_one_model(write, task):
    path = write(
        {"slow": [], "fast": ["optim.lr=1e-2"]}, base="", model="some/model", num_seeds=3, finetune={**task, "seeds": 1}
    )
    ablation = Ablation(path)
    assert not ablation.runs and len(ablation.stages) == 2 * 3 * 2
    fast = next(stage for stage in ablation.stages if stage.row == "fast" and stage.seed == 3)
    assert "init_from=some/model" in fast.arguments and "seed=3" in fast.arguments and fast.config.optim.lr == 1e-2
    assert fast.needs == ()


def test_settings_of_weights_are_read_as_a_run_reads_them(write, task):
    rows = {"plain": [], "same": ["from_scratch=False"], "scratch": ["from_scratch=True"], "other": ["init_from=~/x"]}
    Path("pairs.jsonl").touch()
    path = write(
        rows, base="", model="some/model", evaluate={"pairs": {"pairs": "pairs.jsonl"}}, finetune={**task, "seeds": 1}
    )
    evaluations = {stage.row: stage.model for stage in Ablation(path).stages if not isinstance(stage, Finetuning)}
    assert evaluations == {"plain": "some/model", "same": "some/model", "other": str(Path.home() / "x")}
    of_other_model = Ablation(path, ["init_from=some/other"])  # the settings of a row win
    models = {stage.row: stage.model for stage in of_other_model.stages if isinstance(stage, Finetuning)}
    assert models == dict.fromkeys(("plain", "same", "scratch"), "some/other") | {"other": str(Path.home() / "x")}


def test_fine_tuning_of_a_model_that_does_not_exist_is_refused_before_anything_runs(write, task):
    path = write({"plain": []}, base="", model="some/model", finetune={**task, "seeds": 1})
    with pytest.raises(ValueError, match="init_from=no/model is invalid: there is no such folder"):
        Ablation(path, ["init_from=no/model"]).check_inputs()


@pytest.mark.parametrize("has_pretraining", [True, False])
def test_a_stage_is_finished_until_its_settings_or_the_weights_change(write, task, has_pretraining):
    """The weights count, not their time; and not at all for a row that is trained from scratch."""
    rows = {"plain": [], "scratch": ["from_scratch=true"]} if not has_pretraining else {"plain": []}
    run = Path("runs/some/plain/seed_1") if has_pretraining else Path("runs/given")
    source = {} if has_pretraining else {"base": "", "model": str(run)}
    Path("pairs.jsonl").touch()
    path = write(rows, evaluate={"pairs": {"agreement": "pairs.jsonl"}}, finetune={**task, "seeds": 1}, **source)
    weights = run / "model/model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"weights")

    def unfinished(path):
        stages = [stage for stage in Ablation(path).stages if not hasattr(stage, "args")]
        return stages, [f"{stage.row} {stage.key}" for stage in stages if not stage.is_finished()]

    stages, names = unfinished(path)
    assert names == [f"{stage.row} {stage.key}" for stage in stages]
    for stage in stages:
        stage.prepare()
        if isinstance(stage, Finetuning):
            fake_result(0.8).write(stage.folder / "seed_1/result.json", {"format": FORMAT})
            (stage.folder / "config.yaml").touch()
            (stage.folder / "table.csv").touch()
        else:
            stage.result_file.write_text("{}")
    assert unfinished(path)[1] == []
    weights.touch()
    assert unfinished(path)[1] == []
    weights.write_bytes(b"other weights")
    assert unfinished(path)[1] == ["plain agreement", "plain topics", "plain others"]
    for stage in stages:
        stage.prepare()
    assert not any((stage.folder / "table.csv").exists() for stage in stages if stage.row == "plain")
    scratch = [stage for stage in stages if stage.row == "scratch"]
    assert all((stage.folder / "table.csv").exists() for stage in scratch)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"evaluate": {"text": {"books": "a.txt --orders 0"}}}, "evaluate.text.books: --orders=0 is invalid"),
        ({"evaluate": {"text": {"books": "a.txt --out b"}}}, "evaluate.text.books: --out is invalid"),
        ({"evaluate": {"text": {"books": "a.txt --out=b"}}}, "evaluate.text.books: --out is invalid"),
        ({"evaluate": {"text": {"books": "a.txt --compare sliding"}}}, "evaluate.text.books: --compare is invalid"),
        ({"finetune": {"tasks": {"topics": []}}}, "finetune.tasks.topics is invalid: it has no settings file"),
        (
            {"finetune": {"base": "task.yaml", "tasks": {"topics": ["seed=3"]}}},
            "finetune.tasks.topics: seed=3 is invalid",
        ),
        (
            {"finetune": {"base": "task.yaml", "tasks": {"topics": ["optim.lr=x"]}}},
            "finetune.tasks.topics, row plain: optim.lr",
        ),
        (
            {"finetune": {"base": "task.yaml", "learning_rates": [0.1], "tasks": {"topics": ["optim.lr=1"]}}},
            "finetune.tasks.topics: optim.lr=1 is invalid",
        ),
        (
            {
                "base": "",
                "model": "some/model",
                "rows": {"plain": ["optim.lr=1"]},
                "finetune": {"base": "task.yaml", "learning_rates": [0.1], "tasks": {"topics": []}},
            },
            "row plain: optim.lr=1 is invalid",
        ),
        ({"base": "", "model": "some/model"}, "model=some/model is invalid without finetune.tasks"),
        ({"model": "some/model"}, "it must have `base:`"),
        (
            {
                "finetune": {"base": "task.yaml", "tasks": {"same": []}},
                "evaluate": {"pairs": {"same": "pairs.jsonl"}},
            },
            "'same' is invalid: two of finetune.tasks, evaluate.pairs and evaluate.text have it. Rename one.",
        ),
        (
            {"finetune": {"base": "no_task.yaml", "tasks": {"topics": []}}},
            "finetune.tasks.topics, row plain: it has no task. Add task=NAME, such as task=glue/mrpc.",
        ),
    ],
)
def test_stages_that_would_fail_are_refused_before_any_run_starts(write, task, changes, message):
    Path("no_task.yaml").write_text("data: {train: [words.csv]}\n")
    with pytest.raises(ValueError, match=re.escape(message)):
        Ablation(write(**({"rows": {"plain": []}} | changes)))


def test_all_missing_inputs_are_named_before_any_run_starts(write, task):
    Path("words.csv").write_text("text,label\n" + "".join(f"ba di {k},{'ab'[k % 2]}\n" for k in range(40)))
    evaluate = {"pairs": {"agreement": "none.jsonl"}, "text": {"books": "none/*.txt[3:] words.csv"}}
    path = write({"plain": [], "other": ["model.mem_len=0"]}, finetune=task, evaluate=evaluate)
    with pytest.raises(ValueError, match="no token store") as error:
        main([str(path), "--run"])
    first, *more = str(error.value).splitlines()
    assert first.startswith("row plain, row other: data.store_dir=stores/mine is invalid")
    assert more[0].startswith("evaluate.pairs.agreement: none.jsonl is invalid")
    assert more[1].startswith("evaluate.text.books: none/*.txt[3:] is invalid")
    assert any(line.startswith("finetune.tasks.others: ") and "'title'" in line for line in more)
    assert not Path("runs").exists()


def test_missing_minimal_pairs_are_named_before_any_run_starts(write, store):
    inputs = [f"data.store_dir={store.path}", "data.seq_len=32", "data.reuse_len=16"]
    path = write({"plain": []}, common=[*inputs, "eval.minimal_pairs=[none.jsonl]"])
    with pytest.raises(ValueError, match=r"row plain: eval.minimal_pairs: none.jsonl"):
        main([str(path), "--run"])
    assert not Path("runs").exists()


def test_losses_on_other_targets_are_not_compared(write, monkeypatch):
    def read(stage):
        objective = "denoising" if stage.row == "masked" else "permutation"
        return [
            {"loss": 5.0 + 0.1 * stage.seed, "mem_len": 0, "mode": "objective", "objective": objective, "n_targets": 9}
        ]

    monkeypatch.setattr(TextEvaluation, "read", read)
    rows = {"plain": [], "same": ["model.mem_len=0"], "masked": ["objective.name=denoising"]}
    ablation = Ablation(write(rows, num_seeds=2, evaluate={"text": {"books": "books.txt"}}))
    measure = read_measures(ablation)["books, loss"]
    assert measure.not_comparable == {"masked"} and measure.difference("masked") is None
    assert measure.difference("same").mean == 0
    cells = [line["difference from plain, by seed"] for line in build_stage_table({"books, loss": measure})]
    assert cells[0] == "" and "noise" in cells[1] and cells[2] == "not comparable"


def test_a_fine_tuning_that_stayed_at_chance_is_marked():
    measure = Measure(is_loss=False, base_row="plain")
    measure.values = {"plain": {1: 80.0, 2: 82.0}, "other": {1: 50.0, 2: 81.0}}
    measure.at_chance = {"other": {1}}
    first, second = build_stage_table({"topics, accuracy": measure})
    assert (first["median"], second["median"]) == ("81.0", "65.5 (1 of 2 at chance)")
    assert (
        second["difference from plain, by seed"].startswith("-15.5 (")
        and "noise" in second["difference from plain, by seed"]
    )


class FakeResults(dict):
    """Scores of fine-tunings by row, seed and learning rate: a list with one score per seed of the fine-tuning."""

    def read(self, stage):
        scores = self.get((stage.row, stage.seed, stage.lr), ())
        return {seed: fake_result(score) for seed, score in enumerate(scores, 1)}


def fake_result(score: float) -> Result:
    metrics = {"dev/accuracy": score, "dev/f1": score / 2, "dev/calibration_error": 0.1, "other/accuracy": 1 - score}
    return Result("name", "classify", 1, "dev/accuracy", metrics, 0.5, 1, 0.1, 2, 3.0)


def test_each_row_is_compared_at_its_best_learning_rate(write, task, monkeypatch):
    scores = FakeResults(
        {
            ("plain", 1, 0.1): [0.7, 0.8],
            ("plain", 2, 0.1): [0.7, 0.7],
            ("plain", 1, 0.2): [0.9, 0.9],  # one seed only: not chosen
            ("other", 1, 0.1): [0.6, 0.6],
            ("other", 2, 0.1): [0.6, 0.6],
            ("other", 1, 0.2): [0.5, 0.5],
            ("other", 2, 0.2): [0.8, 0.8],
        }
    )
    monkeypatch.setattr(Finetuning, "read", lambda stage: scores.read(stage))
    tasks = {"topics": ["train.steps=7"]}
    rows = {"plain": [], "other": ["model.mem_len=0"]}
    ablation = Ablation(write(rows, num_seeds=2, finetune={**task, "tasks": tasks, "learning_rates": [0.1, 0.2]}))
    stages = [stage for stage in ablation.stages if isinstance(stage, Finetuning)]
    assert [stage.config.optim.lr for stage in stages[:2]] == [0.1, 0.2]
    assert len({stage.folder for stage in stages}) == 2 * 2 * 2
    measures = read_measures(ablation)
    assert [*measures] == ["topics, accuracy", "topics, f1", "topics, other accuracy"]
    assert measures["topics, accuracy"].values == {
        "plain": {1: pytest.approx(75), 2: pytest.approx(70)},
        "other": {1: pytest.approx(50), 2: pytest.approx(80)},
    }
    plain, other = build_stage_table(measures)  # the main metric only
    assert (plain["learning rate"], other["learning rate"]) == ("0.1", "0.2")
    assert other["median"] == "65.0 (1 of 2 at chance)" and "within noise" in other["difference from plain, by seed"]
    first, second = build_csv_table(ablation, [], measures)
    assert first["topics, f1"] == "36.2" and second["topics, other accuracy"] == "35.0"
    assert second["topics, accuracy, learning rate"] == "0.2" and second["failed"] == ""


def test_with_one_pretraining_seed_the_interval_is_that_of_the_fine_tuning(write, task, monkeypatch):
    scores = FakeResults({("plain", 1, None): [0.7, 0.75, 0.72], ("other", 1, None): [0.8, 0.84, 0.83]})
    monkeypatch.setattr(Finetuning, "read", lambda stage: scores.read(stage))
    tasks = {"topics": ["train.steps=7"]}
    ablation = Ablation(write({"plain": [], "other": ["model.mem_len=0"]}, finetune={**task, "tasks": tasks}))
    measures = read_measures(ablation)
    difference = measures["topics, accuracy"].difference("other")
    assert difference.of_finetuning and difference.n_pairs == 3 and difference.mean == pytest.approx(10)
    assert build_stage_table(measures)[1]["difference from plain, by seed"].endswith(", fine-tuning seeds only)")
    (axes,) = draw_differences(measures).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["other\n(fine-tuning seeds only)"]
    assert "percentage points" in axes.get_xlabel()
    assert "seeds of the fine-tuning of one pretrained model" in describe_stages(measures)


def test_a_failed_stage_is_in_the_tables_until_it_runs_again(write, capsys):
    write_metrics("plain", 1, [9.0, 5.0])
    write_metrics("plain", 2, [9.0, 5.0])
    failed = Path("runs/some/broken/seed_2/failed.txt")
    failed.parent.mkdir(parents=True)
    failed.write_text("status 2: error: no memory\n")
    path = write({"plain": [], "broken": ["model.mem_len=0"]}, num_seeds=2)
    main([str(path), "--table"])
    assert "\nbroken, seed 2, pretraining: status 2: error: no memory\n" in capsys.readouterr().out
    files = {name: Path(f"runs/some/{name}").read_text() for name in ("table.md", "table.csv", "results.jsonl")}
    assert "| broken | 2 | pretraining | status 2: error: no memory |" in files["table.md"]
    assert "broken,model.mem_len=0," in files["table.csv"] and "seed 2: status 2" in files["table.csv"]
    assert json.loads(files["results.jsonl"].splitlines()[-1])["failed"] == "status 2: error: no memory"
    failed.unlink()
    main([str(path), "--table"])
    assert "broken" not in Path("runs/some/table.csv").read_text()


def test_published_results_stand_beside_those_of_this_project(write, capsys):
    write_metrics("plain", 1, [9.0, 5.0])
    write_metrics("other", 1, [9.0, 5.1])
    rows = {"plain": [], "other": ["model.mem_len=0"]}
    path = write(rows, published={"RACE": {"other": 65.55}})
    plain, other = build_table(Ablation(path))
    assert (plain["published: RACE"], other["published: RACE"]) == ("", "65.55")
    main([str(path), "--table"])
    assert "published" not in capsys.readouterr().out and "published: RACE" in Path("runs/some/table.md").read_text()
    with pytest.raises(ValueError, match="published: RACE: nobody is invalid.* plain, other"):
        Ablation(write(rows, published={"RACE": {"nobody": 1}}))


def test_a_difference_that_rounds_to_zero_has_no_sign_and_does_not_fill_the_picture(write):
    write_metrics("plain", 1, [9.0, 5.00003])
    write_metrics("other", 1, [9.0, 5.0])
    ablation = Ablation(write({"plain": [], "other": []}))
    assert [line["difference from plain"] for line in build_table(ablation)] == ["0.000", "0.000"]
    axes = draw_losses(read_results(ablation), ablation.base_row).axes[0]
    left, right = axes.get_xlim()
    assert left < 5.0 < right and right - left > 0.01
    axes.figure.canvas.draw()
    assert axes.xaxis.get_offset_text().get_text() == ""


def test_the_table_of_a_subset_does_not_replace_that_of_all_rows(write):
    write_metrics("base", 1, [9.0, 5.0])
    write_metrics("other", 1, [9.0, 4.0])
    file = write({"base": [], "other": []})
    main([str(file), "--table"])
    main([str(file), "--table", "--rows", "other"])
    rows = {name: Path(f"runs/some/{name}.csv").read_text().count("\n") - 1 for name in ("table", "subset_table")}
    assert rows == {"table": 2, "subset_table": 1} and Path("runs/some/subset_losses.png").exists()


def test_slurm_scripts_start_each_run_and_then_the_other_stages(write, task, capsys, monkeypatch):
    finetune = {**task, "tasks": {"topics": ["train.steps=7"]}}
    path = write({"plain": [], "other": ["eval.sentences=[a ____ b]"]}, num_seeds=2, finetune=finetune)
    path = path.rename(path.with_name("my rows.yaml"))
    main([str(path), "--print"])
    commands = [shlex.split(line)[2:] for line in capsys.readouterr().out.splitlines() if "/run.py" in line]
    pretraining = [command for command in commands if "finetune" not in " ".join(command)]
    with pytest.raises(ValueError, match=r"--submit is invalid in the folder .*: the jobs start pretrain/slurm.sh"):
        main([str(path), "--submit", "--processes", "4"])
    Path("pretrain").mkdir()
    Path("pretrain/slurm.sh").touch()
    main([str(path), "--submit", "--processes", "4"])
    count, submit = capsys.readouterr().out.splitlines()
    assert count.startswith("4 pretraining runs and 4 stages after them.")
    array, finish = Path("runs/my rows/array.sh"), Path("runs/my rows/finish.sh")
    assert "#SBATCH --job-name='my rows'\n" in array.read_text()
    assert "#SBATCH --array=0-3\n" in array.read_text() and "#SBATCH --gpus-per-node=4\n" in array.read_text()
    scripts = {"pretrain/slurm.sh": '"$@"', "bin/python": '"$@"', "bin/sbatch": '"$*" >> submitted; echo 17'}
    for script, arguments in scripts.items():
        Path(script).parent.mkdir(exist_ok=True)
        Path(script).write_text(f'#!/bin/bash\nprintf "%s\\n" {arguments}\n')
        Path(script).chmod(0o755)
    monkeypatch.setenv("PATH", f"{Path('bin').absolute()}:{os.environ['PATH']}")

    def run_script(*command: str, **environment: str) -> list[str]:
        environment = {**os.environ, **environment}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()

    for index, command in enumerate(pretraining):
        assert run_script("bash", str(array), SLURM_ARRAY_TASK_ID=str(index)) == command
    run_script("bash", "-c", submit)
    submitted = Path("submitted").read_text().splitlines()
    assert submitted == [f"--parsable {array}", f"--dependency=afterany:17 {finish}"]
    script, *arguments = run_script("bash", str(finish))
    assert script == "pretrain/ablate.py" and arguments[:2] == [str(path), "--run"]
    main([word.replace("--run", "--print") for word in arguments])
    printed = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert len(printed) == 8 and all("--nproc_per_node" in command for command in printed)


def test_only_pretraining_leaves_out_other_stages_also_in_slurm_jobs(write, task, capsys):
    path = write({"plain": [], "none": ["model.mem_len=0"]}, finetune=task)
    main([str(path), "--print", "--only-pretraining"])
    commands = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert len(commands) == 2 and all(command[1].endswith("pretrain/run.py") for command in commands)
    Path("pretrain").mkdir()
    Path("pretrain/slurm.sh").touch()
    main([str(path), "--submit", "--only-pretraining"])
    assert capsys.readouterr().out.startswith("2 pretraining runs and 0 stages after them.")
    command = Path("runs/some/finish.sh").read_text().splitlines()[-1]
    assert command == f"exec python pretrain/ablate.py {path} --run --processes 1 --seeds 1 --only-pretraining"


def test_only_pretraining_is_refused_without_pretraining(write, task):
    path = write({"plain": []}, base="", model="some/model", finetune={**task, "seeds": 1})
    with pytest.raises(
        ValueError, match=r"--only-pretraining is invalid with model=some/model .*nothing is pretrained"
    ):
        main([str(path), "--print", "--only-pretraining"])


def test_printed_commands_are_quoted(write, capsys):
    path = write({"plain": [], "other": ["eval.sentences=[a ____ b]"]})
    main([str(path), "--print", "optim.lr=0.25", "--processes", "2"])
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("torchrun --standalone --nproc_per_node 2 ") and "optim.lr=0.25" in first
    assert "'eval.sentences=[a ____ b]'" in second


def test_an_unfinished_run_with_other_settings_than_its_row_is_refused(write):
    write_metrics("other", 1, [9.0, 5.5])

    def run(*changes: str):
        return Ablation(write({"other": list(changes)})).runs[0]

    first = run("model.mem_len=4")
    save_config(dataclasses.replace(first.config, seed=first.seed), first.folder / "config.yaml")
    assert not first.is_finished()
    assert not run("model.mem_len=4", "train.steps=9").is_finished()  # it can be continued to another length
    with pytest.raises(ValueError, match=r"row other: model.mem_len=2 is invalid: .* was trained with model.mem_len=4"):
        run("model.mem_len=2").is_finished()


def test_a_row_with_another_text_needs_its_own_store(write):
    for change in ("text.max_chars=1500", "tokenizer.vocab_size=99", "text={max_chars: 1500}"):
        with pytest.raises(ValueError, match=r"row tenth: .* is invalid: it has no effect .* set data.store_dir"):
            Ablation(write({"full": [], "tenth": [change]}))
    assert Ablation(write({"full": [], "tenth": ["text.max_chars=1500", "data.store_dir=stores/tenth"]}))
    assert Ablation(write({"full": []}), ["text.max_chars=1500"])


def test_settings_of_rows_that_win_over_the_command_line_are_named(write, capsys):
    path = write({"plain": [], "low": ["optim={lr: 1e-4}"], "lowest": ["optim.lr=1e-5"]})
    write_metrics("plain", 1, [9.0, 5.0])
    main([str(path), "--table", "optim.lr=1e-2", "train.log_every=3"])
    first, *others = capsys.readouterr().out.splitlines()
    assert first == "note: optim.lr=1e-2 does not apply to the rows that set optim.lr themselves: low, lowest."
    assert not any("note:" in line for line in others)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            'base: base.yaml\nrows: {a: "optim.lr=1"}',
            r"rows.a=optim.lr=1 is invalid: it must be a list .* Set rows.a=\[",
        ),
        ("base: base.yaml\nrows: {a: [optim.lr: 1]}", r"the entry {'optim.lr': 1} of rows.a is invalid: .* quotes"),
        ("base: base.yaml\nrows: {a: null}", r"rows.a=null is invalid: it must be a list"),
        ("base: base.yaml\nrows: {5: []}", r"the name 5 in rows is invalid: it must be text"),
        ("name: mine", r"some.yaml is invalid: it is not an ablation"),
        (
            "base: base.yaml\nrows: {a: []}\nfinetune: {learning_rates: [1e-3, 0.001]}",
            r"learning_rates=.* occurs twice",
        ),
    ],
)
def test_a_file_with_values_of_another_kind_is_refused(write, content, message):
    path = write({})
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        Ablation(path)
