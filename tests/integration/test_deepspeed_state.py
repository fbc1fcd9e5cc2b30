"""State of a DeepSpeed engine, read and loaded into another engine of the same or another ZeRO stage."""

import math

import pytest
import torch

from tests.integration.one_engine import (
    Net,
    build,
    equal,
    every_engine,
    needs_fp16,
    one_process,  # noqa: F401  a fixture of these tests
    read_state,
    update,
)
from xlpre.training import optimizer_state


@every_engine
@pytest.mark.parametrize("nonfinite", [(), (2, 3), (0, 1, 4)], ids=["none", "two", "first_and_last"])
def test_an_engine_with_loaded_state_continues_bit_for_bit(precision, stage, nonfinite):
    engine = build(precision, stage)
    for number in range(5):
        update(engine, number, math.inf if number in nonfinite else 1.0)
    weights, moments, counters = read_state(engine)
    net = Net()
    net.load_state_dict(weights)
    other = build(precision, stage, net)
    optimizer_state.load_state(other, weights, moments, counters)
    loaded = read_state(other)
    assert equal(loaded[0], weights) and equal(loaded[1], moments) and loaded[2] == counters
    assert counters["updates"] == 5 - len(nonfinite) and len(moments) == 2 * len(weights)
    assert [update(engine, number) for number in range(5, 8)] == [update(other, number) for number in range(5, 8)]
    assert equal(read_state(engine)[0], read_state(other)[0])


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("change", ["weight is not written", "moment is not written", "signature", "removed"])
def test_a_deepspeed_whose_state_cannot_be_written_is_refused_by_its_version(monkeypatch, stage, change):
    import deepspeed.utils

    kind = "local" if stage == 3 else "full"
    name = f"safe_set_{kind}_optimizer_state" if change == "moment is not written" else f"safe_set_{kind}_fp32_param"
    stub = (lambda: None) if change == "signature" else (lambda *arguments: None)
    if change == "removed":
        monkeypatch.delattr(deepspeed.utils, name)
    else:
        monkeypatch.setattr(deepspeed.utils, name, stub)
    monkeypatch.setattr(deepspeed, "__version__", "0.99.1")
    with pytest.raises(ValueError, match=r"deepspeed 0\.99\.1 cannot be used: .* Install .* deepspeed==0\.19\.8"):
        build("fp32", stage)


@every_engine
def test_the_check_at_the_start_changes_neither_weights_nor_updates(monkeypatch, precision, stage):
    net = Net()
    weights = {name: value.clone() for name, value in net.state_dict().items()}
    engine = build(precision, stage, net)
    monkeypatch.setattr("xlpre.training.deepspeed_engine.init_moments", lambda engine: None)
    unchecked = build(precision, stage)
    if precision == "fp32":
        assert equal(optimizer_state.gather_weights(engine, keep=True), weights)
    assert [update(engine, number) for number in range(3)] == [update(unchecked, number) for number in range(3)]
    assert all(map(equal, read_state(engine)[:2], read_state(unchecked)[:2]))


@pytest.mark.parametrize(("stage", "other_stage"), [(0, 1), (1, 0), (0, 3), (3, 0)])
def test_another_stage_loads_the_same_bits_and_makes_the_same_updates(stage, other_stage):
    """The updates agree up to rounding: flat updates and clipping round differently."""
    source = build("fp32", stage)
    for number in range(5):
        update(source, number, math.inf if number == 2 else 1.0)
    weights, moments, counters = read_state(source)
    net = Net()
    net.load_state_dict(weights)
    target = build("fp32", other_stage, net)
    optimizer_state.load_state(target, weights, moments, counters)
    loaded = read_state(target)
    assert equal(loaded[0], weights) and equal(loaded[1], moments)
    assert (
        (loaded[2]["updates"], loaded[2]["skipped_steps"]) == (counters["updates"], counters["skipped_steps"]) == (4, 1)
    )
    for number in range(5, 8):
        assert update(target, number) == pytest.approx(update(source, number), rel=1e-5)
    torch.testing.assert_close(read_state(target)[0], read_state(source)[0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("stage", "offloaded"), [*((stage, "offload_optimizer") for stage in (1, 2, 3)), (3, "offload_param")]
)
def test_offloaded_state_can_be_read_and_loaded(stage, offloaded):
    engine, other = (build("fp32", stage, **{offloaded: {"device": "cpu"}}) for _ in range(2))
    update(engine, 0)
    weights, moments, counters = read_state(engine)
    optimizer_state.load_state(other, weights, moments, counters)
    loaded = read_state(other)
    assert equal(loaded[0], weights) and equal(loaded[1], moments) and loaded[2] == counters


@pytest.mark.parametrize("stage", [1, 2])
def test_deepspeed_links_the_moments_of_the_first_group_only(stage, monkeypatch):
    from deepspeed.utils import safe_get_full_optimizer_state

    monkeypatch.setattr("xlpre.training.deepspeed_engine.init_moments", lambda engine: None)
    engine = build("fp32", stage)
    update(engine, 0)
    decayed, not_decayed = engine.module.inner.weight, engine.module.norm.weight
    assert safe_get_full_optimizer_state(decayed, "exp_avg") is not None
    with pytest.raises((ValueError, KeyError, AttributeError)):
        safe_get_full_optimizer_state(not_decayed, "exp_avg")
    optimizer_state._link_moments(engine)
    assert safe_get_full_optimizer_state(not_decayed, "exp_avg") is not None


def test_deepspeed_stage_3_cannot_set_a_tensor_that_is_not_divisible(monkeypatch):
    """The last of 4 processes has one element of a bias of 5, and its share has 2, like the others."""
    from deepspeed.utils import safe_set_full_fp32_param

    engine = build("fp32", 3)
    bias = engine.module.inner.bias
    share = torch.zeros(2)
    monkeypatch.setattr(engine.optimizer, "_get_fp32_opt_state_partition", lambda *args, **kwargs: (share, 0))
    monkeypatch.setattr(engine.optimizer, "_get_param_partition_rank", lambda parameter: 2)
    with pytest.raises(RuntimeError, match="exceeds"):
        safe_set_full_fp32_param(bias, torch.arange(5.0))


@needs_fp16
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_saved_fields_of_the_fp16_loss_scaler_exist_and_change(stage):
    engine = build("fp16", stage)
    first = optimizer_state.read_counters(engine)["loss_scale"]
    assert set(first) == set(optimizer_state.LOSS_SCALER_FIELDS)
    for number in range(3):  # the first does not lower the scale
        update(engine, number, math.inf)
    update(engine, 3)
    last = optimizer_state.read_counters(engine)["loss_scale"]
    assert last["cur_scale"] < first["cur_scale"] and last["cur_iter"] == 4 and last["last_overflow_iter"] == 2
