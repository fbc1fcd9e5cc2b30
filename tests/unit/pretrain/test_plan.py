"""Recommendation, memory and time of a plan."""

import itertools

import pytest

from pretrain.config import PretrainConfig
from pretrain.planning.flops import flops_per_step
from pretrain.planning.plan import Plan
from pretrain.planning.plan_report import describe
from tests.conftest import REPOSITORY
from tests.unit.pretrain.planning_cases import make_plan, with_device_memory
from xlpre.config.loader import load_config
from xlpre.training.device_specs import DEVICES


def test_the_recommended_micro_batch_fits_and_the_next_larger_does_not():
    plan = make_plan()
    stage, micro = plan.recommendation
    assert stage == 1
    assert plan.fits(stage, micro)
    assert not plan.fits(stage, 2 * micro)


def test_a_model_of_another_folder_is_not_planned():
    with pytest.raises(ValueError, match=r"init_from=elsewhere is invalid here: .*Set init_from=null"):
        make_plan("init_from=elsewhere")


def test_a_higher_stage_is_recommended_if_a_lower_one_does_not_fit():
    overrides = ["train.global_batch_size=16", "deepspeed.zero_optimization.reduce_bucket_size=1000"]
    plan = make_plan(*overrides)
    between = (plan.peak_memory(1, 1) + plan.peak_memory(2, 1)) / 2 * plan.device.memory / plan.usable_memory
    assert with_device_memory(plan, between).recommendation[0] == 2
    assert with_device_memory(plan, 1e6).largest_micro_batch(3) == 0


@pytest.mark.parametrize(
    ("stage", "gpus", "overrides"),
    [
        (0, 1, ["train.precision=fp32"]),
        (1, 1, ["train.precision=bf16"]),
        (1, 1, ["train.precision=bf16", "deepspeed.zero_optimization.stage=0"]),  # refused by training
        (1, 1, ["train.precision=fp32", "deepspeed.zero_optimization.stage=1"]),
        (1, 1, ["train.precision=fp32", "deepspeed.zero_optimization.offload_optimizer.device=cpu"]),
        (1, 8, ["train.precision=fp32"]),
        (2, 8, ["deepspeed.zero_optimization.stage=2"]),
        (0, 8, ["train.precision=fp32", "deepspeed.zero_optimization.stage=0"]),
    ],
)
def test_the_recommended_stage_is_that_of_training(stage, gpus, overrides):
    assert make_plan(*overrides, gpus=gpus).recommendation[0] == stage


