"""Whatever the ZeRO stage, the number of processes, the accumulation: the same numbers, and the same again after a stop."""

import itertools
import json
import re

import pytest

from tests.conftest import has_bf16
from tests.integration.conftest import run_together
from xlpre.training import checkpoint
from xlpre.training.metrics import read_metrics

STAGE = "deepspeed.zero_optimization.stage"
QUIET = {"eval__every": 1000, "schedule__decay": "constant", "train__global_batch_size": 8}
DROPOUT = {"model__dropout": 0.1, "model__dropatt": 0.1}


def several(jobs, processes=1):
    done = run_together(processes, "tests/integration/several_runs.py", json.dumps(jobs))
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout


def numbers(run_dir):
    """Of each step: loss, gradient norm, learning rate, loss of next-sentence prediction."""
    lines = [line for line in read_metrics(run_dir) if "loss" in line]
    return {x["step"]: (x["loss"], x["grad_norm"], x["lr"], x.get("next_sentence_loss")) for x in lines}


def largest_difference(found, expected):
    assert found.keys() == expected.keys()
    return max(abs(found[step][0] - expected[step][0]) for step in expected)


@pytest.mark.parametrize(
    "processes, steps, accumulations",
    [
        (1, 10, (4,)),
        pytest.param(1, 20, (1, 2, 4), marks=pytest.mark.long),
        pytest.param(2, 20, (1, 2, 4), marks=pytest.mark.long),
    ],
)
def test_stage_processes_accumulation_and_checkpointing_change_no_loss(
    make_args, tmp_path, processes, steps, accumulations
):
    several([make_args("reference", **QUIET, train__steps=steps)])
    expected = numbers(tmp_path / "reference")
    assert len(expected) == steps
    cases = {
        f"stage{stage}_micro{micro}_{kept}": {
            STAGE: stage,
            "train__accumulation": micro,
            "train__activation_checkpointing": kept,
        }
        for stage, micro, kept in itertools.product(range(4), accumulations, ("false", "true"))
    }
    several([make_args(name, **QUIET, **case, train__steps=steps) for name, case in cases.items()], processes)
    differences = {name: largest_difference(numbers(tmp_path / name), expected) for name in cases}
    assert max(differences.values()) < 2e-5, differences


def test_more_processes_than_held_out_lanes_measure_the_same(make_args, tmp_path):
    cases = {f"stage{stage}": {STAGE: stage} for stage in (1, 3)}
    settings = {"eval__batch_size": 1, "train__steps": 2, "eval__every": 2}
    several([make_args("one", **settings)])
    said = several([make_args(name, **settings, **case) for name, case in cases.items()], processes=2)
    n_parameters = re.findall(r"permutation, ([\d,]+) parameters", said)
    assert len(n_parameters) == 2 and len({*n_parameters}) == 1, "ZeRO-3 leaves an empty tensor of each"
    keys = ("val_loss", "val_unigram_loss", "val_accuracy", "val_bpb")
    one, *others = (
        [line[key] for line in read_metrics(tmp_path / name) if "val_loss" in line for key in keys]
        for name in ("one", *cases)
    )
    assert len(one) == 2 * len(keys)
    assert all(found == pytest.approx(one, rel=1e-5) for found in others)  # float32


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_stopped_run_goes_on_to_the_same_numbers_on_every_stage(make_args, tmp_path, processes):
    cases = {f"stage{stage}": {STAGE: stage} for stage in range(4)}
    if has_bf16():
        cases |= {f"bf16_stage{stage}": {STAGE: stage, "train__precision": "bf16"} for stage in (1, 2, 3)}
    if processes == 2:  # of one process: test_settings.py
        cases["offload"] = {STAGE: 2, "deepspeed.zero_optimization.offload_optimizer.device": "cpu"}
    cases["batch_warmup"] = {"train__accumulation": 4, "train__batch_warmup_steps": 6}
    cases["next_sentence"] = {"objective__next_sentence": "true"}
    jobs = []
    for name, case in cases.items():
        settings = {**QUIET, **DROPOUT, "train__accumulation": 2, **case}
        jobs += [make_args(f"{name}_whole", **settings, train__steps=8)]
        jobs += [make_args(name, **settings, train__steps=steps) for steps in (4, 8)]
    several(jobs, processes)
    for name in cases:
        assert numbers(tmp_path / name) == numbers(tmp_path / f"{name}_whole"), name
        assert len(numbers(tmp_path / name)) == 8


