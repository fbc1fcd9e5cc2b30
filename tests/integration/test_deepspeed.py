"""What DeepSpeed 0.19.8 does that this project relies on or works around; a version that does otherwise is noticed here."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.integration.one_engine import (
    CPU,
    WIDTH,
    Net,
    built,
    engine_around,
    equal,
    every_engine,
    everything,
    needs_bf16,
    one_process,  # noqa: F401  a fixture of these tests
    update,
)
from xlpre.training import optimizer_state
from xlpre.training.checkpoint import list_complete
from xlpre.training.checkpoint_writer import CheckpointWriter
from xlpre.training.deepspeed_engine import TrainConfig, resolve_precision
from xlpre.training.distributed import Comm
from xlpre.training.optimizer import ClipAndSkipAdamW, OptimConfig, set_lr

# updates that are not finite


@every_engine
@pytest.mark.parametrize("factor", [math.inf, math.nan])
def test_an_update_that_is_not_finite_is_not_made_and_is_counted(precision, stage, factor):
    engine = built(precision, stage)
    for number in range(2):
        update(engine, number)
    weights, moments, counters = everything(engine)
    update(engine, 2, factor)
    after = everything(engine)
    assert equal(after[0], weights) and equal(after[1], moments)
    assert (after[2]["updates"], after[2]["skipped_steps"]) == (2, counters["skipped_steps"] + 1)
    update(engine, 3)
    assert not equal(everything(engine)[0], weights)


@every_engine
def test_an_engine_is_built_without_a_word(precision, stage, capsys):
    built(precision, stage)
    assert capsys.readouterr().out == ""


@every_engine
def test_no_update_waits_for_the_device_so_that_deepspeed_can_time_it(precision, stage, monkeypatch):
    from deepspeed.accelerator import get_accelerator

    waited, engine = [], built(precision, stage)
    monkeypatch.setattr(type(get_accelerator()), "synchronize", lambda self, *given: waited.append(given))
    for number in range(4):  # it times from the third on
        update(engine, number)
    assert not waited


@every_engine
def test_weights_that_are_not_finite_are_not_saved(precision, stage, tmp_path):
    engine = built(precision, stage)
    writer = CheckpointWriter(tmp_path, Comm(), 2)
    update(engine, 0)
    writer.begin(1, engine, [], {}, lambda path, weights: path.mkdir())
    set_lr(engine.optimizer, 3e38)
    update(engine, 1)
    with pytest.raises(
        ValueError, match=r"not finite after step 2 \(\S+ is the first .* from step_00000001, whose weights are finite"
    ):
        writer.begin(2, engine, [], {}, lambda path, weights: path.mkdir())
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"] == [x.name for x in list_complete(tmp_path)]


def test_without_zero_deepspeed_itself_would_make_it(monkeypatch):
    monkeypatch.setattr(ClipAndSkipAdamW, "step", torch.optim.AdamW.step)
    engine = built("fp32", 0)
    update(engine, 0, math.nan)
    assert engine.skipped_steps == 0
    assert not all(weight.isfinite().all() for weight in optimizer_state.gather_weights(engine, keep=True).values())


@every_engine
def test_the_norm_of_the_gradient_is_there_and_is_torchs(precision, stage):
    engine, net = built(precision, stage), Net()
    _, norm = update(engine, 0)
    torch.manual_seed(0)
    net(torch.randn(2, WIDTH)).backward()
    assert norm == pytest.approx(nn.utils.get_total_norm([p.grad for p in net.parameters()]).item(), rel=0.02)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_it_clips_as_torch_does(stage):
    engine, net = built("fp32", stage, clip=0.1), Net()
    adam = torch.optim.AdamW(
        [{"params": [p for p in net.parameters() if p.dim() > 1]}], lr=0.01, eps=1e-6, weight_decay=0.01
    )
    adam.add_param_group({"params": [p for p in net.parameters() if p.dim() == 1], "weight_decay": 0.0})
    for number in range(3):
        _, norm = update(engine, number)
        assert norm > 0.1  # of what is not clipped yet
        torch.manual_seed(number)
        adam.zero_grad()
        net(torch.randn(2, WIDTH)).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        adam.step()
    for name, weight in optimizer_state.gather_weights(engine, keep=True).items():
        torch.testing.assert_close(weight, net.state_dict()[name], rtol=1e-5, atol=1e-6)


class WithIdle(Net):
    """A matrix of it has no part in the loss."""

    def __init__(self):
        super().__init__()
        self.idle = nn.Linear(3, 3)


def test_what_has_no_part_in_the_loss_decays_and_is_saved_alike_on_every_stage():
    weights, moments = {}, {}
    for stage in range(4):
        engine = built("fp32", stage, WithIdle())
        update(engine, 0)
        weights[stage], moments[stage], _ = everything(engine)
    start = WithIdle().idle.weight
    for stage in range(4):
        torch.testing.assert_close(weights[stage]["idle.weight"], start * (1 - 0.01 * 0.01), rtol=1e-6, atol=0)
        assert moments[stage].keys() == moments[1].keys()
        assert not moments[stage]["idle.weight/exp_avg"].any()


def test_a_process_alone_sends_itself_no_gradients_without_zero(monkeypatch):
    import deepspeed.comm

    engine, sent = built("fp32", 0), []
    monkeypatch.setattr(deepspeed.comm, "all_reduce", lambda *args, **kwargs: sent.append(args))
    update(engine, 0)
    assert not sent
    engine.enable_backward_allreduce = True  # as DeepSpeed would
    update(engine, 1)
    assert sent


class Sum(nn.Module):
    """Every weight has the gradient `factor`."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, factor):
        return self.weight.float().sum() * factor


