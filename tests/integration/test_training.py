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
from tests.conftest import REPOSITORY, refused
from tests.integration.conftest import call, damage, environment, read_steps, run, run_together, start
from tests.integration.one_engine import needs_bf16
from xlpre.common.files import lock_dir
from xlpre.config.loader import load_config
from xlpre.conversion.model_folder import load_folder
from xlpre.training import checkpoint
from xlpre.training.metrics_writer import read_metrics

pytestmark = pytest.mark.xdist_group("training")  # on one worker, which trains the shared run once
SCRIPT = "pretrain/run.py"


def read_val_losses(run_dir):
    return {x["step"]: x["val_loss"] for x in read_metrics(run_dir) if "val_loss" in x}


def assert_equal_weights(folder, other):
    assert folder.weights.keys() == other.weights.keys()
    assert all(torch.equal(weight, other.weights[name]) for name, weight in folder.weights.items())


@pytest.fixture(scope="module")
def plain_run(store, tmp_path_factory):
    """Train 20 steps in one process, with dropout, so that the random state matters. Returns folder and arguments."""
    from tests.integration.conftest import SETTINGS

    folder = tmp_path_factory.mktemp("plain") / "run"
    changes = {"model.dropout": 0.1, "model.dropatt": 0.1, "train.save_every": 4, "run_dir": folder}
    changes |= {"train.keep_last_checkpoints": 2, "train.keep_checkpoints_every": 8}
    changes["train.save_memory"] = "all"  # an older checkpoint is resumed bit for bit, too
    settings = {**SETTINGS, **changes, "data.store_dir": store.path, "tokenizer.path": store.path / "vocabulary.model"}
    args = [f"{key}={value}" for key, value in settings.items()]
    result = run(SCRIPT, *args)
    assert result.returncode == 0, result.stderr
    return folder, args


def test_a_run_learns_and_writes_a_model_folder(plain_run):
    folder, _ = plain_run
    val_losses = read_val_losses(folder)
    assert val_losses[20] < val_losses[0] - 0.3
    loaded = load_folder(folder / "model")
    assert loaded.config.vocab_size == len(loaded.tokenizer) == 300


def test_metrics_have_speed_utilization_memory_and_remaining_time(plain_run):
    folder, args = plain_run
    lines = [line for line in read_metrics(folder) if "loss" in line]
    config = load_config(PretrainConfig, folder / "config.yaml")
    shape = batch_shape(config, config.train.global_batch_size)
    flops_per_token = flops_per_step(config.model, shape) / (shape.rows * shape.seq_len)
    for line in lines:
        speed = line["tokens_per_second"]
        assert line["targets_per_second"] == pytest.approx(speed * shape.n_targets / shape.seq_len)
        assert line["flops_per_second"] == pytest.approx(speed * flops_per_token)
        assert line["mfu"] is None and line["peak_memory_bytes"] > 1e7  # fp32 on a CPU
        remaining_steps = config.train.steps - line["step"]
        assert line["eta_seconds"] == pytest.approx(remaining_steps * shape.rows * shape.seq_len / speed)
    assert [line["tokens"] for line in lines[:2]] == [128, 256]


def test_a_killed_run_resumes_to_the_same_numbers(plain_run, tmp_path):
    plain, args = plain_run
    args = [*args, f"run_dir={tmp_path / 'killed'}"]
    fault = {"phase": "backward", "steps": [10, 99], "process": 0}
    assert run("tests/integration/faulty.py", *args, fault=fault).returncode == -signal.SIGKILL
    assert max(read_steps(tmp_path / "killed")) == 10
    resumed = run(SCRIPT, *args)
    assert resumed.returncode == 0 and "resumes from" in resumed.stdout, resumed.stdout + resumed.stderr
    assert read_steps(tmp_path / "killed") == read_steps(plain)
    assert read_val_losses(tmp_path / "killed") == read_val_losses(plain)
    assert_equal_weights(load_folder(tmp_path / "killed" / "best"), load_folder(plain / "best"))


