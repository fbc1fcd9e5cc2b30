"""`pretrain/plan.py`: output and refusals."""

import re

import pytest

from pretrain.plan import main
from tests.conftest import REPOSITORY
from tests.unit.pretrain.planning_cases import CONFIG, make_plan


def test_a_single_fp32_process_has_one_copy_of_the_weights(capsys):
    plan = make_plan("train.precision=fp32", "train.global_batch_size=8", gpus=1)
    assert plan.zero_memory(0).on_device == 16 * plan.n_parameters  # weights, gradients, two moments
    assert plan.zero_memory(1).on_device == 24 * plan.n_parameters  # and master weights, and a buffer
    main(["--config", CONFIG, "model.n_layer=2", "train.precision=fp32", "train.global_batch_size=8"])
    output = capsys.readouterr().out
    assert "Recommended: ZeRO stage 0, " in output
    update_bytes = 28 * plan.n_parameters  # read weights, gradients and moments, write weights and moments
    assert f"part of the optimizer, at least {update_bytes / plan.device.bandwidth:>16,.4f}" in output
    scaling = output.partition("SCALING")[2].splitlines()[2:]
    assert [line.split()[:2] for line in scaling] == [["1", "0"], ["8", "1"]]  # GPUs, stage


def test_an_offloaded_optimizer_is_in_host_memory(capsys):
    plan, offloaded = make_plan(), make_plan("deepspeed.zero_optimization.offload_optimizer.device=cpu")
    plain, memory = plan.zero_memory(2), offloaded.zero_memory(2)
    assert (plain.optimizer, memory.optimizer, plain.host) == (12 * plan.n_parameters / 8, 0, 0)
    assert offloaded.host_memory(2) == 8 * memory.host > 12 * plan.n_parameters
    assert offloaded.peak_memory(2, 1) < plan.peak_memory(2, 1)
    args = ["model.n_layer=2", "--gpus", "8", "deepspeed.zero_optimization.offload_optimizer.device=cpu"]
    main(["--config", CONFIG, *args])
    output = capsys.readouterr().out
    assert re.search(rf"host memory per node .* {offloaded.host_memory(2) / 1e9:.2f}", output)
    assert "the optimizer runs on the CPU" in output


def test_the_scaling_table_omits_gpu_counts_that_cannot_share_the_warmup_batch(capsys):
    args = ["train.global_batch_size=64", "train.micro_batch_size=2", "train.batch_warmup_steps=8", "model.n_layer=2"]
    main(["--config", CONFIG, "--gpus", "8", *args])
    table = capsys.readouterr().out.partition("SCALING")[2].splitlines()[2:]
    assert [int(line.split()[0]) for line in table if line.strip()[:1].isdigit()] == [1, 8]


def test_the_scaling_table_has_as_many_gpus_per_node_as_the_plan(capsys):
    args = [
        "train.global_batch_size=64",
        "train.micro_batch_size=2",
        "model.n_layer=2",
        "--device",
        "h100",
        "--gpus",
        "8",
    ]
    rates = []
    for nodes in (1, 8):
        main(["--config", CONFIG, *args, "--nodes", str(nodes)])
        table = capsys.readouterr().out.partition("SCALING")[2].splitlines()
        rates.append(next(line.split()[5] for line in table if line.split()[:1] == ["8"]))
    assert rates[0] != rates[1]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--gpus", "8", "train.global_batch_size=8", "train.batch_warmup_steps=9"],
            r"train.batch_warmup_steps=9 ",
        ),
        (["--gpus", "6"], r"train.global_batch_size=8192 .*--gpus=6\b.*train.global_batch_size=8190"),
        (["--gpus", "8", "--nodes", "3"], r"--nodes=3\b"),
        (["--gpus", "8", "--mfu", "40"], r"--mfu=40.0 "),
        (["--gpus", "100000"], r"--gpus=100000 .*train.global_batch_size=8192.*raise"),
        (["--gpus", "0"], "--gpus=0 "),
        (["--nodes", "0"], "--nodes=0 "),
        (["--tokens", "0"], "--tokens=0 "),
        (["--tokens", "-5"], "--tokens=-5 "),
        (["--peak", "0"], "--peak=0 "),
        (["--peak", "-1"], "--peak=-1 "),
        (["--peak", "nan"], "--peak=nan "),
        (["deepspeed.zero_optimization=1"], r"deepspeed.zero_optimization.*mapping"),
    ],
)
def test_invalid_arguments_are_refused_with_a_remedy(args, message):
    with pytest.raises(ValueError, match=message):
        main(["--config", CONFIG, *args])


def test_every_section_is_marked_as_count_or_prediction(capsys):
    args = [
        "model.n_layer=2",
        "train.global_batch_size=4096",
        "--gpus",
        "64",
        "--device",
        "a100-80",
        "--tokens",
        "1000000000",
    ]
    main(["--config", CONFIG, *args])
    titles = re.findall(r"^[A-Z]{4}.*", capsys.readouterr().out, re.MULTILINE)
    assert len(titles) == 7
    assert all("(count" in title or "(prediction" in title for title in titles)


def test_days_on_other_numbers_of_gpus_are_those_of_the_given_tokens(capsys):
    days = []
    for n_tokens in ("1000000000000", "2000000000000"):
        main(["--config", CONFIG, "--gpus", "8", "--device", "h100", "--tokens", n_tokens, "model.n_layer=2"])
        days.append(float(re.search(r"^ +8 .* ([\d.]+) - [\d.]+ ", capsys.readouterr().out, re.MULTILINE)[1]))
    assert days[1] == pytest.approx(2 * days[0], rel=0.01)


def test_a_time_budget_is_converted_to_steps(capsys):
    main(["--config", str(REPOSITORY / "configs/pretrain/xlnet_1gpu_1day.yaml"), "model.n_layer=2"])
    assert "steps in train.hours=24" in capsys.readouterr().out
