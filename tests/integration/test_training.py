import json
import re
import shutil
import signal
import subprocess
import sys

import psutil
import pytest
import torch

from pretrain.config import PretrainConfig
from pretrain.planning.flops import batch_shape, flops_per_step
from tests.conftest import REPOSITORY
from tests.integration.conftest import start, damage, environment, run
from xlpre.common.files import lock_dir
from xlpre.config.loader import load_config
from xlpre.conversion.model_folder import load_folder
from xlpre.training import checkpoint
from xlpre.training.metrics import read_metrics

SCRIPT = "pretrain/run.py"


def losses(run_dir):
    return {x["step"]: (x["loss"], x["grad_norm"], x["lr"]) for x in read_metrics(run_dir) if "loss" in x}


def held_out(run_dir):
    return {x["step"]: x["val_loss"] for x in read_metrics(run_dir) if "val_loss" in x}


@pytest.fixture(scope="module")
def plain_run(store, tmp_path_factory):
    """20 steps of one process; with dropout, so that the random state matters."""
    from tests.integration.conftest import SETTINGS

    folder = tmp_path_factory.mktemp("plain") / "run"
    changes = {"model.dropout": 0.1, "model.dropatt": 0.1, "train.save_every": 4, "run_dir": folder}
    settings = {**SETTINGS, **changes, "data.store_dir": store.path, "tokenizer.path": store.path / "vocabulary.model"}
    args = [f"{key}={value}" for key, value in settings.items()]
    done = run(SCRIPT, *args)
    assert done.returncode == 0, done.stderr
    return folder, args


def test_it_learns_and_leaves_a_model_folder(plain_run):
    folder, _ = plain_run
    measured = held_out(folder)
    assert measured[20] < measured[0] - 0.3
    loaded = load_folder(folder / "model")
    assert loaded.config.vocab_size == len(loaded.tokenizer) == 300


def test_its_metrics_say_speed_use_memory_and_time_left(plain_run):
    folder, args = plain_run
    lines = [line for line in read_metrics(folder) if "loss" in line]
    config = load_config(PretrainConfig, folder / "config.yaml")
    shape = batch_shape(config, config.train.global_batch_size)
    a_token = flops_per_step(config.model, shape) / (shape.rows * shape.seq_len)
    for line in lines:
        speed = line["tokens_per_second"]
        assert line["targets_per_second"] == pytest.approx(speed * shape.n_targets / shape.seq_len)
        assert line["flops_per_second"] == pytest.approx(speed * a_token)
        assert line["mfu"] is None and line["peak_memory_bytes"] > 1e7  # fp32 on a CPU
        steps_left = config.train.steps - line["step"]
        assert line["eta_seconds"] == pytest.approx(steps_left * shape.rows * shape.seq_len / speed)
    assert [line["tokens"] for line in lines[:2]] == [128, 256]


def test_a_run_killed_without_warning_goes_on_to_the_same_numbers(plain_run, tmp_path):
    plain, args = plain_run
    args = [*args, f"run_dir={tmp_path / 'killed'}"]
    fault = {"phase": "backward", "steps": [10, 99], "process": 0}
    assert run("tests/integration/faulty.py", *args, fault=fault).returncode == -signal.SIGKILL
    assert max(losses(tmp_path / "killed")) == 10
    again = run(SCRIPT, *args)
    assert again.returncode == 0 and "goes on from" in again.stdout, again.stdout + again.stderr
    assert losses(tmp_path / "killed") == losses(plain)
    assert held_out(tmp_path / "killed") == held_out(plain)


def test_a_checkpoint_holds_no_pickle_and_its_model_is_a_model_folder(plain_run):
    folder, _ = plain_run
    newest = sorted((folder / "checkpoints").glob("step_*"))[-1]
    kinds = {path.suffix for path in newest.rglob("*") if path.is_file()}
    assert kinds == {".json", ".model", ".safetensors"}
    saved, of_run = load_folder(newest / "model").weights, load_folder(folder / "model").weights
    assert all(torch.equal(saved[name], of_run[name]) for name in saved)
    assert (newest / "model" / "model.safetensors").samefile(folder / "model" / "model.safetensors")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_run_asked_to_stop_saves_and_goes_on_to_the_same_numbers(plain_run, tmp_path, number):
    plain, args = plain_run
    args = [*args, f"run_dir={tmp_path / 'stopped'}", "train.save_every=1000"]
    going = start(SCRIPT, *args)
    going.wait_for(lambda: "\nstep 3:" in going.stdout())
    going.send_signal(number)
    done = going.wait(60)
    assert done.returncode == 0 and "stopped at step" in done.stdout and "the same command goes on" in done.stdout
    assert run(SCRIPT, *args).returncode == 0
    assert losses(tmp_path / "stopped") == losses(plain)


def test_a_second_training_in_the_same_folder_is_refused(plain_run, tmp_path):
    _, args = plain_run
    folder = tmp_path / "busy"
    held = lock_dir(folder, "")
    second = run(SCRIPT, *args, f"run_dir={folder}")
    held.close()
    assert second.returncode == 2 and f"error: {folder}: another training goes on in it" in second.stderr, second.stderr
    assert [path.name for path in folder.iterdir()] == [".lock"]


def test_a_finished_run_says_so(plain_run):
    folder, args = plain_run
    again = run(SCRIPT, *args)
    assert again.returncode == 0 and "finished already; raise train.steps" in again.stdout
    other = run(SCRIPT, *args, "optim.lr=0.25", "eval.every=99")
    assert re.search(
        r"finished already; it was made with optim.lr=[\d.]+ \(now 0.25\); raise train.steps", other.stdout
    )


