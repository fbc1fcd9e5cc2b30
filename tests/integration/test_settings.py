"""Settings of memory and speed change nothing but memory and speed: the same losses, and the same again after a stop."""

import json

import pytest

from tests.conftest import has_fp16
from tests.integration.conftest import run, tiny_args
from xlpre.training import checkpoint
from xlpre.training.metrics import read_metrics

STAGE = "deepspeed.zero_optimization.stage"
OPTIMIZER = "deepspeed.zero_optimization.offload_optimizer.device"
WEIGHTS = "deepspeed.zero_optimization.offload_param.device"
STEPS = 10
COMMON = {
    "eval__every": 1000,
    "schedule__decay": "constant",
    "train__steps": STEPS,
    "train__global_batch_size": 8,
    "train__accumulation": 2,
}
pytestmark = pytest.mark.long

# one backend for all cases, because each draws its dropout in its own way
DROPOUT = {"model__dropout": 0.1, "model__dropatt": 0.1, "model__attention_backend": "reference"}

SAME = {  # as fp32 without any of it
    "recomputed": {"train__activation_checkpointing": "true"},
    **{f"optimizer_{stage}": {STAGE: stage, OPTIMIZER: "cpu"} for stage in (1, 2, 3)},
    "weights": {STAGE: 3, WEIGHTS: "cpu"},
    "optimizer_and_weights": {STAGE: 3, OPTIMIZER: "cpu", WEIGHTS: "cpu"},
}
FP16 = {f"fp16_{stage}": {STAGE: stage, "train__precision": "fp16"} for stage in (1, 2, 3)} if has_fp16() else {}


def several(jobs):
    done = run("tests/integration/several_runs.py", json.dumps(jobs), timeout=900)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stderr


def numbers(run_dir):
    """Of each step: loss, gradient norm, learning rate."""
    return {x["step"]: (x["loss"], x["grad_norm"], x["lr"]) for x in read_metrics(run_dir) if "loss" in x}


def largest_difference(found, expected):
    assert found.keys() == expected.keys()
    return max(abs(found[step][0] - expected[step][0]) for step in expected)


def whole_and_stopped(make_args, name, case):
    """Words of a run, and of one that stops after half of it and goes on."""
    settings = {**COMMON, **DROPOUT, **case}
    stopped = [make_args(f"{name}_stopped", **{**settings, "train__steps": steps}) for steps in (STEPS // 2, STEPS)]
    return [make_args(name, **settings), *stopped]


@pytest.fixture(scope="module")
def runs(store, tmp_path_factory):
    """A folder with runs of every case, all with dropout, and without it of fp16, which draws it otherwise than fp32."""
    folder = tmp_path_factory.mktemp("settings")

    def make_args(name, **changes):
        return tiny_args(store, folder, name, **changes)

    cases = {**SAME, **FP16}
    jobs = [make_args("reference", **COMMON, **DROPOUT)]
    jobs += [job for name, case in cases.items() for job in whole_and_stopped(make_args, name, case)]
    several(jobs + [make_args(f"{name}_plain", **COMMON, **case) for name, case in {"reference": {}, **FP16}.items()])
    return folder


@pytest.mark.parametrize("name", SAME)
def test_where_things_are_kept_and_whether_they_are_changes_no_loss(runs, name):
    assert largest_difference(numbers(runs / name), numbers(runs / "reference")) < 2e-5


@pytest.mark.parametrize("name", [*SAME, *FP16])
def test_a_stopped_run_goes_on_to_the_same_numbers(runs, name):
    assert numbers(runs / f"{name}_stopped") == numbers(runs / name)
    assert len(numbers(runs / name)) == STEPS


needs_fp16 = pytest.mark.skipif(not FP16, reason="this processor has no instructions for fp16 (AVX512-FP16)")


@needs_fp16
@pytest.mark.parametrize("name", FP16 or [""])
def test_fp16_trains_as_fp32_does_to_its_precision(runs, name):
    assert 0 < largest_difference(numbers(runs / f"{name}_plain"), numbers(runs / "reference_plain")) < 2e-3


@needs_fp16
@pytest.mark.parametrize("name", FP16 or [""])
def test_the_scale_of_the_loss_goes_on_after_a_stop(runs, name):
    scales = [
        checkpoint.read_manifest(checkpoint.list_complete(runs / run / "checkpoints")[-1])["counters"]["loss_scale"]
        for run in (name, f"{name}_stopped")
    ]
    assert scales[0] == scales[1]
    assert (scales[0]["cur_scale"], scales[0]["cur_iter"]) == (2.0**16, STEPS)


def test_a_compiled_run_has_the_losses_of_one_that_is_not_and_is_compiled_once(make_args, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_LOGS", "recompiles,graph_breaks")
    shared = {**COMMON, "model__attention_backend": "sdpa"}  # cpu, which auto is here, is left to Python
    said = several([make_args("eager", **shared), make_args("compiled", **shared, train__compile="true")])
    assert largest_difference(numbers(tmp_path / "compiled"), numbers(tmp_path / "eager")) < 1e-4
    assert "ecompil" not in said and "raph break" not in said, said


def test_a_compiled_run_that_stopped_goes_on_to_the_same_numbers(make_args, tmp_path):
    several(whole_and_stopped(make_args, "compiled", {"train__compile": "true"}))
    assert numbers(tmp_path / "compiled_stopped") == numbers(tmp_path / "compiled")
