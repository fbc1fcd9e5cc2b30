"""What a plan advises, and what its memory and time are made of."""

import itertools

import pytest

from pretrain.planning.flops import flops_per_step
from tests.unit.pretrain.planning_cases import plan_of, plan_on


def test_the_chosen_micro_batch_fits_and_the_next_larger_does_not():
    plan = plan_of()
    stage, micro = plan.choice
    assert stage == 1
    assert plan.fits(stage, micro)
    assert not plan.fits(stage, 2 * micro)


def test_a_higher_stage_is_taken_where_a_lower_one_does_not_fit():
    words = ["train.global_batch_size=16", "deepspeed.zero_optimization.reduce_bucket_size=1000"]
    plan = plan_of(*words)
    between = (plan.bytes(1, 1) + plan.bytes(2, 1)) / 2 * plan.device.memory / plan.usable
    assert plan_on(plan, between).choice[0] == 2
    assert plan_on(plan, 1e6).largest(3) == 0


@pytest.mark.parametrize(
    ("stage", "gpus", "words"),
    [
        (0, 1, ["train.precision=fp32"]),
        (1, 1, ["train.precision=bf16"]),
        (1, 1, ["train.precision=bf16", "deepspeed.zero_optimization.stage=0"]),  # which training refuses
        (1, 1, ["train.precision=fp32", "deepspeed.zero_optimization.stage=1"]),
        (1, 1, ["train.precision=fp32", "deepspeed.zero_optimization.offload_optimizer.device=cpu"]),
        (1, 8, ["train.precision=fp32"]),
        (2, 8, ["deepspeed.zero_optimization.stage=2"]),
        (0, 8, ["train.precision=fp32", "deepspeed.zero_optimization.stage=0"]),
    ],
)
def test_the_stage_that_is_advised_is_the_one_that_training_takes(stage, gpus, words):
    assert plan_of(*words, gpus=gpus).choice[0] == stage


def test_memory_of_the_rows_of_all_micro_steps_is_counted():
    assert plan_of().recurrent_memory == 2 * (8192 // 8) * 384 * 1024 * 2


def test_time_is_what_the_operations_take_at_the_stated_share_of_the_peak():
    plan = plan_of()
    an_update = flops_per_step(plan.model, plan.shape(32)) * 8192 / 32
    assert plan.tokens_per_step / plan.tokens_per_second(32) == pytest.approx(an_update / (8 * 0.4 * 989.5e12))


def test_muon_keeps_one_moment_of_the_matrices_and_is_not_given_stage_3():
    plain, muon = plan_of(), plan_of("optim.name=muon")
    matrices = 2 * (5 * 1024 * 1024 + 2 * 1024 * 4096)  # query, key, value, output, position key; feed-forward
    for stage in range(3):
        assert plain.state(stage).optimizer - muon.state(stage).optimizer == 4 * matrices / (8 if stage else 1)
    assert plan_on(muon, 1e6).choice == (2, 1)


def test_an_update_of_muon_needs_room_where_activations_need_less():
    short = (
        "train.global_batch_size=64",
        "optim.name=muon",
        "data.seq_len=64",
        "data.reuse_len=32",
        "model.mem_len=32",
        "model.vocab_size=2000",
    )
    few, many = plan_of(*short), plan_of("train.global_batch_size=64", "optim.name=muon")
    assert few.activations(1).all < few.updating(1) < many.activations(1).all
    assert few.bytes(1, 1) == few.lasting(1) + few.updating(1)
    assert many.bytes(1, 1) == many.lasting(1) + many.activations(1).all
    assert few.updating(1) > 4 * 2 * (5 * 1024 * 1024 + 2 * 1024 * 4096)  # all matrices, gathered
    assert plan_of("train.global_batch_size=8").updating(1) == 0


def test_offloaded_weights_leave_what_is_in_use_on_the_gpu():
    plan = plan_of("deepspeed.zero_optimization.offload_param.device=cpu")
    assert plan.state(3).weights == 2 * plan.n_parameters  # fewer than stage 3 may hold at once
    assert plan.host(3) == 2 * plan.n_parameters
    assert plan.state(2) == plan_of().state(2)  # which does not offload them


def test_computing_layers_again_lets_a_larger_micro_batch_fit():
    plain, again = plan_of(n_layer=12), plan_of("train.activation_checkpointing=true", n_layer=12)
    assert again.largest(1) > plain.largest(1)


def test_tokens_are_those_of_the_batches_as_they_warm_up():
    words = ["train.global_batch_size=64", "train.accumulation=4", "train.steps=20", "train.batch_warmup_steps=8"]
    plan = plan_of(*words)
    read = list(itertools.accumulate([16, 16, 32, 32, 48, 48, 64, 64] + 12 * [64], initial=0))
    assert [plan.tokens(steps) for steps in range(21)] == [512 * rows for rows in read]
    assert [plan.steps(512 * rows) for rows in read] == list(range(21))
    assert plan.steps(512 * 50) == 3  # the third update ends at 64 rows
    assert all(plan.largest(stage) <= plan.rows // 2 for stage in range(4))


def test_a_plan_of_fp16_is_that_of_bf16_but_for_what_stage_1_keeps():
    half, other = plan_of("train.precision=bf16"), plan_of("train.precision=fp16")
    assert (half.precision, other.precision) == ("bf16", "fp16")
    assert (half.bytes(2, 1), half.bytes(3, 1), half.recurrent_memory) == (
        other.bytes(2, 1),
        other.bytes(3, 1),
        other.recurrent_memory,
    )
    assert half.state(1) != other.state(1)
