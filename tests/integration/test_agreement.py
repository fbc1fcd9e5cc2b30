"""No speed without agreement: which models benchmarks/step.py refuses to time."""

import pytest
import torch

from tests.conftest import REPOSITORY

SHAPE = {
    "n_layer": 2,
    "d_model": 32,
    "window": 32,
    "mem_len": 16,
    "reuse_len": 16,
    "rows": 2,
    "vocab_size": 100,
    "d_inner": 64,
}


@pytest.fixture
def step(monkeypatch):
    """The modules of `benchmarks/` that say who agrees."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    import agreement
    import contenders

    return agreement, contenders


@pytest.mark.parametrize("name", ["terms.position.key.weight", "query.weight"])
def test_one_wrong_gradient_among_many_keeps_a_model_out(step, monkeypatch, name):
    """Those of attention are a thousandth or less of the norm of all gradients, which would not show it."""
    agreement, contenders = step
    loss = contenders.Xlpre.loss

    def wrong(one):
        one.model.get_parameter(f"backbone.layers.1.attention.{name}").register_hook(torch.neg)
        return loss(one)

    names = ["xlpre:sdpa", "hf"]
    c = {**contenders.DEFAULT, **SHAPE}
    assert agreement.agreeing(names, c)[0].keys() == set(names)
    monkeypatch.setattr(contenders.Xlpre, "loss", wrong)
    found, failed = agreement.agreeing(names, c)
    assert found.keys() == {"hf"}
    assert f"those of backbone.layers.1.attention.{name} are" in failed["xlpre:sdpa"]


def test_another_loss_keeps_a_model_out(step, monkeypatch):
    agreement, contenders = step
    loss = contenders.Xlpre.loss
    monkeypatch.setattr(contenders.Xlpre, "loss", lambda one: loss(one) + 0.001)
    _, failed = agreement.agreeing(["xlpre", "hf"], {**contenders.DEFAULT, **SHAPE})
    assert "losses do not agree" in failed["xlpre"]
