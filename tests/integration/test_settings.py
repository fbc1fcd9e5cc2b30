"""Settings of memory and speed do not change losses, also after an interruption."""

import json
import sys

import pytest

from tests.conftest import has_fp16
from tests.integration.conftest import largest_difference, launch, read_steps, run, tiny_args
from xlpre.training import checkpoint

STAGE = "deepspeed.zero_optimization.stage"
OPTIMIZER = "deepspeed.zero_optimization.offload_optimizer.device"
WEIGHTS = "deepspeed.zero_optimization.offload_param.device"
STEPS = 10
COMMON = {
    "eval__every": 1000,
    "schedule__decay": "constant",
    "train__steps": STEPS,
    "train__global_batch_size": 8,
    "train__micro_batch_size": 4,
}
pytestmark = [pytest.mark.long, pytest.mark.xdist_group("settings")]  # on one worker, which trains the shared runs once

# one backend for all cases, because backends draw dropout differently
DROPOUT = {"model__dropout": 0.1, "model__dropatt": 0.1, "model__attention_backend": "reference"}

EQUIVALENT = {  # to plain fp32
    "recomputed": {"train__activation_checkpointing": "true"},
    **{f"optimizer_{stage}": {STAGE: stage, OPTIMIZER: "cpu"} for stage in (1, 2, 3)},
    "weights": {STAGE: 3, WEIGHTS: "cpu"},
    "optimizer_and_weights": {STAGE: 3, OPTIMIZER: "cpu", WEIGHTS: "cpu"},
}
FP16 = {f"fp16_{stage}": {STAGE: stage, "train__precision": "fp16"} for stage in (1, 2, 3)} if has_fp16() else {}


def train_all(jobs):
    """Train with each list of arguments, in one process. Returns stderr."""
    done = run("tests/integration/several_runs.py", json.dumps(jobs), timeout=900)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stderr


def whole_and_stopped(make_args, name, case):
    """Return the arguments of a run, and of one that stops after half of its steps and resumes."""
    settings = {**COMMON, **DROPOUT, **case}
    stopped = [make_args(f"{name}_stopped", **{**settings, "train__steps": steps}) for steps in (STEPS // 2, STEPS)]
    return [make_args(name, **settings), *stopped]


@pytest.fixture(scope="module")
def runs(store, tmp_path_factory):
    """Train every case with dropout, and fp16 also without, because it draws dropout differently from fp32."""
    folder = tmp_path_factory.mktemp("settings")

    def make_args(name, **changes):
        return tiny_args(store, folder, name, **changes)

    cases = {**EQUIVALENT, **FP16}
    jobs = [make_args("reference", **COMMON, **DROPOUT)]
    jobs += [job for name, case in cases.items() for job in whole_and_stopped(make_args, name, case)]
    train_all(jobs + [make_args(f"{name}_plain", **COMMON, **case) for name, case in {"reference": {}, **FP16}.items()])
    return folder


@pytest.mark.parametrize("name", EQUIVALENT)
def test_offloading_and_recomputation_do_not_change_losses(runs, name):
    assert largest_difference(read_steps(runs / name), read_steps(runs / "reference")) < 2e-5


@pytest.mark.parametrize("name", [*EQUIVALENT, *FP16])
def test_a_stopped_run_goes_on_to_the_same_read_steps(runs, name):
    assert read_steps(runs / f"{name}_stopped") == read_steps(runs / name)
    assert len(read_steps(runs / name)) == STEPS


needs_fp16 = pytest.mark.skipif(not FP16, reason="this processor has no fp16 instructions (AVX512-FP16)")


@needs_fp16
@pytest.mark.parametrize("name", FP16 or [""])
def test_fp16_losses_equal_those_of_fp32_up_to_its_precision(runs, name):
    assert 0 < largest_difference(read_steps(runs / f"{name}_plain"), read_steps(runs / "reference_plain")) < 2e-3


@needs_fp16
@pytest.mark.parametrize("name", FP16 or [""])
def test_the_loss_scale_is_restored(runs, name):
    scales = [
        checkpoint.read_manifest(checkpoint.list_complete(runs / run / "checkpoints")[-1])["counters"]["loss_scale"]
        for run in (name, f"{name}_stopped")
    ]
    assert scales[0] == scales[1]
    assert (scales[0]["cur_scale"], scales[0]["cur_iter"]) == (2.0**16, STEPS)


def test_a_compiled_run_has_the_losses_of_an_eager_one_and_is_compiled_once(make_args, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_LOGS", "recompiles,graph_breaks,graph_code")
    shared = {**COMMON, "model__attention_backend": "sdpa"}  # torch.compile does not support cpu, the default here
    jobs = [make_args("eager", **shared), make_args("compiled", **shared, train__compile="true")]
    # a new process: torch reads TORCH_LOGS when it is imported
    done = launch("tests/integration/several_runs.py", json.dumps(jobs), launcher=(sys.executable,), timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    assert largest_difference(read_steps(tmp_path / "compiled"), read_steps(tmp_path / "eager")) < 1e-4
    assert "TRACED GRAPH" in done.stderr, "torch logged nothing"
    assert "ecompil" not in done.stderr and "raph break" not in done.stderr, done.stderr


def test_a_resumed_compiled_run_has_the_same_numbers(make_args, tmp_path):
    train_all(whole_and_stopped(make_args, "compiled", {"train__compile": "true"}))
    assert read_steps(tmp_path / "compiled_stopped") == read_steps(tmp_path / "compiled")