def test_a_run_goes_on_with_another_number_of_processes_stage_and_accumulation(make_args, tmp_path):
    """One process to two, two to one: the lanes take their memory along."""
    settings = {**QUIET, "train__save_every": 4}
    other = {STAGE: 3, "train__accumulation": 2}
    several([make_args("whole", **settings, train__steps=8), make_args("from_one", **settings, train__steps=4)])
    several(
        [
            make_args("from_two", **settings, **other, train__steps=4),
            make_args("from_one", **settings, **other, train__steps=8),
        ],
        processes=2,
    )
    several([make_args("from_two", **settings, train__steps=8)])
    whole = numbers(tmp_path / "whole")
    for name in ("from_one", "from_two"):
        assert largest_difference(numbers(tmp_path / name), whole) < 2e-5
        (first, last) = checkpoint.list_complete(tmp_path / name / "checkpoints")
        assert checkpoint.read_manifest(first)["world_size"] != checkpoint.read_manifest(last)["world_size"]


def test_a_run_of_a_process_alone_goes_on_without_zero_and_with_it(make_args, tmp_path):
    """What it takes if nothing is said, after and before a stage that was asked for."""
    settings = {**QUIET, **DROPOUT, "train__accumulation": 2, "optim__max_grad_norm": 0.1}
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
    said = several(jobs)
    stages = [int(stage) for stage in re.findall(r"ZeRO stage (\d)", said)]
    assert stages == [0, 1, 0, 0, 1] * len(kinds)
    for kind in kinds:
        whole = numbers(tmp_path / f"{kind}_whole")
        assert all(norm > 0.1 for _, norm, *_ in whole.values())  # it clips
        for name in (f"{kind}_1_to_0", f"{kind}_0_to_1"):
            assert largest_difference(numbers(tmp_path / name), whole) < 2e-5, name


def test_muon_makes_the_same_updates_on_every_stage_that_has_whole_matrices(make_args, tmp_path):
    """Two processes put matrices together from their shares, share the work, and go on after a stop; so does one alone."""
    muon = {**QUIET, "optim__name": "muon", "optim__matrix_lr": 0.02}
    cases = {f"stage{stage}": {STAGE: stage} for stage in range(3)}
    if has_bf16():
        cases["bf16"] = {"train__precision": "bf16"}
    jobs = [make_args(f"{name}_whole", **muon, **case, train__steps=6) for name, case in cases.items()]
    jobs += [make_args(name, **muon, **case, train__steps=steps) for name, case in cases.items() for steps in (3, 6)]
    several([make_args("one", **muon, train__steps=6), make_args("from_one", **muon, train__steps=3)])
    several([*jobs, make_args("from_one", **muon, **{STAGE: 2}, train__steps=6)], processes=2)
    expected = numbers(tmp_path / "one")
    assert len(expected) == 6
    for name in ("stage0", "stage1", "stage2", "from_one"):
        assert largest_difference(numbers(tmp_path / name), expected) < 2e-5, name
    for name in cases:
        assert numbers(tmp_path / name) == numbers(tmp_path / f"{name}_whole"), name


def test_fewer_lanes_train_while_the_batch_warms_up(make_args, tmp_path):
    settings = {**QUIET, "train__accumulation": 4, "train__steps": 8}
    several([make_args("warm", **settings, train__batch_warmup_steps=8), make_args("plain", **settings)])
    lines = [x for x in read_metrics(tmp_path / "warm") if "loss" in x]
    rows = [b["tokens"] - a["tokens"] for a, b in itertools.pairwise([{"tokens": 0}, *lines])]
    assert rows == [2 * 32 * n for n in (1, 1, 2, 2, 3, 3, 4, 4)]
    (_, norm, *_), (_, of_all, *_) = (numbers(tmp_path / name)[1] for name in ("warm", "plain"))
    assert norm > of_all  # a gradient of fewer rows has more noise; it is a mean over them, not a quarter of one