def test_a_checkpoint_holds_no_pickle_and_its_model_is_a_model_folder(plain_run):
    folder, _ = plain_run
    latest = sorted((folder / "checkpoints").glob("step_*"))[-1]
    suffixes = {path.suffix for path in latest.rglob("*") if path.is_file()}
    assert suffixes == {".json", ".model", ".safetensors"}
    saved, published = load_folder(latest / "model").weights, load_folder(folder / "model").weights
    assert all(torch.equal(saved[name], published[name]) for name in saved)
    assert (latest / "model" / "model.safetensors").samefile(folder / "model" / "model.safetensors")


def test_the_last_checkpoints_and_those_at_multiples_of_keep_checkpoints_every_are_left(plain_run):
    """The run saves a checkpoint in each of the steps 4, 8, ..., 20."""
    names = sorted(path.name for path in (plain_run[0] / "checkpoints").iterdir())
    assert names == ["step_00000008", "step_00000016", "step_00000020"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_run_stopped_by_a_signal_saves_and_resumes_to_the_same_numbers(plain_run, tmp_path, number):
    plain, args = plain_run
    args = [*args, f"run_dir={tmp_path / 'stopped'}", "train.save_every=1000"]
    process = start(SCRIPT, *args)
    process.wait_for(lambda: "\nstep 3:" in process.stdout())
    process.send_signal(number)
    stopped = process.wait(60)
    assert stopped.returncode == 0 and "stopped at step" in stopped.stdout and "same command resumes" in stopped.stdout
    assert run(SCRIPT, *args).returncode == 0
    assert read_steps(tmp_path / "stopped") == read_steps(plain)


def test_a_run_that_is_stopped_before_an_evaluation_saves_at_once_and_evaluates_when_it_resumes(plain_run, tmp_path):
    plain, args = plain_run
    args = [*args, f"run_dir={tmp_path / 'stopped'}", "train.save_every=1000"]
    fault = {
        "phase": "after_update",
        "do": "SIGTERM",
        "steps": [9, 9],
        "process": 0,
    }  # the next evaluation is that of step 10
    stopped = run("tests/integration/faulty.py", *args, fault=fault)
    assert stopped.returncode == 0 and "stopped at step 10 and saved" in stopped.stdout, stopped.stderr
    assert 10 not in read_val_losses(tmp_path / "stopped")
    assert run(SCRIPT, *args).returncode == 0
    assert read_steps(tmp_path / "stopped") == read_steps(plain)
    assert read_val_losses(tmp_path / "stopped") == read_val_losses(plain)
    assert_equal_weights(load_folder(tmp_path / "stopped" / "best"), load_folder(plain / "best"))


def test_a_second_training_in_the_same_folder_is_refused(plain_run, tmp_path):
    _, args = plain_run
    folder = tmp_path / "busy"
    lock = lock_dir(folder, "")
    second = run(SCRIPT, *args, f"run_dir={folder}")
    lock.close()
    assert second.returncode == 2 and f"{folder}: another training process uses this folder" in second.stderr, (
        second.stderr
    )
    assert [path.name for path in folder.iterdir()] == [".lock"]


def test_a_finished_run_is_reported_with_changed_settings(plain_run):
    folder, args = plain_run
    resumed = call(SCRIPT, *args)
    assert resumed.returncode == 0 and "already finished. To train longer, raise train.steps" in resumed.stdout
    changed = call(SCRIPT, *args, "optim.lr=0.25", "eval.every=99")
    assert re.search(
        r"already finished; it was made with optim.lr=[\d.]+ \(now 0.25\)\. To train longer", changed.stdout
    )


def test_settings_that_change_when_a_run_resumes_are_recorded(plain_run, tmp_path):
    plain, args = plain_run
    folder = tmp_path / "changed"
    shutil.copytree(plain, folder)
    args = [*args, f"run_dir={folder}"]
    for steps, lr in ((22, 0.25), (22, 0.25), (24, 0.5)):
        resumed = run(SCRIPT, *args, f"train.steps={steps}", f"optim.lr={lr}", "eval.every=99")
        assert resumed.returncode == 0, resumed.stderr
    assert "at step 22 with other settings: optim.lr=0.5 (before: 0.25), train.steps=24 (before: 22)" in resumed.stdout
    changes = checkpoint.read_newest_manifest(folder / "checkpoints")[1]["setting_changes"]
    assert [(x["step"], x["settings"]["train.steps"]) for x in changes] == [(20, [20, 22]), (22, [22, 24])]
    call("pretrain/export.py", folder, tmp_path / "exported")
    card = (tmp_path / "exported" / "README.md").read_text()
    assert re.search(r"From step 20.*optim.lr=0.25.*\n.*From step 22.*optim.lr=0.5 ", card), card


def test_a_finished_run_with_a_damaged_checkpoint_resumes_from_an_older_one(plain_run, tmp_path):
    plain, args = plain_run
    shutil.copytree(plain, tmp_path / "damaged")
    checkpoints = sorted((tmp_path / "damaged" / "checkpoints").glob("step_*"))
    for folder in (checkpoints[-1] / "model", tmp_path / "damaged" / "model"):  # hard links before the copy
        damage(folder / "model.safetensors")
    resumed = run(SCRIPT, *args, f"run_dir={tmp_path / 'damaged'}")
    assert resumed.returncode == 0 and f"resumes from {checkpoints[-2]}" in resumed.stdout, resumed.stderr
    assert f"missing, truncated or damaged files: {checkpoints[-1].name}" in resumed.stdout
    assert read_steps(tmp_path / "damaged") == read_steps(plain)
    weights = [path / "model" / "model.safetensors" for path in (tmp_path / "damaged", checkpoints[-1], plain)]
    assert weights[0].samefile(weights[1]) and weights[0].read_bytes() == weights[2].read_bytes()


@pytest.mark.parametrize("missing", ["checkpoints", "manifest.json"])
def test_a_run_without_complete_checkpoints_does_not_overwrite_its_model(plain_run, tmp_path, missing):
    plain, args = plain_run
    folder = tmp_path / "stripped"
    shutil.copytree(plain, folder, ignore=shutil.ignore_patterns(missing))
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    done = run(SCRIPT, *args, f"run_dir={folder}")
    assert "it holds the model of step 20" in refused(done, "run_dir", folder)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == files


def test_a_damaged_model_folder_is_restored_from_its_checkpoint(plain_run, tmp_path):
    plain, args = plain_run
    shutil.copytree(plain, tmp_path / "damaged")
    (tmp_path / "damaged" / "model" / "provenance.json").write_text("")
    resumed = run(SCRIPT, *args, f"run_dir={tmp_path / 'damaged'}")
    assert resumed.returncode == 0, resumed.stderr
    restored, original = (load_folder(path / "model") for path in (tmp_path / "damaged", plain))
    assert restored.provenance == original.provenance and read_steps(tmp_path / "damaged") == read_steps(plain)


def test_best_weights_newer_than_the_latest_checkpoint_are_lost_in_a_kill(plain_run, tmp_path):
    """The run is killed after the evaluation of step 6. Its best weights and their loss remain those of the checkpoint of step 4."""
    _, args = plain_run
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    args = [*args, "eval.every=2", "schedule.decay=constant", "train.save_every=100"]
    assert run(SCRIPT, *args, f"run_dir={whole}", "train.steps=4").returncode == 0
    shutil.copytree(whole, killed)
    fault = {"phase": "backward", "steps": [7, 99], "process": 0}
    assert run("tests/integration/faulty.py", *args, f"run_dir={killed}", fault=fault).returncode == -signal.SIGKILL
    assert read_val_losses(killed)[6] < read_val_losses(killed)[4]
    (best, best_loss), expected = (
        (load_folder(folder / "best"), checkpoint.read_manifest(folder / "checkpoints/step_00000004")["best_val_loss"])
        for folder in (killed, whole)
    )
    assert (best.provenance["step"], best_loss) == (4, expected[1])
    assert_equal_weights(best, expected[0])


def test_the_best_model_is_chosen_again_if_the_eval_settings_change(plain_run, tmp_path):
    plain, args = plain_run
    for name, change, chosen_again in (("same", "eval.every=11", False), ("other", "eval.batch_size=1", True)):
        folder = shutil.copytree(plain, tmp_path / name)
        last = sorted((folder / "checkpoints").glob("step_*"))[-1]
        manifest = {**checkpoint.read_manifest(last), "best_val_loss": 0.0}  # never reached
        (last / checkpoint.MANIFEST).write_text(checkpoint.format_manifest(manifest))
        done = run(SCRIPT, *args, f"run_dir={folder}", "train.steps=22", "schedule.decay=constant", change)
        assert done.returncode == 0 and ("best/ starts again" in done.stdout) == chosen_again, done.stdout + done.stderr
        step = json.loads((folder / "best" / "provenance.json").read_text())["step"]
        assert (step == 22) == chosen_again


def test_a_run_does_not_resume_with_another_shape_or_seed(plain_run):
    _, args = plain_run
    for change in (
        "model.mem_len=8",
        "seed=9",
        "train.global_batch_size=8",
        "objective.max_span=1",
        "data.pairs=false",
        "memory.initial=zeros",
    ):
        key, _, value = change.partition("=")
        done = call(SCRIPT, *args, change)  # the run is finished
        refused(done, key, value, f"was written with {key}=")
    done = run(SCRIPT, *args, "train.steps=30", "optim.beta2=0.5")  # the run would resume
    refused(done, "optim.beta2", 0.5, "optim.beta2=0.999")


@needs_bf16
def test_a_run_does_not_resume_in_another_precision(plain_run):
    done = run(SCRIPT, *plain_run[1], "train.steps=30", "train.precision=bf16")
    refused(done, "train.precision", "bf16", "was written with train.precision=fp32")


def test_a_run_with_a_time_limit_ends_at_a_learning_rate_of_zero(make_args, tmp_path):
    result = run(SCRIPT, *make_args("timed", train__steps=1_000_000, train__hours=0.0015))
    assert result.returncode == 0, result.stderr
    records = read_metrics(tmp_path / "timed")
    rates = [record["lr"] for record in records if "lr" in record]
    assert rates[-1] < 0.05 * max(rates) and "val_loss" in records[-1]
    assert 0.0015 * 3600 <= records[-1]["train_seconds"] < 60
    assert "finished" in run(SCRIPT, *make_args("timed", train__steps=1_000_000, train__hours=0.0015)).stdout


@pytest.fixture
def quickstart(make_args, store, tmp_path):
    """Return the arguments of a quickstart with an existing vocabulary and store."""
    import dataclasses

    from xlpre.text.corpus import TextConfig

    shutil.copytree(store.path, tmp_path / "store")
    meta = tmp_path / "store" / "meta.json"
    content = json.loads(meta.read_text())
    meta.write_text(json.dumps({**content, "source": dataclasses.asdict(TextConfig())}))
    args = make_args("quick", train__steps=20, tokenizer__vocab_size=300)
    return [*(arg for arg in args if not arg.startswith("data.store_dir=")), f"data.store_dir={tmp_path / 'store'}"]


def start_quickstart(args):
    """Start a quickstart and wait for its third step."""
    command = [sys.executable, str(REPOSITORY / "pretrain/quickstart.py"), *args]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("step 3:"):
            return process
    raise AssertionError("".join(lines))


@pytest.mark.long
def test_killing_a_quickstart_ends_its_training(quickstart, tmp_path):
    process = start_quickstart([*quickstart, "train.steps=1000000"])
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    _, alive = psutil.wait_procs(children, 60)
    for child in alive:
        child.kill()
    assert len(children) >= 3 and not alive
    assert len(checkpoint.list_complete(tmp_path / "quick" / "checkpoints")) == 1
    process.stdout.close()
    process.wait()


def test_an_interrupted_quickstart_saves_and_finishes_when_called_again(quickstart, tmp_path):
    process = start_quickstart([*quickstart, "--processes", "2"])
    process.send_signal(signal.SIGINT)
    rest = process.stdout.read()
    assert process.wait(60) == 0 and "stopped. The same command resumes." in rest, rest
    (saved,) = checkpoint.list_complete(tmp_path / "quick" / "checkpoints")
    assert checkpoint.read_manifest(saved)["world_size"] == 2
    resumed = run("pretrain/quickstart.py", *quickstart)
    assert resumed.returncode == 0 and "resumes from" in resumed.stdout and "exists" in resumed.stdout, (
        resumed.stdout + resumed.stderr
    )
    assert max(read_steps(tmp_path / "quick")) == 20 and (tmp_path / "quick" / "report.html").exists()


def test_a_run_resumes_with_the_attention_backend_of_its_checkpoint(make_args, tmp_path):
    assert run(SCRIPT, *make_args(train__steps=2, train__save_memory="all")).returncode == 0
    saved = tmp_path / "tiny/checkpoints/step_00000002"
    manifest = checkpoint.read_manifest(saved)
    assert manifest["attention_backend"] == "cpu"
    results = []
    for backend in ("sdpa", "triton"):  # as if another machine had written it
        content = checkpoint.format_manifest({**manifest, "attention_backend": backend})
        (saved / checkpoint.MANIFEST).write_text(content)
        results.append(run(SCRIPT, *make_args(train__steps=3, train__save_memory="all")))
        last = tmp_path / "tiny/checkpoints/step_00000003"
        results[-1].resumed_with = checkpoint.read_manifest(last)["attention_backend"]
        shutil.rmtree(last)
    assert [result.resumed_with for result in results] == ["sdpa", "cpu"]
    assert ["not available here" in result.stdout + result.stderr for result in results] == [False, True]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"deepspeed": "{zero_optimization: {stage: 2}}", "objective__next_sentence": True},
        {"deepspeed": "{zero_optimization: {stage: 1}}", "objective__name": "denoising", "optim__name": "muon"},
    ],
)
def test_cuda_graphs_train_to_the_same_weights(make_args, tmp_path, changes):
    """Under DeepSpeed, with dropout, memory and two micro-steps. On a CPU, a stand-in replaces the graphs."""
    args = {"train__steps": 6, "train__micro_batch_size": 2, "model__dropout": 0.1, **changes}
    assert run(SCRIPT, *make_args(name="plain", **args)).returncode == 0
    script = "tests/unit/pretrain/stand_in_graphs.py"
    result = run(script, *make_args(name="recorded", **args, train__cuda_graphs=True))
    assert result.returncode == 0, result.stderr
    assert "CUDA graphs were replayed" in result.stdout
    plain, recorded = (read_steps(tmp_path / name) for name in ("plain", "recorded"))
    assert [recorded[step][:2] for step in recorded] == [plain[step][:2] for step in plain]
    assert_equal_weights(load_folder(tmp_path / "plain/model"), load_folder(tmp_path / "recorded/model"))


@pytest.mark.long
def test_two_processes_check_a_finished_run_together(make_args, tmp_path):
    args = make_args(train__steps=4, train__save_every=2)
    assert run_together(2, SCRIPT, *args).returncode == 0
    again = run_together(2, SCRIPT, *args)
    assert again.returncode == 0 and again.stdout.count("already finished") == 1, again.stderr
    damage(tmp_path / "tiny/checkpoints/step_00000004/moments_000.safetensors")
    repaired = run_together(2, SCRIPT, *args)
    assert repaired.returncode == 0 and "at step 2" in repaired.stdout and "finished at step 4" in repaired.stdout