def test_a_damaged_checkpoint_of_a_finished_run_is_passed_over_for_an_older_one(plain_run, tmp_path):
    plain, args = plain_run
    shutil.copytree(plain, tmp_path / "damaged")
    checkpoints = sorted((tmp_path / "damaged" / "checkpoints").glob("step_*"))
    for folder in (checkpoints[-1] / "model", tmp_path / "damaged" / "model"):  # which are one, without the copying
        damage(folder / "model.safetensors")
    again = run(SCRIPT, *args, f"run_dir={tmp_path / 'damaged'}")
    assert again.returncode == 0 and f"goes on from {checkpoints[-2]}" in again.stdout, again.stderr
    assert f"passed over, because a file is missing, cut or damaged: {checkpoints[-1].name}" in again.stdout
    assert losses(tmp_path / "damaged") == losses(plain)
    weights = [path / "model" / "model.safetensors" for path in (tmp_path / "damaged", checkpoints[-1], plain)]
    assert weights[0].samefile(weights[1]) and weights[0].read_bytes() == weights[2].read_bytes()


def test_a_run_whose_checkpoints_are_gone_does_not_replace_its_model(plain_run, tmp_path):
    plain, args = plain_run
    folder = tmp_path / "stripped"
    shutil.copytree(plain, folder, ignore=shutil.ignore_patterns("checkpoints"))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    done = run(SCRIPT, *args, f"run_dir={folder}")
    assert done.returncode == 2 and f"{folder} has the model of step 20, which a run" in done.stderr, done.stderr
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_damaged_model_folder_is_made_again_from_its_checkpoint(plain_run, tmp_path):
    plain, args = plain_run
    shutil.copytree(plain, tmp_path / "damaged")
    (tmp_path / "damaged" / "model" / "provenance.json").write_text("")
    again = run(SCRIPT, *args, f"run_dir={tmp_path / 'damaged'}")
    assert again.returncode == 0, again.stderr
    made, was = (load_folder(path / "model") for path in (tmp_path / "damaged", plain))
    assert made.provenance == was.provenance and losses(tmp_path / "damaged") == losses(plain)


def test_the_best_model_is_looked_for_anew_where_another_measure_is_taken(plain_run, tmp_path):
    plain, args = plain_run
    for name, change, anew in (("same", "eval.every=11", False), ("other", "eval.batch_size=1", True)):
        folder = shutil.copytree(plain, tmp_path / name)
        last = sorted((folder / "checkpoints").glob("step_*"))[-1]
        facts = {**checkpoint.read_manifest(last), "best_val_loss": 0.0}  # none is as low
        (last / checkpoint.MANIFEST).write_text(checkpoint.format_manifest(facts))
        done = run(SCRIPT, *args, f"run_dir={folder}", "train.steps=22", "schedule.decay=constant", change)
        assert done.returncode == 0 and ("best/ begins anew" in done.stdout) == anew, done.stdout + done.stderr
        step = json.loads((folder / "best" / "provenance.json").read_text())["step"]
        assert (step == 22) == anew


def test_a_run_does_not_go_on_with_another_shape_or_seed(plain_run):
    _, args = plain_run
    for change in (
        "model.mem_len=8",
        "seed=9",
        "train.global_batch_size=8",
        "objective.max_span=1",
        "data.pairs=false",
    ):
        key = change.partition("=")[0]
        done = run(SCRIPT, *args, change)  # it is finished
        assert done.returncode == 2 and f"was made with {key}=" in done.stderr, done.stderr
    done = run(SCRIPT, *args, "train.steps=30", "optim.beta2=0.5")  # it is to go on
    assert done.returncode == 2 and "was made with optim.beta2=0.999, now it is 0.5" in done.stderr, done.stderr


@pytest.fixture
def quickstart(make_args, store, tmp_path):
    """Words of a quickstart whose vocabulary and store are there."""
    import dataclasses

    from xlpre.text.corpus import TextConfig

    shutil.copytree(store.path, tmp_path / "store")
    meta = tmp_path / "store" / "meta.json"
    content = json.loads(meta.read_text())
    meta.write_text(json.dumps({**content, "source": dataclasses.asdict(TextConfig())}))
    kept = make_args("quick", train__steps=60, tokenizer__vocab_size=300)
    return [*(word for word in kept if not word.startswith("data.store_dir=")), f"data.store_dir={tmp_path / 'store'}"]


def begun(args):
    """A quickstart at its third step."""
    command = [sys.executable, str(REPOSITORY / "pretrain/quickstart.py"), *args]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert any(line.startswith("step 3:") for line in process.stdout)
    return process


@pytest.mark.long
def test_a_quickstart_that_is_killed_leaves_no_training_behind(quickstart, tmp_path):
    process = begun([*quickstart, "train.steps=1000000"])
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    _, left = psutil.wait_procs(children, 60)
    for child in left:
        child.kill()
    assert len(children) >= 3 and not left
    assert len(checkpoint.list_complete(tmp_path / "quick" / "checkpoints")) == 1
    process.stdout.close()
    process.wait()


def test_quickstart_interrupted_saves_says_so_and_finishes_when_called_again(quickstart, tmp_path):
    process = begun(quickstart)
    process.send_signal(signal.SIGINT)
    rest = process.stdout.read()
    assert process.wait(60) == 0 and "stopped; the same command goes on from there" in rest, rest
    again = run("pretrain/quickstart.py", *quickstart)
    assert again.returncode == 0 and "goes on from" in again.stdout and "there already" in again.stdout, (
        again.stdout + again.stderr
    )
    assert max(losses(tmp_path / "quick")) == 60 and (tmp_path / "quick" / "report.html").exists()
