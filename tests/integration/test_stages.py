"""Losses do not depend on ZeRO stage, number of processes, accumulation or interruptions."""

import itertools
import json
import re

import pytest

from tests.conftest import has_bf16
from tests.integration.conftest import largest_difference, read_steps, run_together
from xlpre.training import checkpoint
from xlpre.training.metrics_writer import read_metrics

STAGE = "deepspeed.zero_optimization.stage"
BATCH_SIZE = 8
COMMON = {"eval__every": 1000, "schedule__decay": "constant", "train__global_batch_size": BATCH_SIZE}
DROPOUT = {"model__dropout": 0.1, "model__dropatt": 0.1}


def train_all(jobs, processes=1):
    """Train with each list of arguments, in one job. Returns the output."""
    done = run_together(processes, "tests/integration/several_runs.py", json.dumps(jobs))
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout


def micro_batch_size(accumulation, processes=1):
    return BATCH_SIZE // (processes * accumulation)


@pytest.mark.parametrize(
    "processes, steps, accumulations",
    [
        (1, 10, (4,)),
        pytest.param(1, 20, (1, 2, 4), marks=pytest.mark.long),
        pytest.param(2, 20, (1, 2, 4), marks=pytest.mark.long),
    ],
)
def test_losses_do_not_depend_on_stage_processes_accumulation_and_recomputation(
    make_args, tmp_path, processes, steps, accumulations
):
    train_all([make_args("reference", **COMMON, train__steps=steps)])
    expected = read_steps(tmp_path / "reference")
    assert len(expected) == steps
    cases = {
        f"stage{stage}_accumulation{accumulation}_{recomputed}": {
            STAGE: stage,
            "train__micro_batch_size": micro_batch_size(accumulation, processes),
            "train__activation_checkpointing": recomputed,
        }
        for stage, accumulation, recomputed in itertools.product(range(4), accumulations, ("false", "true"))
    }
    train_all([make_args(name, **COMMON, **case, train__steps=steps) for name, case in cases.items()], processes)
    differences = {name: largest_difference(read_steps(tmp_path / name), expected) for name in cases}
    assert max(differences.values()) < 2e-5, differences


def test_evaluation_does_not_depend_on_the_number_of_processes_even_above_its_lanes(make_args, tmp_path):
    cases = {f"stage{stage}": {STAGE: stage} for stage in (1, 3)}
    settings = {"eval__batch_size": 1, "train__steps": 2, "eval__every": 2}
    train_all([make_args("one", **settings)])
    output = train_all([make_args(name, **settings, **case) for name, case in cases.items()], processes=2)
    n_parameters = re.findall(r"permutation, ([\d,]+) parameters", output)
    assert len(n_parameters) == 2 and len({*n_parameters}) == 1, "parameters are empty in ZeRO-3"
    keys = ("val_loss", "val_unigram_loss", "val_accuracy", "val_bpb")
    one, *others = (
        [line[key] for line in read_metrics(tmp_path / name) if "val_loss" in line for key in keys]
        for name in ("one", *cases)
    )
    assert len(one) == 2 * len(keys)
    assert all(other == pytest.approx(one, rel=1e-5) for other in others)  # float32


@pytest.mark.parametrize(
    ("processes", "names"),
    [
        (1, ("stage0", "stage1", "stage3", "bf16_stage2", "batch_warmup", "next_sentence")),
        pytest.param(1, (), marks=pytest.mark.long),
        pytest.param(2, (), marks=pytest.mark.long),
    ],
    ids=["some", "all", "two_processes"],
)
def test_a_resumed_run_has_the_same_numbers_in_every_stage(make_args, tmp_path, processes, names):
    cases = {f"stage{stage}": {STAGE: stage} for stage in range(4)}
    if has_bf16():
        cases |= {f"bf16_stage{stage}": {STAGE: stage, "train__precision": "bf16"} for stage in (1, 2, 3)}
    if processes == 2:  # with one process in test_settings.py
        cases["offload"] = {STAGE: 2, "deepspeed.zero_optimization.offload_optimizer.device": "cpu"}
    cases["batch_warmup"] = {"train__micro_batch_size": micro_batch_size(4, processes), "train__batch_warmup_steps": 6}
    cases["next_sentence"] = {"objective__next_sentence": "true"}
    cases = {name: case for name, case in cases.items() if name in names or not names}
    jobs = []
    for name, case in cases.items():
        settings = {**COMMON, **DROPOUT, "train__micro_batch_size": micro_batch_size(2, processes), **case}
        jobs += [make_args(f"{name}_whole", **settings, train__steps=8)]
        jobs += [make_args(name, **settings, train__steps=steps) for steps in (4, 8)]
    train_all(jobs, processes)
    for name in cases:
        assert read_steps(tmp_path / name) == read_steps(tmp_path / f"{name}_whole"), name
        assert len(read_steps(tmp_path / name)) == 8


