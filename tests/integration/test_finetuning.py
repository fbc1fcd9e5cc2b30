"""Fine-tuning by its commands: it learns, equally on any number of processes, and resumes."""

import csv
import json
import re
import shutil
import signal

import numpy as np
import pytest
import torch

from tests.conftest import write_folder
from tests.integration.conftest import call, predictions_for, run, run_together
from xlpre.conversion.model_folder import load_folder
from xlpre.conversion.task_model_folder import load_task_model
from xlpre.training import checkpoint
from xlpre.training.metrics_writer import read_metrics

pytestmark = pytest.mark.xdist_group("finetuning")  # on one worker, so that the shared runs are made once
MEMORY = {"data__long_text": "memory", "data__max_seq_len": 8, "data__mem_len": 12}
SCRIPT = "tests/integration/several_finetunings.py"
STAGES = [1, *(pytest.param(stage, marks=pytest.mark.long) for stage in (0, 2, 3))]


def write_examples(folder, documents):
    """Write sentences of random words and lengths. The label says if one certain word is among them."""
    rng = np.random.default_rng(0)
    words = {word for document in documents for line in document for word in line.lower().split() if word.isalpha()}
    marker, *others = sorted(words)[:9]
    for name, n_lines in (("train", 160), ("dev", 33), ("test", 7)):
        lines = []
        for number in range(n_lines):
            text = [str(word) for word in rng.choice(others, rng.integers(2, 12))]
            is_marked = bool(number % 2)
            if is_marked:
                text[rng.integers(len(text))] = marker
            label = "" if name == "test" else f"\t{'with' if is_marked else 'without'}\t{float(is_marked)}"
            lines.append(" ".join(text) + label + "\n")
        header = "text\n" if name == "test" else "text\tkind\tvalue\n"
        (folder / f"{name}.tsv").write_text(header + "".join(lines))


@pytest.fixture(scope="module")
def make_args(tokenizer, documents, tmp_path_factory):
    """A function from name and changes to the arguments of a tiny fine-tuning."""
    folder = tmp_path_factory.mktemp("finetuning")
    model = write_folder(folder / "model", tokenizer)
    write_examples(folder, documents)
    settings = {
        "task": "classify",
        "init_from": model,
        "data.dir": folder,
        "data.train": "[train.tsv]",
        "data.dev": "[dev.tsv]",
        "data.test": "[test.tsv]",
        "data.text": "[text]",
        "data.label": "kind",
        "data.forward_overhead_tokens": 16,
        "optim.lr": 0.01,
        "train.steps": 8,
        "train.global_batch_size": 16,
        "train.log_every": 1,
        "eval.every": 4,
        "eval.batch_size": 8,
    }

    def make(name, **changes):
        changed = {key.replace("__", "."): value for key, value in changes.items()}
        merged = {**settings, "name": name, "run_dir": folder / name, **changed}
        return [f"{key}={value}" for key, value in merged.items()]

    make.folder = folder
    return make


def finetune(*jobs, processes=1):
    """Run jobs one after another. A job is a list of arguments, or a dict for several_finetunings.py."""
    defaults = {"stop_at": None, "plot": False}
    complete = [{**defaults, **({"args": job} if isinstance(job, list) else job)} for job in jobs]
    result = run_together(processes, SCRIPT, json.dumps(complete))
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return result.stdout


def losses(run_dir, seed=1):
    return {x["step"]: (x["loss"], x["grad_norm"]) for x in read_metrics(run_dir / f"seed_{seed}") if "lr" in x}


def dev_losses(run_dir, seed=1):
    return {x["step"]: x["dev/loss"] for x in read_metrics(run_dir / f"seed_{seed}") if "dev/loss" in x}