def test_recurrent_memory_has_the_rows_of_all_micro_steps():
    assert make_plan().recurrent_memory == 2 * (8192 // 8) * 384 * 1024 * 2


def test_time_follows_from_needed_flops_and_mfu():
    plan = make_plan()
    flops = flops_per_step(plan.model, plan.batch_shape(32)) * 8192 / 32
    assert plan.tokens_per_step / plan.tokens_per_second(32) == pytest.approx(flops / (8 * 0.4 * 989.5e12))


def test_muon_has_one_moment_for_matrices_and_no_stage_3():
    plain, muon = make_plan(), make_plan("optim.name=muon")
    matrices = 2 * (5 * 1024 * 1024 + 2 * 1024 * 4096)  # query, key, value, output, position key; feed-forward
    for stage in range(3):
        assert plain.zero_memory(stage).optimizer - muon.zero_memory(stage).optimizer == 4 * matrices / (
            8 if stage else 1
        )
    assert with_device_memory(muon, 1e6).recommendation == (2, 1)


def test_muon_adds_the_exchange_of_matrices_to_the_communication():
    """Eight devices have two layers of 5 matrices with 1 M elements and 2 with 4 M: shares of 3.25 M, whose borders split matrices.

    The third device sends 0.75 M elements of a matrix to the fourth, and 1.5 M elements of an update back to the second.
    """
    plain, muon = make_plan(), make_plan("optim.name=muon")
    added = [muon.communication(stage, 8)[0] - plain.communication(stage, 8)[0] for stage in range(4)]
    assert added == [4 * 7 / 8 * 26 * 1024**2, 4 * 2.25 * 1024**2, 4 * 2.25 * 1024**2, 0]
    assert make_plan("optim.name=muon", gpus=1).communication(1, 8)[0] == 0


def test_the_peak_is_muons_update_if_activations_are_smaller():
    short = (
        "train.global_batch_size=64",
        "optim.name=muon",
        "data.seq_len=64",
        "data.reuse_len=32",
        "model.mem_len=32",
        "model.vocab_size=2000",
    )
    few, many = make_plan(*short), make_plan("train.global_batch_size=64", "optim.name=muon")
    assert few.activation_memory(1).peak < few.muon_workspace(1) < many.activation_memory(1).peak
    assert few.peak_memory(1, 1) == few.static_memory(1) + few.muon_workspace(1)
    assert many.peak_memory(1, 1) == many.static_memory(1) + many.activation_memory(1).peak
    assert few.muon_workspace(0) > 4 * 2 * (5 * 1024 * 1024 + 2 * 1024 * 4096) > few.muon_workspace(1)  # all matrices
    assert make_plan("train.global_batch_size=8").muon_workspace(1) == 0


def test_cuda_graphs_add_copies_of_the_gradients_and_keep_activations():
    plan, without = (
        make_plan(
            "optim.name=muon", "model.attention_backend=triton", f"train.cuda_graphs={wanted}", gpus=1, device=device
        )
        for wanted, device in (("null", "h100"), ("false", "h100"))
    )
    copies = 2 * (2 * plan.n_parameters + plan.recurrent_memory * 4 // plan.rows_per_gpu)
    smaller = min(plan.activation_memory(4).peak, plan.muon_workspace(1))
    assert plan.peak_memory(1, 4) == pytest.approx(without.peak_memory(1, 4) + copies + smaller)
    assert "copies for CUDA graphs" in describe(plan, "h100", None)
    for wanted, settings in (("null", {"gpus": 8}), ("true", {"gpus": 1, "device": "cpu"})):
        assert make_plan(f"train.cuda_graphs={wanted}", **settings).graph_memory(1, 4) == 0


def test_the_memory_measured_on_an_h200_was_as_planned():
    """Peaks of allocated memory in training with CUDA graphs in bf16, from reports/gpu, which leave out some copies of the graphs."""
    shape = ["model.n_layer=12", "model.d_model=384", "model.n_head=6", "model.d_inner=1536", "model.dropout=0.1"]
    shape += ["model.dropatt=0.1", "model.norm=pre", "model.final_norm=true", "train.global_batch_size=256"]
    common = ["tokenizer.vocab_size=8000"]
    base, small = (
        Plan(
            load_config(PretrainConfig, REPOSITORY / f"configs/pretrain/{name}.yaml", overrides),
            DEVICES["h200"],
            1,
            1,
            0.4,
        )
        for name, overrides in (
            ("xlnet_base", [*common, "train.global_batch_size=32"]),
            ("ten_million_words_causal", [*common, *shape]),
        )
    )
    assert base.peak_memory(1, 32) == pytest.approx(9.04e9, rel=0.05)
    assert small.peak_memory(1, 256) == pytest.approx(8.052e9, rel=0.05)


def test_offloaded_weights_leave_weights_in_use_on_the_gpu():
    plan = make_plan("deepspeed.zero_optimization.offload_param.device=cpu")
    assert plan.zero_memory(3).weights == 2 * plan.n_parameters  # fewer than stage3_max_live_parameters
    assert plan.host_memory(3) == 2 * plan.n_parameters
    assert plan.zero_memory(2) == make_plan().zero_memory(2)  # stage 2 does not offload them


def test_activation_checkpointing_allows_a_larger_micro_batch():
    plain, checkpointed = make_plan(n_layer=12), make_plan("train.activation_checkpointing=true", n_layer=12)
    assert checkpointed.largest_micro_batch(1) > plain.largest_micro_batch(1)


def test_tokens_follow_the_batch_warmup():
    overrides = [
        "train.global_batch_size=64",
        "train.micro_batch_size=2",
        "train.steps=20",
        "train.batch_warmup_steps=8",
    ]
    plan = make_plan(*overrides)
    rows_read = list(itertools.accumulate([16, 16, 32, 32, 48, 48, 64, 64] + 12 * [64], initial=0))
    assert [plan.total_tokens(n_steps) for n_steps in range(21)] == [512 * rows for rows in rows_read]
    assert [plan.steps_for(512 * rows) for rows in rows_read] == list(range(21))
    assert plan.steps_for(512 * 50) == 3  # the third step ends at 64 rows
    assert all(plan.largest_micro_batch(stage) <= plan.rows_per_gpu // 2 for stage in range(4))


def test_fp16_and_bf16_differ_in_stage_1_only():
    half, other = make_plan("train.precision=bf16"), make_plan("train.precision=fp16")
    assert (half.precision, other.precision) == ("bf16", "fp16")
    assert half.recurrent_memory == other.recurrent_memory
    for stage in (2, 3):  # the gradient of the softmax has other temporary tensors
        assert half.peak_memory(stage, 1) == pytest.approx(other.peak_memory(stage, 1), rel=0.002)
    assert half.zero_memory(1) != other.zero_memory(1)


@pytest.mark.parametrize(("save_memory", "n_saved", "n_on_disk"), [("newest", 1, 2), ("all", 1, 4), ("none", 0, 0)])
def test_a_checkpoint_has_the_memory_of_all_lanes_and_old_ones_have_none(save_memory, n_saved, n_on_disk):
    plan = make_plan("train.keep_last_checkpoints=3", f"train.save_memory={save_memory}")
    model, n = plan.model, plan.n_parameters
    memory = model.n_layer * plan.config.train.global_batch_size * model.mem_len * model.d_model * 2
    assert [*plan.checkpoint_parts.values()] == [4 * n, 4 * n, 8 * n, n_saved * memory]
    assert plan.checkpoints_on_disk == 4 * 16 * n + n_on_disk * memory
