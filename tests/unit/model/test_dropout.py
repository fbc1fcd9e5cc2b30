"""Dropout."""

import pytest
import torch

from xlpre.model.dropout import Dropout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_drops_a_fraction_p_and_scales_the_rest(dtype):
    torch.manual_seed(0)
    out = Dropout(0.1)(torch.ones(401, 503, dtype=dtype))
    assert (out == 0).float().mean().item() == pytest.approx(0.1, abs=0.003)
    assert out.dtype == dtype
    assert set(out.unique().tolist()) == {0, torch.tensor(1 / 0.9, dtype=dtype).item()}


def test_the_gradient_uses_the_mask_of_the_forward_pass():
    x = torch.ones(7, 11, requires_grad=True)
    out = Dropout(0.5)(x)
    out.sum().backward()
    assert torch.equal(x.grad, out)


def test_the_same_seed_drops_the_same_elements():
    dropout, x = Dropout(0.5), torch.ones(1000)
    torch.manual_seed(3)
    first, second = dropout(x), dropout(x)
    torch.manual_seed(3)
    assert torch.equal(dropout(x), first)
    assert not torch.equal(first, second)


def test_dropout_is_the_identity_in_evaluation():
    x = torch.randn(5)
    assert Dropout(0.5).eval()(x) is x