def read_jsonl(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_result(run_dir, seed=1):
    return json.loads((run_dir / f"seed_{seed}" / "result.json").read_text())


def read_table(run_dir):
    """Return the row of a run in its table, without the name and the time."""
    (row,) = csv.DictReader((run_dir / "table.csv").open())
    return {key: value for key, value in row.items() if key not in ("name", "time per run")}


def assert_close(actual, expected, tolerance=2e-5):
    assert actual.keys() == expected.keys()
    assert max(np.abs(np.subtract(actual[step], expected[step])).max() for step in expected) < tolerance


def plain_and_scaled(make_args, stage):
    """Return two jobs of one step. The second scales gradients by layer."""
    settings = {"deepspeed.zero_optimization.stage": stage, "optim__max_grad_norm": 1e-3}
    scaled = {"optim__layer_decay": 0.25, "optim__layer_decay_mode": "grad_scale"}
    jobs = [make_args(f"plain_{stage}", **settings), make_args(f"scaled_{stage}", **settings, **scaled)]
    return [{"args": job, "stop_at": 1} for job in jobs]


@pytest.fixture(scope="module")
def one_process(make_args):
    """Output of runs in one process: a reference, and others that must give the same numbers."""
    dropout = {"model__dropout": 0.1, "model__dropatt": 0.1}
    stopped = make_args("stopped", **dropout)
    long = {"train__steps": 100, "eval__every": 50, "schedule__warmup_steps": 30, "train__log_every": 10}
    no_improvement = {"optim__lr": 1e-9, "eval__every": 1}
    early_stopped = make_args("early_stopped_resumed", **no_improvement, eval__early_stopping_patience=4)
    return finetune(
        {"args": make_args("learned", **long, num_seeds=2), "plot": True},
        make_args("reference"),
        make_args("reference_memory", **MEMORY),
        make_args("accumulated", train__micro_batch_size=4, data__forward_overhead_tokens=10**9),
        {"args": stopped, "stop_at": 6},
        stopped,
        make_args("uninterrupted", **dropout),
        {"args": make_args("number", task="regress", data__label="value", eval__keep_weights="last"), "plot": True},
        *plain_and_scaled(make_args, 1),
        {"args": early_stopped, "stop_at": 3},
        early_stopped,
        make_args("early_stopped", **no_improvement, eval__early_stopping_patience=2),
    )


def test_a_tiny_task_is_learned_to_the_last_example(make_args, one_process):
    folder = make_args.folder / "learned"
    for seed in (1, 2):
        assert read_result(folder, seed)["metrics"]["dev/accuracy"] == 1.0
        assert len(read_jsonl(folder / f"seed_{seed}" / "dev.jsonl")) == 33
    header, row = (folder / "table.csv").read_text().splitlines()
    assert header.startswith("name,task,metric,median") and row.startswith("learned,classify,dev/accuracy,1.0000")
    assert {path.name for path in folder.glob("*.png")} == {"curves.png", "confusion.png", "calibration.png"}
    assert len(read_jsonl(folder / "predictions" / "test.jsonl")) == 7


def test_a_regression_predicts_numbers_and_may_keep_the_last_weights(make_args, one_process):
    folder = make_args.folder / "number"
    result = read_result(folder)
    assert result["model_step"] == 8 and list(result["metrics"]) == ["dev/pearson", "dev/spearman", "dev/loss"]
    predictions = read_jsonl(folder / "predictions" / "test.jsonl")
    assert all(isinstance(prediction["prediction"], float) for prediction in predictions)
    assert (folder / "predictions.png").exists()


def test_a_run_without_improvement_stops_early_and_its_last_line_says_what_to_try(make_args, one_process):
    result = read_result(make_args.folder / "early_stopped")
    assert result["model_step"] == 1 and result["steps"] == 3
    assert result["metrics"]["dev/accuracy"] <= result["chance_threshold"]
    last_line = one_process.splitlines()[-1]
    assert "no better than always predicting one class" in last_line and "3e-4 to 1e-3" in last_line
    assert "seed 1 stopped early at step 3 of 8: no better score in 2 evaluations" in one_process


def test_a_resumed_run_counts_the_evaluations_without_improvement_from_before(make_args, one_process):
    """It was stopped at step 3, after 1 of 4 evaluations without improvement; that of step 3 takes place when it resumes."""
    assert "stopped at step 3 of seed 1 and saved" in one_process
    result = read_result(make_args.folder / "early_stopped_resumed")
    assert result["model_step"] == 1 and result["steps"] == 5


def test_the_division_of_a_batch_changes_no_number(make_args, one_process):
    assert_close(losses(make_args.folder / "accumulated"), losses(make_args.folder / "reference"))
    assert_close(dev_losses(make_args.folder / "accumulated"), dev_losses(make_args.folder / "reference"))


@pytest.mark.long
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_zero_stage_changes_no_number(make_args, one_process, stage):
    settings = {"deepspeed.zero_optimization.stage": stage, "train__micro_batch_size": 8}
    finetune(make_args(f"stage{stage}", **settings))
    assert_close(losses(make_args.folder / f"stage{stage}"), losses(make_args.folder / "reference"))


def test_a_stopped_run_resumes_to_the_same_numbers(make_args, one_process):
    assert "stopped at step 6 of seed 1 and saved" in one_process
    stopped, uninterrupted = make_args.folder / "stopped", make_args.folder / "uninterrupted"
    assert losses(stopped) == losses(uninterrupted)
    assert dev_losses(stopped) == dev_losses(uninterrupted)
    assert_equal_weights(stopped, uninterrupted)
    assert not (stopped / "seed_1" / "checkpoints").exists()  # the run is finished


def test_the_result_after_a_kill_is_that_of_an_uninterrupted_run(make_args):
    """The run is killed after the evaluation of step 6, and its time is up at the latest checkpoint, of step 4."""
    settings = {"task": "regress", "data__label": "value", "eval__every": 2, "train__steps": 20}
    whole, killed = make_args.folder / "whole_best", make_args.folder / "killed_best"
    args = make_args("killed_best", **settings)
    jobs = [{"args": args, "stop_at": step, "signal": kind, "plot": False} for step, kind in ((4, 15), (7, 9))]
    assert run_together(1, SCRIPT, json.dumps(jobs)).returncode == -signal.SIGKILL
    scores = {x["step"]: x["dev/pearson"] for x in read_metrics(killed / "seed_1") if "dev/pearson" in x}
    assert scores[6] > scores[4] > scores[2]
    stopped = {"args": make_args("whole_best", **settings), "stop_at": 4}
    finetune([*args, "train.hours=1e-9"], stopped, [*stopped["args"], "train.hours=1e-9"])
    result, expected = read_result(killed), read_result(whole)
    assert (result["metrics"], result["model_step"]) == (expected["metrics"], 4)
    assert_equal_weights(killed, whole)


def assert_equal_weights(run_dir, other):
    weights, expected = load_task_model(run_dir).weights, load_task_model(other).weights
    assert weights.keys() == expected.keys() and all(torch.equal(weights[name], expected[name]) for name in weights)


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_of_lower_layers_are_scaled_after_clipping(make_args, one_process, stage):
    if stage != 1:
        finetune(*plain_and_scaled(make_args, stage))
    saved = [make_args.folder / f"{name}_{stage}" / "seed_1/checkpoints/step_00000001" for name in ("scaled", "plain")]
    scaled, plain = (checkpoint.saved_moments(path, checkpoint.read_manifest(path)) for path in saved)
    for name in plain:
        if name.endswith("/exp_avg"):
            is_shared = name.endswith(("r_bias/exp_avg", "seg_embed/exp_avg"))  # by all layers in the published code
            scale = 0.25 if name.startswith("backbone.layers.0.") and not is_shared else 1.0
            torch.testing.assert_close(scaled[name][:], scale * plain[name][:], rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("stage", STAGES)
def test_two_processes_give_the_same_numbers_and_predict_each_example_once(make_args, one_process, stage):
    settings = {"deepspeed.zero_optimization.stage": stage}
    jobs = make_args(f"two_{stage}", **settings), make_args(f"two_{stage}_memory", **settings, **MEMORY)
    finetune(*jobs, processes=2)
    for suffix in ("", "_memory"):
        folder, reference = make_args.folder / f"two_{stage}{suffix}", make_args.folder / f"reference{suffix}"
        assert_close(losses(folder), losses(reference))
        assert_close(dev_losses(folder), dev_losses(reference))
        for name in ("seed_1/dev.jsonl", "predictions/test.jsonl"):
            actual, expected = read_jsonl(folder / name), read_jsonl(reference / name)
            assert [(x["id"], x["prediction"]) for x in actual] == [(x["id"], x["prediction"]) for x in expected]
            for ours, theirs in zip(actual, expected, strict=True):
                assert ours["probabilities"] == pytest.approx(theirs["probabilities"], abs=1e-4)


def test_processes_that_share_encoded_examples_compute_the_same_bits_as_processes_that_encode_all(make_args):
    dropout = {"model__dropout": 0.1, "model__dropatt": 0.1}
    alone, shared = make_args("encode_alone", **dropout), make_args("encode_shared", **dropout)
    output = finetune({"args": alone, "encode_alone": True}, shared, processes=2)
    encodes = [re.findall(r"process (\d) encodes (\d+) examples", part) for part in output.split("encode_shared", 1)]
    assert sorted(encodes[0]) == sorted((rank, n) for rank in "01" for n in ("160", "33", "7"))
    assert encodes[1] == [("0", n) for n in ("160", "33", "7")]
    folders = [make_args.folder / name for name in ("encode_alone", "encode_shared")]
    for read in (losses, dev_losses, lambda folder: read_jsonl(folder / "predictions" / "test.jsonl")):
        assert read(folders[0]) == read(folders[1])
    weights = [load_task_model(folder / "model").weights for folder in folders]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_invalid_examples_end_all_processes_with_one_message(make_args):
    rows = make_args.folder / "no_tokens.tsv"
    rows.write_text("text\tkind\n\u200b\twith\nba\twithout\n")
    result = run_together(2, "finetune/run.py", *make_args("invalid", data__train="[no_tokens.tsv]"))
    assert result.returncode == 2 and result.stderr.count("error: ") == 1, result.stderr
    assert "line 2: '\\u200b' has no tokens" in result.stderr
    assert not (make_args.folder / "invalid").exists()


def test_the_result_is_a_model_folder_that_predicts(make_args, one_process):
    folder = make_args.folder / "learned"
    assert load_folder(folder / "model").config.n_layer == 2
    texts = [line.split("\t")[0] for line in (make_args.folder / "dev.tsv").read_text().splitlines()[1:]]
    predictions = predictions_for(folder, texts)
    best_seed = load_folder(folder / "model").provenance["seed"]
    expected = read_jsonl(folder / f"seed_{best_seed}" / "dev.jsonl")
    assert [x["prediction"] for x in predictions] == [x["prediction"] for x in expected]


def test_a_row_has_the_same_id_in_the_run_in_a_predicted_file_and_among_predicted_lines(make_args, one_process):
    """The id of a row without one is its number in the file, from 0, without the header."""
    folder, test = make_args.folder / "learned", make_args.folder / "test.tsv"
    of_run = read_jsonl(folder / "predictions" / "test.jsonl")
    of_file = run("finetune/predict.py", folder, test)
    assert of_file.returncode == 0, of_file.stderr
    of_lines = predictions_for(folder, test.read_text().splitlines()[1:])
    for predictions in (of_run, [json.loads(line) for line in of_file.stdout.splitlines()], of_lines):
        assert [(x["id"], x["prediction"]) for x in predictions] == [
            (str(number), x["prediction"]) for number, x in enumerate(of_run)
        ]
    rows = [{"id": "x1", "text": "ba"}, {"text": "be"}, {"index": 7, "text": "bi"}]
    assert [x["id"] for x in predictions_for(folder, [json.dumps(row) for row in rows])] == ["x1", "1", "7"]


@pytest.mark.long
def test_the_model_card_has_the_scores_of_the_exported_weights_and_no_path(make_args, one_process, tmp_path):
    folder = make_args.folder / "learned"
    result = call("finetune/export.py", folder, tmp_path / "exported")
    assert result.returncode == 0, result.stderr
    text = (tmp_path / "exported" / "README.md").read_text()
    provenance = json.loads((folder / "model" / "provenance.json").read_text())
    scores = read_result(folder, provenance["seed"])["metrics"]
    for name, value in scores.items():
        assert f"| {name.replace('/', ', ')} | {value:.4f} |" in text
    assert (
        "one of 2 runs. dev/accuracy of all runs: 1.0000 (median)" in text and "| Files for dev | `dev.tsv` |" in text
    )
    assert f"| Steps | {provenance['step']} of 100, each with 16 examples |" in text
    published = text + (tmp_path / "exported" / "provenance.json").read_text()
    assert str(make_args.folder) not in published and str(tmp_path) not in published
    assert call("finetune/export.py", folder / "seed_1" / "best", tmp_path / "seed_1").returncode == 0
    assert (
        f"dev, loss | {read_result(folder, 1)['metrics']['dev/loss']:.4f} |"
        in (tmp_path / "seed_1" / "README.md").read_text()
    )
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / f"seed_{provenance['seed']}" / "result.json").write_text("{")
    damaged = call("finetune/export.py", copy, tmp_path / "damaged")
    assert damaged.returncode == 0 and "warning: the model card does not contain settings and scores" in damaged.stdout


def test_a_stopped_run_resumes_with_other_processes_and_another_zero_stage(make_args, one_process):
    first, second = (make_args("moved", **{"deepspeed.zero_optimization.stage": stage}) for stage in (1, 3))
    finetune({"args": first, "stop_at": 5})
    finetune(second, processes=2)
    assert_close(losses(make_args.folder / "moved"), losses(make_args.folder / "reference"))


def test_a_killed_run_resumes_to_the_same_numbers(make_args):
    """The checkpoint of step 3 is complete when that of step 6 begins; the run is killed in step 8."""
    settings = {"model__dropout": 0.1, "train__save_every": 3, "train__steps": 12}
    args, killed, whole = make_args("killed", **settings), make_args.folder / "killed", make_args.folder / "not_killed"
    job = {"args": args, "stop_at": 8, "signal": signal.SIGKILL, "plot": False}
    assert run_together(1, SCRIPT, json.dumps([job])).returncode == -signal.SIGKILL
    saved = checkpoint.find_latest_valid(killed / "seed_1" / "checkpoints")
    assert saved.name in ("step_00000003", "step_00000006") and max(losses(killed)) == 7
    damaged = saved.with_name("step_00000009")
    shutil.copytree(saved, damaged)
    (damaged / "model/model.safetensors").write_bytes(b"damaged")
    resumed = finetune(args)
    assert f"seed 1: resumes from {saved} at step {int(saved.name[-8:])} (skipped checkpoints with" in resumed
    assert re.search(r"damaged files: (step_\d+, )?step_00000009\)", resumed)
    assert "seed 1, step 1:" not in resumed and "seed 1, step 8:" in resumed
    finetune(make_args("not_killed", **settings))
    assert losses(killed) == losses(whole) and dev_losses(killed) == dev_losses(whole)
    assert_equal_weights(killed, whole)


def test_killed_in_its_second_seed_or_raised_to_two_seeds_a_run_has_the_results_of_an_uninterrupted_one(make_args):
    settings = {"model__dropout": 0.1, "train__save_every": 3}
    killed = make_args("killed_in_seed_2", **settings, num_seeds=2)
    job = {"args": killed, "stop_at": 7, "in_seed": 2, "signal": signal.SIGKILL, "plot": False}
    assert run_together(1, SCRIPT, json.dumps([job])).returncode == -signal.SIGKILL
    folders = [make_args.folder / name for name in ("killed_in_seed_2", "raised", "two_seeds")]
    assert [path.parent.name for path in folders[0].glob("seed_*/result.json")] == ["seed_1"]
    assert checkpoint.find_latest_valid(folders[0] / "seed_2" / "checkpoints")
    output = finetune(
        killed,
        make_args("raised", **settings),
        make_args("raised", **settings, num_seeds=2),
        make_args("two_seeds", **settings, num_seeds=2),
        make_args("raised", **settings, num_seeds=1),  # the result of the other seed still counts
    )
    assert output.count("training: seed 2 (the other 1 finished);") == 2
    for folder in folders[:2]:
        assert_equal_weights(folder, folders[2])
        for name in ("seed_1/dev.jsonl", "seed_2/dev.jsonl", "predictions/test.jsonl"):
            assert read_jsonl(folder / name) == read_jsonl(folders[2] / name), name
        assert read_table(folder) == read_table(folders[2])