def test_a_run_resumes_with_other_processes_stage_and_accumulation(make_args, tmp_path):
    """From one process to two and from two to one: memory is stored by lane."""
    settings = {**COMMON, "train__save_every": 4}
    other = {STAGE: 3, "train__micro_batch_size": micro_batch_size(2, processes=2)}
    train_all([make_args("whole", **settings, train__steps=8), make_args("from_one", **settings, train__steps=4)])
    train_all(
        [
            make_args("from_two", **settings, **other, train__steps=4),
            make_args("from_one", **settings, **other, train__steps=8),
        ],
        processes=2,
    )
    train_all([make_args("from_two", **settings, train__steps=8)])
    whole = read_steps(tmp_path / "whole")
    for name in ("from_one", "from_two"):
        assert largest_difference(read_steps(tmp_path / name), whole) < 2e-5
        (first, last) = checkpoint.list_complete(tmp_path / name / "checkpoints")
        assert checkpoint.read_manifest(first)["world_size"] != checkpoint.read_manifest(last)["world_size"]


@pytest.mark.skipif(not has_bf16(), reason="this processor has no bf16 instructions")
def test_two_processes_in_bf16_sum_their_gradients_in_fp32(make_args, tmp_path):
    """As one process does that accumulates the same micro-batches."""
    settings = {**COMMON, "train__precision": "bf16", "train__micro_batch_size": 4, "train__steps": 2}
    rounded = {"deepspeed.communication_data_type": "bf16"}
    train_all([make_args("one", **settings, **{STAGE: 1})])
    train_all([make_args("two", **settings), make_args("rounded", **settings, **rounded)], processes=2)
    one, two, rounded_once = (read_steps(tmp_path / name)[1][1] for name in ("one", "two", "rounded"))  # gradient norms
    assert two == pytest.approx(one, rel=1e-6)
    assert rounded_once != pytest.approx(one, rel=1e-5)


def test_a_run_resumed_on_fewer_processes_keeps_its_micro_batch_size_and_accumulates_more(make_args, tmp_path):
    settings = {**COMMON, "train__save_every": 4}
    same_size = {**settings, "train__micro_batch_size": 4}
    train_all([make_args("whole", **settings, train__steps=8)])
    output = train_all([make_args("same_size", **same_size, train__steps=4)], processes=2)
    assert "global batch size 8 = 2 processes x micro-batch size 4 x accumulation 1;" in output
    output = train_all([make_args("same_size", **same_size, train__steps=8)])
    assert "global batch size 8 = 1 process x micro-batch size 4 x accumulation 2;" in output
    assert largest_difference(read_steps(tmp_path / "same_size"), read_steps(tmp_path / "whole")) < 2e-5


def test_a_run_resumes_with_another_micro_batch_size(make_args, tmp_path):
    settings = {**COMMON, "train__save_every": 4}
    jobs = [make_args("whole", **settings, train__steps=12)]
    for steps, size in ((4, 8), (8, 2), (12, 4)):
        jobs.append(make_args("changed", **settings, train__steps=steps, train__micro_batch_size=size))
    train_all(jobs)
    assert largest_difference(read_steps(tmp_path / "changed"), read_steps(tmp_path / "whole")) < 2e-5


