"""Fine-tuning as its users run it: it learns, in the same way on any number of processes, and goes on where it was stopped."""

import json
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from tests.conftest import REPOSITORY, write_folder
from tests.integration.conftest import answers_of, environment, run_together
from xlpre.conversion.model_folder import load_folder
from xlpre.training import checkpoint
from xlpre.training.metrics import read_metrics

pytestmark = pytest.mark.xdist_group("finetuning")  # on one worker, so that what many tests look at is made once
MEMORY = {"data__long": "memory", "data__max_len": 8, "data__mem_len": 12}
SCRIPT = "tests/integration/several_finetunings.py"


def write_examples(folder, documents):
    """Sentences of made-up words, whose label is whether one word is among them; their lengths differ much."""
    rng = np.random.default_rng(0)
    words = {word for document in documents for line in document for word in line.lower().split() if word.isalpha()}
    mark, *others = sorted(words)[:9]
    for name, count in (("train", 160), ("dev", 33), ("test", 7)):
        lines = []
        for number in range(count):
            text = [str(word) for word in rng.choice(others, rng.integers(2, 12))]
            marked = bool(number % 2)
            if marked:
                text[rng.integers(len(text))] = mark
            label = "" if name == "test" else f"\t{'with' if marked else 'without'}\t{float(marked)}"
            lines.append(" ".join(text) + label + "\n")
        header = "text\n" if name == "test" else "text\tkind\tvalue\n"
        (folder / f"{name}.tsv").write_text(header + "".join(lines))


