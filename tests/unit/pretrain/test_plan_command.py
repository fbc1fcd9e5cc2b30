"""What `pretrain/plan.py` prints, and what it refuses."""

import re

import pytest

from pretrain.plan import main
from tests.conftest import REPOSITORY
from tests.unit.pretrain.planning_cases import CONFIG, plan_of


def test_the_memory_that_a_process_alone_in_fp32_is_told_has_one_copy_of_the_weights(capsys):
    plan = plan_of("train.precision=fp32", "train.global_batch_size=8", gpus=1)
    assert plan.state(0).on_device == 16 * plan.n_parameters  # weights, gradients, two moments
    assert plan.state(1).on_device == 24 * plan.n_parameters  # and master weights, and a buffer
    main(["--config", CONFIG, "model.n_layer=2", "train.precision=fp32", "train.global_batch_size=8"])
    shown = capsys.readouterr().out
    assert "Take stage 0 and" in shown
    bytes_of_update = 28 * plan.n_parameters  # reads weights, gradients and moments, writes all but the gradients
    assert f"of it, optimizer at least {bytes_of_update / plan.device.bandwidth:>22,.4f}" in shown
    reach = shown.partition("REACH")[2].splitlines()[2:]
    assert [line.split()[:2] for line in reach] == [["1", "0"], ["8", "1"]]  # GPUs, stage


def test_an_offloaded_optimizer_is_in_the_memory_of_the_node_and_not_of_the_gpu(capsys):
    plan, offloaded = plan_of(), plan_of("deepspeed.zero_optimization.offload_optimizer.device=cpu")
    plain, state = plan.state(2), offloaded.state(2)
    assert (plain.optimizer, state.optimizer, plain.host) == (12 * plan.n_parameters / 8, 0, 0)
    assert offloaded.host(2) == 8 * state.host > 12 * plan.n_parameters
    assert offloaded.bytes(2, 1) < plan.bytes(2, 1)
    words = ["model.n_layer=2", "--gpus", "8", "deepspeed.zero_optimization.offload_optimizer.device=cpu"]
    main(["--config", CONFIG, *words])
    shown = capsys.readouterr().out
    assert re.search(rf"in the memory of a node .* {offloaded.host(2) / 1e9:.2f}", shown)
    assert "the update runs on the CPU" in shown


def test_the_last_table_leaves_out_gpus_that_could_not_share_a_batch_that_warms_up(capsys):
    words = ["train.global_batch_size=64", "train.accumulation=4", "train.batch_warmup_steps=8", "model.n_layer=2"]
    main(["--config", CONFIG, "--gpus", "8", *words])
    table = capsys.readouterr().out.partition("REACH")[2].splitlines()[2:]
    assert [int(line.split()[0]) for line in table if line.strip()[:1].isdigit()] == [1, 8]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--gpus", "8", "train.global_batch_size=8", "train.accumulation=2", "train.batch_warmup_steps=9"],
            r"train.batch_warmup_steps \(9\)",
        ),
        (["--gpus", "6"], r"train.global_batch_size \(8192\) must be a multiple of --gpus \(6\); set train.global_batch_size=8190"),
        (["--gpus", "8", "--nodes", "3"], r"--nodes \(3\)"),
        (["--gpus", "8", "--mfu", "40"], r"--mfu \(40.0\)"),
        (["--gpus", "100000"], r"--gpus \(100000\) must be at most train.global_batch_size \(8192\).*; take fewer, or raise"),
        (["--gpus", "0"], r"--gpus \(0\) must be a positive number"),
        (["--nodes", "0"], r"--nodes \(0\) must be a positive number"),
        (["--tokens", "0"], r"--tokens \(0\) must be a positive number"),
        (["--tokens", "-5"], r"--tokens \(-5\) must be a positive number"),
        (["--peak", "0"], r"--peak \(0\) must be a positive number"),
        (["--peak", "-1"], r"--peak \(-1\) must be a positive number"),
        (["--peak", "nan"], r"--peak \(nan\) must be a positive number"),
        (["deepspeed.zero_optimization=1"], r"deepspeed.zero_optimization \(1\) must be a mapping"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_with_a_way_out(words, message):
    with pytest.raises(ValueError, match=message):
        main(["--config", CONFIG, *words])


def test_every_section_says_whether_it_is_a_count_or_a_prediction(capsys):
    words = [
        "model.n_layer=2",
        "train.global_batch_size=4096",
        "--gpus",
        "64",
        "--device",
        "a100-80",
        "--tokens",
        "1000000000",
    ]
    main(["--config", CONFIG, *words])
    titles = re.findall(r"^[A-Z]{4}.*", capsys.readouterr().out, re.MULTILINE)
    assert len(titles) == 6
    assert all("(count" in title or "(prediction" in title for title in titles)


def test_a_plan_for_a_day_says_how_many_updates_it_holds(capsys):
    main(["--config", str(REPOSITORY / "configs/pretrain/xlnet_1gpu_1day.yaml"), "model.n_layer=2"])
    assert "updates in train.hours=24" in capsys.readouterr().out