def test_a_run_of_one_process_resumes_with_and_without_zero(make_args, tmp_path):
    """From the default stage to a configured one, and back."""
    settings = {**COMMON, **DROPOUT, "train__micro_batch_size": micro_batch_size(2), "optim__max_grad_norm": 0.1}
    kinds = {"adamw": {}, "muon": {"optim__name": "muon", "optim__matrix_lr": 0.02}}
    jobs = []
    for kind, more in kinds.items():
        both = {**settings, **more}
        jobs += [make_args(f"{kind}_whole", **both, train__steps=8)]
        jobs += [
            make_args(f"{kind}_1_to_0", **both, **{STAGE: 1}, train__steps=4),
            make_args(f"{kind}_1_to_0", **both, train__steps=8),
        ]
        jobs += [
            make_args(f"{kind}_0_to_1", **both, train__steps=4),
            make_args(f"{kind}_0_to_1", **both, **{STAGE: 1}, train__steps=8),
        ]
    output = train_all(jobs)
    stages = [int(stage) for stage in re.findall(r"ZeRO stage (\d)", output)]
    assert stages == [0, 1, 0, 0, 1] * len(kinds)
    for kind in kinds:
        whole = read_steps(tmp_path / f"{kind}_whole")
        assert all(norm > 0.1 for _, norm, *_ in whole.values())  # clipping is active
        for name in (f"{kind}_1_to_0", f"{kind}_0_to_1"):
            assert largest_difference(read_steps(tmp_path / name), whole) < 2e-5, name


def test_muon_makes_the_same_updates_in_every_supported_stage(make_args, tmp_path):
    """Two processes assemble matrices from their shares and share the work; one and two processes resume."""
    muon = {**COMMON, "optim__name": "muon", "optim__matrix_lr": 0.02}
    cases = {f"stage{stage}": {STAGE: stage} for stage in range(3)}
    if has_bf16():
        cases["bf16"] = {"train__precision": "bf16"}
    jobs = [make_args(f"{name}_whole", **muon, **case, train__steps=6) for name, case in cases.items()]
    jobs += [make_args(name, **muon, **case, train__steps=steps) for name, case in cases.items() for steps in (3, 6)]
    train_all([make_args("one", **muon, train__steps=6), make_args("from_one", **muon, train__steps=3)])
    train_all([*jobs, make_args("from_one", **muon, **{STAGE: 2}, train__steps=6)], processes=2)
    expected = read_steps(tmp_path / "one")
    assert len(expected) == 6
    for name in ("stage0", "stage1", "stage2", "from_one"):
        assert largest_difference(read_steps(tmp_path / name), expected) < 2e-5, name
    for name in cases:
        assert read_steps(tmp_path / name) == read_steps(tmp_path / f"{name}_whole"), name


def test_fewer_lanes_are_read_during_batch_warmup(make_args, tmp_path):
    settings = {**COMMON, "train__micro_batch_size": micro_batch_size(4), "train__steps": 8}
    train_all([make_args("warm", **settings, train__batch_warmup_steps=8), make_args("plain", **settings)])
    lines = [x for x in read_metrics(tmp_path / "warm") if "loss" in x]
    rows = [b["tokens"] - a["tokens"] for a, b in itertools.pairwise([{"tokens": 0}, *lines])]
    assert rows == [2 * 32 * n for n in (1, 1, 2, 2, 3, 3, 4, 4)]
    (_, norm, *_), (_, full_norm, *_) = (read_steps(tmp_path / name)[1] for name in ("warm", "plain"))
    assert norm > full_norm  # a mean over fewer rows, which is noisier; not a quarter of the full gradient


def test_the_batch_warmup_continues_on_more_processes_without_a_change_of_settings(make_args, tmp_path):
    settings = {**COMMON, "train__micro_batch_size": 4, "train__batch_warmup_steps": 4}
    train_all([make_args("more", **settings, train__steps=1)])
    assert "accumulation 2" in train_all([make_args("more", **settings, train__steps=4)], processes=2)
    lines = [x for x in read_metrics(tmp_path / "more") if "loss" in x]
    rows = [b["tokens"] - a["tokens"] for a, b in itertools.pairwise([{"tokens": 0}, *lines])]
    assert rows == [32 * n for n in (4, 4, 8, 8)]


def test_a_lane_that_a_changed_warmup_leaves_out_starts_again_with_empty_memory(make_args, tmp_path):
    settings = {**COMMON, "train__save_every": 1}
    first = {**settings, "train__micro_batch_size": 4, "train__batch_warmup_steps": 4, "train__steps": 3}
    changed = {**settings, "train__micro_batch_size": 2, "train__batch_warmup_steps": 8, "train__steps": 4}
    valid = []
    for case in (first, changed):
        train_all([make_args("changed", **case)])
        saved = checkpoint.find_latest_valid(tmp_path / "changed/checkpoints")
        lanes = [list(range(BATCH_SIZE))]
        ((_, n_valid),) = checkpoint.read_lane_memory(saved, checkpoint.read_manifest(saved), lanes)
        valid.append((n_valid > 0).tolist())
    assert valid == [[True] * 8, [True] * 4 + [False] * 4]
