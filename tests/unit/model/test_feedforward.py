"""Feed-forward layers and their activations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from tests.conftest import examples
from tests.unit.model.conftest import make_model
from xlpre.model.feedforward import gelu


@settings(max_examples=examples(20))
@given(
    shape=st.sampled_from([(0,), (1,), (3, 5), (70_001,), (2, 3, 65_536), (2, 40_000, 2)]),
    spread=st.sampled_from([0.01, 1.0, 30.0, 1e5]),
    transposed=st.booleans(),
    seed=st.integers(0, 99),
)
def test_gelu_and_its_gradient_equal_those_of_torch(shape, spread, transposed, seed):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread
    x = (x.T if transposed and x.dim() == 2 else x).requires_grad_()
    grad = torch.randn(x.shape)
    y = gelu(x)
    (gradient,) = torch.autograd.grad(y, x, grad)
    exact = x.detach().double().requires_grad_()
    expected = F.gelu(exact, approximate="tanh")
    (expected_gradient,) = torch.autograd.grad(expected, exact, grad.double())
    torch.testing.assert_close(y, expected.float(), rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(gradient, expected_gradient.float(), rtol=1e-5, atol=1e-5)
    assert torch.equal(gelu(x.detach()), y)  # without autograd


def test_gelu_in_bf16_is_rounded_once():
    special = torch.tensor([torch.nan, torch.inf, 0.0, 3.3e38, 1.00390625, 1.01171875])
    x = torch.cat([special, torch.randn(70_001) * 3]).bfloat16()
    grad = torch.randn(x.shape).bfloat16()
    results = []
    for values in (x, x.float()):
        values.requires_grad_()
        y = gelu(values)
        (gradient,) = torch.autograd.grad(y, values, grad.to(y.dtype))
        results.append((y.detach().bfloat16(), gradient.bfloat16()))
    for rounded, expected in zip(*results, strict=True):
        assert torch.equal(rounded.nan_to_num(7), expected.nan_to_num(7))
        assert torch.equal(rounded.isnan(), expected.isnan())


@pytest.mark.parametrize("kind", ["glu", "reglu", "geglu", "swiglu"])
def test_a_gated_feed_forward_has_as_many_parameters_as_a_plain_one(kind):
    plain, gated = make_model(d_inner=240), make_model(d_inner=240, feed_forward=kind)
    count = lambda model: sum(p.numel() for p in model.backbone.layers[0].feed_forward.parameters())  # noqa: E731
    assert abs(count(plain) - count(gated)) < 0.02 * count(plain)
    x = torch.randn(1, 2, 16)
    ff = gated.backbone.layers[0].feed_forward
    gate = {
        "glu": torch.sigmoid,
        "reglu": torch.relu,
        "geglu": lambda g: torch.nn.functional.gelu(g, approximate="tanh"),
        "swiglu": lambda g: g * torch.sigmoid(g),
    }[kind]
    torch.testing.assert_close(ff(x), ff.outer(gate(ff.gate(x)) * ff.inner(x)))
