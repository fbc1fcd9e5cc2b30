"""Behaviour of DeepSpeed 0.19.8 that this project relies on or works around; a change in another version fails here."""

import math

import pytest
import torch
from torch import nn

from tests.integration.one_engine import (
    CPU,
    WIDTH,
    Net,
    build,
    equal,
    every_engine,
    make_engine,
    needs_bf16,
    needs_fp16,
    one_process,  # noqa: F401  a fixture of these tests
    read_state,
    update,
)
from xlpre.training import optimizer_state
from xlpre.training.checkpoint import list_complete
from xlpre.training.checkpoint_writer import CheckpointWriter
from xlpre.training.clip_and_skip import ClipAndSkipAdamW
from xlpre.training.config import OptimConfig, TrainConfig
from xlpre.training.deepspeed_engine import resolve_precision
from xlpre.training.distributed import Comm
from xlpre.training.optimizer import set_lr

# updates with gradients that are not finite


@every_engine
@pytest.mark.parametrize("factor", [math.inf, math.nan])
def test_an_update_that_is_not_finite_is_skipped_and_counted(precision, stage, factor):
    engine = build(precision, stage)
    for number in range(2):
        update(engine, number)
    weights, moments, counters = read_state(engine)
    update(engine, 2, factor)
    after = read_state(engine)
    assert equal(after[0], weights) and equal(after[1], moments)
    assert (after[2]["updates"], after[2]["skipped_steps"]) == (2, counters["skipped_steps"] + 1)
    update(engine, 3)
    assert not equal(read_state(engine)[0], weights)


@needs_fp16
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_fp16_training_skips_more_steps_than_the_loss_scale_can_be_halved(stage):
    engine = build("fp16", stage)
    for number in range(24):
        update(engine, number, math.inf)
    assert read_state(engine)[2]["skipped_steps"] == 24


@every_engine
def test_building_an_engine_prints_nothing(precision, stage, capsys):
    build(precision, stage)
    assert capsys.readouterr().out == ""


@every_engine
def test_no_update_synchronizes_the_device_for_timers(precision, stage, monkeypatch):
    from deepspeed.accelerator import get_accelerator

    calls, engine = [], build(precision, stage)
    monkeypatch.setattr(type(get_accelerator()), "synchronize", lambda self, *args: calls.append(args))
    for number in range(4):  # the timers start at the third update
        update(engine, number)
    assert not calls


@every_engine
def test_weights_that_are_not_finite_are_not_saved(precision, stage, tmp_path):
    engine = build(precision, stage)
    writer = CheckpointWriter(tmp_path, Comm(), 2)
    update(engine, 0)
    writer.begin(1, engine, [], {}, lambda step, path, weights: {})
    set_lr(engine.optimizer, 3e38)
    update(engine, 1)
    with pytest.raises(ValueError, match=r"not finite after step 2 \(the first is \S+\).* resumes from step_00000001"):
        writer.begin(2, engine, [], {}, lambda step, path, weights: {})
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"] == [x.name for x in list_complete(tmp_path)]


def test_deepspeed_without_zero_does_not_skip_an_update(monkeypatch):
    monkeypatch.setattr(ClipAndSkipAdamW, "step", torch.optim.AdamW.step)
    engine = build("fp32", 0)
    update(engine, 0, math.nan)
    assert engine.skipped_steps == 0
    assert not all(weight.isfinite().all() for weight in optimizer_state.gather_weights(engine, keep=True).values())


@every_engine
def test_the_gradient_norm_equals_that_of_torch(precision, stage):
    engine, net = build(precision, stage), Net()
    _, norm = update(engine, 0)
    torch.manual_seed(0)
    net(torch.randn(2, WIDTH)).backward()
    assert norm == pytest.approx(nn.utils.get_total_norm([p.grad for p in net.parameters()]).item(), rel=0.02)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_clipping_equals_that_of_torch(stage):
    engine, net = build("fp32", stage, max_grad_norm=0.1), Net()
    adam = torch.optim.AdamW(
        [{"params": [p for p in net.parameters() if p.dim() > 1]}], lr=0.01, eps=1e-6, weight_decay=0.01
    )
    adam.add_param_group({"params": [p for p in net.parameters() if p.dim() == 1], "weight_decay": 0.0})
    for number in range(3):
        _, norm = update(engine, number)
        assert norm > 0.1  # before clipping
        torch.manual_seed(number)
        adam.zero_grad()
        net(torch.randn(2, WIDTH)).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        adam.step()
    for name, weight in optimizer_state.gather_weights(engine, keep=True).items():
        torch.testing.assert_close(weight, net.state_dict()[name], rtol=1e-5, atol=1e-6)