@pytest.fixture(scope="module")
def words(tokenizer, documents, tmp_path_factory):
    """Words of a tiny fine-tuning, whose model and examples are made here."""
    folder = tmp_path_factory.mktemp("finetuning")
    model = write_folder(folder / "model", tokenizer)
    write_examples(folder, documents)
    settings = {
        "task": "classify",
        "init": model,
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

    def made(name, **changes):
        changed = {key.replace("__", "."): value for key, value in changes.items()}
        both = {**settings, "name": name, "run_dir": folder / name, **changed}
        return [f"{key}={value}" for key, value in both.items()]

    made.folder = folder
    return made


def finetune(*jobs, processes=1):
    """Run them one after another; a job is its words, or words and the step to stop at."""
    usual = {"stop_at": None, "draws": False}
    given = [{**usual, **({"words": job} if isinstance(job, list) else job)} for job in jobs]
    done = run_together(processes, SCRIPT, json.dumps(given))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def losses(run_dir, seed=1):
    return {x["step"]: (x["loss"], x["grad_norm"]) for x in read_metrics(run_dir / f"seed_{seed}") if "lr" in x}


def scores(run_dir, seed=1):
    return {x["step"]: x["dev/loss"] for x in read_metrics(run_dir / f"seed_{seed}") if "dev/loss" in x}


def predictions(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def near(found, expected, tolerance=2e-5):
    assert found.keys() == expected.keys()
    assert max(np.abs(np.subtract(found[step], expected[step])).max() for step in expected) < tolerance


def plain_and_scaled(words, stage):
    """Two runs of one update, of which the second scales gradients layer by layer."""
    settings = {"deepspeed.zero_optimization.stage": stage, "optim__clip": 1e-3}
    scaled = {"optim__layer_decay": 0.25, "optim__layer_decay_mode": "grad_scale"}
    jobs = [words(f"plain_{stage}", **settings), words(f"scaled_{stage}", **settings, **scaled)]
    return [{"words": job, "stop_at": 1} for job in jobs]


@pytest.fixture(scope="module")
def one_process(words):
    """Runs of one process: the reference, and others that only differ in what must change no number."""
    stopped = words("stopped", model__dropout=0.1, model__dropatt=0.1)
    long = {"train__steps": 100, "eval__every": 50, "schedule__warmup_steps": 30, "train__log_every": 10}
    return finetune(
        {"words": words("learned", **long, seeds=2), "draws": True},
        words("reference"),
        words("reference_memory", **MEMORY),
        words("accumulated", train__accumulation=4, data__pass_tokens=10**9),
        {"words": stopped, "stop_at": 6},
        stopped,
        words("whole", model__dropout=0.1, model__dropatt=0.1),
        {"words": words("number", task="regress", data__label="value", eval__keep="last"), "draws": True},
        *plain_and_scaled(words, 1),
        words("tired", optim__lr=1e-9, eval__every=1, eval__patience=2),
    )


def test_a_tiny_task_is_learned_to_the_last_example(words, one_process):
    folder = words.folder / "learned"
    for seed in (1, 2):
        result = json.loads((folder / f"seed_{seed}" / "result.json").read_text())
        assert result["scores"]["dev/accuracy"] == 1.0
        assert len(predictions(folder / f"seed_{seed}" / "dev.jsonl")) == 33
    row = (folder / "table.csv").read_text().splitlines()
    assert row[0].startswith("name,task,score,median") and row[1].startswith("learned,classify,dev/accuracy,1.0000")
    assert {path.name for path in folder.glob("*.png")} == {"curves.png", "confusion.png", "calibration.png"}
    assert len(predictions(folder / "predictions" / "test.jsonl")) == 7


def test_numbers_are_answered_and_the_last_weights_kept_where_asked(words, one_process):
    folder = words.folder / "number"
    result = json.loads((folder / "seed_1" / "result.json").read_text())
    assert result["kept_step"] == 8 and list(result["scores"]) == ["dev/pearson", "dev/spearman", "dev/loss"]
    assert all(isinstance(one["prediction"], float) for one in predictions(folder / "predictions" / "test.jsonl"))
    assert (folder / "answers.png").exists()


def test_it_stops_early_when_nothing_gets_better(words, one_process):
    result = json.loads((words.folder / "tired" / "seed_1" / "result.json").read_text())
    assert result["kept_step"] == 1 and result["steps"] == 3 and result["scores"]["dev/accuracy"] <= result["chance"]
    assert "1 of 1 at chance" in one_process


def test_how_a_batch_is_cut_changes_no_number(words, one_process):
    near(losses(words.folder / "accumulated"), losses(words.folder / "reference"))
    near(scores(words.folder / "accumulated"), scores(words.folder / "reference"))


@pytest.mark.long
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_stage_changes_no_number(words, one_process, stage):
    settings = {"deepspeed.zero_optimization.stage": stage, "train__accumulation": 2}
    finetune(words(f"stage{stage}", **settings))
    near(losses(words.folder / f"stage{stage}"), losses(words.folder / "reference"))


def test_a_run_asked_to_stop_goes_on_to_the_same_numbers(words, one_process):
    assert "stopped with seed 1 and saved" in one_process
    assert losses(words.folder / "stopped") == losses(words.folder / "whole")
    assert scores(words.folder / "stopped") == scores(words.folder / "whole")
    assert not (words.folder / "stopped" / "seed_1" / "checkpoints").exists()  # it is finished


@pytest.mark.parametrize("stage", [1, *(pytest.param(stage, marks=pytest.mark.long) for stage in (0, 2, 3))])
def test_the_gradient_of_lower_layers_is_scaled_after_clipping_where_asked(words, one_process, stage):
    if stage != 1:
        finetune(*plain_and_scaled(words, stage))
    found, expected = (
        checkpoint.SavedMoments(words.folder / f"{name}_{stage}" / "seed_1/checkpoints/step_00000001")
        for name in ("scaled", "plain")
    )
    for name in expected:
        if name.endswith("/exp_avg"):
            for_all_layers = name.endswith(("r_bias/exp_avg", "seg_embed/exp_avg"))  # in the published code
            scale = 0.25 if name.startswith("backbone.layers.0.") and not for_all_layers else 1.0
            torch.testing.assert_close(found[name], scale * expected[name], rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("stage", [1, *(pytest.param(stage, marks=pytest.mark.long) for stage in (0, 2, 3))])
def test_two_processes_give_the_same_numbers_and_each_answer_once(words, one_process, stage):
    settings = {"deepspeed.zero_optimization.stage": stage}
    finetune(words(f"two_{stage}", **settings), words(f"two_{stage}_memory", **settings, **MEMORY), processes=2)
    for long in ("", "_memory"):
        folder, reference = words.folder / f"two_{stage}{long}", words.folder / f"reference{long}"
        near(losses(folder), losses(reference))
        near(scores(folder), scores(reference))
        for name in ("seed_1/dev.jsonl", "predictions/test.jsonl"):
            ours, theirs = predictions(folder / name), predictions(reference / name)
            assert [(x["id"], x["prediction"]) for x in ours] == [(x["id"], x["prediction"]) for x in theirs]
            for one, other in zip(ours, theirs, strict=True):
                assert one["probabilities"] == pytest.approx(other["probabilities"], abs=1e-4)


def test_the_result_is_a_model_folder_that_answers_and_from_which_training_goes_on(words, one_process, tmp_path):
    folder = words.folder / "learned"
    assert load_folder(folder / "model").config.n_layer == 2
    texts = [line.split("\t")[0] for line in (words.folder / "dev.tsv").read_text().splitlines()[1:]]
    answers = answers_of(folder, texts)
    best = json.loads((folder / "model" / "provenance.json").read_text())["seed"]
    expected = predictions(folder / f"seed_{best}" / "dev.jsonl")
    assert [x["prediction"] for x in answers] == [x["prediction"] for x in expected]
    assert [x["id"] for x in answers] == [str(number + 1) for number in range(33)]


@pytest.mark.long
def test_a_stopped_run_goes_on_with_another_number_of_processes_and_stage(words, one_process):
    moved = [words("moved", **{"deepspeed.zero_optimization.stage": stage}) for stage in (1, 3)]
    finetune({"words": moved[0], "stop_at": 5})
    finetune(moved[1], processes=2)
    near(losses(words.folder / "moved"), losses(words.folder / "reference"))


@pytest.mark.long
def test_a_run_killed_without_warning_goes_on_to_the_same_numbers(words, tmp_path):
    settings = {"model__dropout": 0.1, "train__save_every": 3, "train__steps": 40}
    whole, killed = words("unkilled", **settings), words("killed", **settings)
    finetune(whole)
    process = subprocess.Popen(
        [sys.executable, str(REPOSITORY / "finetune/run.py"), *killed],
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    while max(losses(words.folder / "killed"), default=0) < 10 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()
    process.wait()
    finetune(killed)
    assert losses(words.folder / "killed") == losses(words.folder / "unkilled")
    assert scores(words.folder / "killed") == scores(words.folder / "unkilled")