@needs_bf16
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_of_bf16_are_added_in_fp32(stage):
    train = TrainConfig(batch_size=4, accumulation=4, precision="bf16")
    engine = engine_around(Sum(), train, OptimConfig(), {"zero_optimization": {"stage": stage}})
    for factor in (1.0, 2.0**-9, 2.0**-9, 2.0**-9):  # whose sum is 1 in bf16
        engine.backward(engine(factor))
        engine.step()
    # between processes stage 1 would then round the sum to bf16, which its gradients are sent in
    assert float(engine.get_global_grad_norm()) == pytest.approx(1 + 3 * 2.0**-9, rel=1e-5)


# what is refused


def test_offloading_refuses_torchs_optimizer_unless_told_not_to():
    train = TrainConfig(batch_size=2, precision="fp32")
    overrides = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    with pytest.raises(Exception, match="client provided optimizer"):
        engine_around(Net(), train, OptimConfig(), {**overrides, "zero_force_ds_cpu_optimizer": True})
    engine_around(Net(), train, OptimConfig(), overrides)


@needs_bf16
def test_deepspeed_makes_an_update_of_its_own_in_bf16_without_zero():
    """The reason why it is refused."""
    import deepspeed

    net = Net()
    adam = torch.optim.AdamW(net.parameters())
    settings = {"train_batch_size": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 0}}
    deepspeed.initialize(model=net, optimizer=adam, config=settings)
    assert all(state["step"] == 1 for state in adam.state.values()) and adam.state


@needs_bf16
def test_bf16_without_zero_is_refused():
    with pytest.raises(ValueError, match=r"stage=0 with bf16 \(train.precision=bf16\)"):
        built("bf16", 0)


def test_bf16_is_refused_on_a_processor_without_instructions_for_it(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        assert isinstance(getattr(torch.cpu, name)(), bool)  # private names
        monkeypatch.setattr(torch.cpu, name, lambda: False)
    with pytest.raises(ValueError, match="train.precision=bf16 on a processor without instructions"):
        built("bf16", 1)
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert resolve_precision(CPU, "bf16") == "bf16"  # cannot be asked there


def test_fp16_is_refused_where_it_is_not_to_be_had(monkeypatch):
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: False)
    with pytest.raises(ValueError, match="train.precision=fp16 is not to be had on this cpu"):
        built("fp16", 1)


def test_a_key_that_deepspeed_does_not_have_is_refused_by_name():
    with pytest.raises(ValueError, match=r"deepspeed: .*reduce_bukket_size"):
        built("fp32", 2, reduce_bukket_size=5)


def test_nothing_of_deepspeeds_own_checkpoints_is_used():
    """They were not crash-safe, needed a conversion for other numbers of processes, and unpickled what they read."""
    repository = Path(__file__).parents[2]
    for folder in ("xlpre", "pretrain", "finetune"):
        for path in (repository / folder).rglob("*.py"):
            code = path.read_text()
            assert not any(f".{name}(" in code for name in ("save_checkpoint", "load_checkpoint")), path