class NetWithUnusedWeight(Net):
    """A network with a matrix that is not part of the loss."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(3, 3)


def test_an_unused_weight_is_decayed_and_saved_in_every_stage():
    weights, moments = {}, {}
    for stage in range(4):
        engine = build("fp32", stage, NetWithUnusedWeight())
        update(engine, 0)
        weights[stage], moments[stage], _ = read_state(engine)
    initial = NetWithUnusedWeight().unused.weight
    for stage in range(4):
        torch.testing.assert_close(weights[stage]["unused.weight"], initial * (1 - 0.01 * 0.01), rtol=1e-6, atol=0)
        assert moments[stage].keys() == moments[1].keys()
        assert not moments[stage]["unused.weight/exp_avg"].any()


def test_a_single_process_without_zero_reduces_no_gradients(monkeypatch):
    import deepspeed.comm

    engine, calls = build("fp32", 0), []
    monkeypatch.setattr(deepspeed.comm, "all_reduce", lambda *args, **kwargs: calls.append(args))
    update(engine, 0)
    assert not calls
    engine.enable_backward_allreduce = True  # the default of DeepSpeed
    update(engine, 1)
    assert calls


class Sum(nn.Module):
    """Sum of the weights times `factor`, so that every gradient is `factor`."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, factor):
        return self.weight.float().sum() * factor


@needs_bf16
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bf16_gradients_are_accumulated_in_fp32(stage):
    train = TrainConfig(global_batch_size=4, micro_batch_size=1, precision="bf16")
    engine = make_engine(Sum(), train, OptimConfig(), {"zero_optimization": {"stage": stage}})
    for factor in (1.0, 2.0**-9, 2.0**-9, 2.0**-9):  # their sum is 1 in bf16
        engine.backward(engine(factor))
        engine.step()
    assert float(engine.get_global_grad_norm()) == pytest.approx(1 + 3 * 2.0**-9, rel=1e-5)


@needs_bf16
def test_deepspeed_cannot_overlap_the_reduction_with_the_backward_pass_in_bf16_in_stage_1():
    """See docs/distributed.md. Stage 2 can overlap them."""
    assert not hasattr(build("bf16", 1, overlap_comm=True).optimizer, "overlap_comm")
    for precision, stage in (("bf16", 2), ("fp32", 1)):
        assert build(precision, stage, overlap_comm=True).optimizer.overlap_comm is True


# refused settings


def test_deepspeed_refuses_to_offload_the_optimizer_of_torch_by_default():
    train = TrainConfig(global_batch_size=2, precision="fp32")
    overrides = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    with pytest.raises(Exception, match="client provided optimizer"):
        make_engine(Net(), train, OptimConfig(), {**overrides, "zero_force_ds_cpu_optimizer": True})
    make_engine(Net(), train, OptimConfig(), overrides)


@needs_bf16
def test_deepspeed_makes_an_extra_update_in_bf16_without_zero():
    """This is why bf16 without ZeRO is refused."""
    import deepspeed

    net = Net()
    adam = torch.optim.AdamW(net.parameters())
    config = {"train_batch_size": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 0}}
    deepspeed.initialize(model=net, optimizer=adam, config=config)
    assert all(state["step"] == 1 for state in adam.state.values()) and adam.state


@needs_bf16
def test_bf16_without_zero_is_refused():
    with pytest.raises(ValueError, match=r"stage=0 is invalid with train.precision=bf16"):
        build("bf16", 0)


def test_bf16_is_refused_on_a_processor_without_bf16_instructions(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        assert isinstance(getattr(torch.cpu, name)(), bool)  # private names
        monkeypatch.setattr(torch.cpu, name, lambda: False)
    with pytest.raises(ValueError, match="train.precision=bf16 is invalid: .* no bf16 instructions"):
        build("bf16", 1)
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert resolve_precision(CPU, "bf16") == "bf16"  # not checked there


def test_fp16_is_refused_on_a_device_without_it(monkeypatch):
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: False)
    with pytest.raises(ValueError, match="train.precision=fp16 is invalid: this cpu"):
        build("fp16", 1)


def test_an_unknown_nested_key_is_refused_with_its_name():
    with pytest.raises(ValueError, match=r"deepspeed.zero_optimization.reduce_bukket_size .*'reduce_bucket_size'"):
        build("fp32", 2, reduce_bukket_size=5)
