"""What is read from DeepSpeed's engines and put back into them, of this or another stage."""

import math

import pytest
import torch

from tests.integration.one_engine import (
    Net,
    built,
    equal,
    every_engine,
    everything,
    needs_fp16,
    one_process,  # noqa: F401  a fixture of these tests
    update,
)
from xlpre.training import optimizer_state


@every_engine
@pytest.mark.parametrize("not_finite", [(), (2, 3), (0, 1, 4)], ids=["none", "two", "first_and_last"])
def test_what_is_read_and_put_into_another_engine_goes_on_bit_for_bit(precision, stage, not_finite):
    engine = built(precision, stage)
    for number in range(5):
        update(engine, number, math.inf if number in not_finite else 1.0)
    weights, moments, counters = everything(engine)
    net = Net()
    net.load_state_dict(weights)
    other = built(precision, stage, net)
    optimizer_state.load_state(other, weights, moments, counters)
    got = everything(other)
    assert equal(got[0], weights) and equal(got[1], moments) and got[2] == counters
    assert counters["updates"] == 5 - len(not_finite) and len(moments) == 2 * len(weights)
    assert [update(engine, number) for number in range(5, 8)] == [update(other, number) for number in range(5, 8)]
    assert equal(everything(engine)[0], everything(other)[0])


@pytest.mark.parametrize(("one", "other"), [(0, 1), (1, 0), (0, 3), (3, 0)])
def test_another_stage_is_given_the_same_bits_and_makes_the_same_updates(one, other):
    """To rounding: an update of many parameters in one row rounds some of them otherwise, and so does clipping."""
    before = built("fp32", one)
    for number in range(5):
        update(before, number, math.inf if number == 2 else 1.0)
    weights, moments, counters = everything(before)
    net = Net()
    net.load_state_dict(weights)
    after = built("fp32", other, net)
    optimizer_state.load_state(after, weights, moments, counters)
    got = everything(after)
    assert equal(got[0], weights) and equal(got[1], moments)
    assert (got[2]["updates"], got[2]["skipped_steps"]) == (counters["updates"], counters["skipped_steps"]) == (4, 1)
    for number in range(5, 8):
        assert update(after, number) == pytest.approx(update(before, number), rel=1e-5)
    torch.testing.assert_close(everything(after)[0], everything(before)[0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("stage", "offloaded"), [*((stage, "offload_optimizer") for stage in (1, 2, 3)), (3, "offload_param")]
)
def test_what_is_offloaded_can_be_read_and_put_back(stage, offloaded):
    engine, other = (built("fp32", stage, **{offloaded: {"device": "cpu"}}) for _ in range(2))
    update(engine, 0)
    weights, moments, counters = everything(engine)
    optimizer_state.load_state(other, weights, moments, counters)
    got = everything(other)
    assert equal(got[0], weights) and equal(got[1], moments) and got[2] == counters


@pytest.mark.parametrize("stage", [1, 2])
def test_deepspeed_links_the_moments_of_the_first_group_alone(stage):
    from deepspeed.utils import safe_get_full_optimizer_state

    engine = built("fp32", stage)
    update(engine, 0)
    decayed, spared = engine.module.inner.weight, engine.module.norm.weight
    assert safe_get_full_optimizer_state(decayed, "exp_avg") is not None
    with pytest.raises((ValueError, KeyError, AttributeError)):
        safe_get_full_optimizer_state(spared, "exp_avg")
    optimizer_state._link_moments(engine)
    assert safe_get_full_optimizer_state(spared, "exp_avg") is not None


def test_stage_3_cannot_put_a_tensor_that_the_processes_cannot_share_equally(monkeypatch):
    """The last of 4 processes has one element of a bias of 5, and its share is as large as the others': 2."""
    from deepspeed.utils import safe_set_full_fp32_param

    engine = built("fp32", 3)
    bias = engine.module.inner.bias
    share = torch.zeros(2)
    monkeypatch.setattr(engine.optimizer, "_get_fp32_opt_state_partition", lambda *args, **kwargs: (share, 0))
    monkeypatch.setattr(engine.optimizer, "_get_param_partition_rank", lambda parameter: 2)
    with pytest.raises(RuntimeError, match="exceeds"):
        safe_set_full_fp32_param(bias, torch.arange(5.0))


@needs_fp16
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_scaler_of_fp16_has_the_numbers_that_are_saved_and_they_move(stage):
    engine = built("fp16", stage)
    first = optimizer_state.read_counters(engine)["loss_scale"]
    assert set(first) == set(optimizer_state.SCALER)
    for number in range(3):  # the first is forgiven
        update(engine, number, math.inf)
    update(engine, 3)
    last = optimizer_state.read_counters(engine)["loss_scale"]
    assert last["cur_scale"] < first["cur_scale"] and last["cur_iter"] == 4 and last["last_overflow_iter"] == 2
