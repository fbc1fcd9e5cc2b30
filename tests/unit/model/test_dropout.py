"""Dropout with cheap random numbers: still dropout."""

import pytest
import torch

from xlpre.model.dropout import Dropout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_its_share_is_taken_and_the_rest_grows_by_as_much(dtype):
    torch.manual_seed(0)
    out = Dropout(0.1)(torch.ones(401, 503, dtype=dtype))
    assert (out == 0).float().mean().item() == pytest.approx(0.1, abs=0.003)
    assert out.dtype == dtype
    assert set(out.unique().tolist()) == {0, torch.tensor(1 / 0.9, dtype=dtype).item()}


def test_the_gradient_passes_where_the_value_did():
    x = torch.ones(7, 11, requires_grad=True)
    out = Dropout(0.5)(x)
    out.sum().backward()
    assert torch.equal(x.grad, out)


def test_the_same_seed_takes_the_same_elements_and_the_next_call_others():
    dropout, x = Dropout(0.5), torch.ones(1000)
    torch.manual_seed(3)
    first, second = dropout(x), dropout(x)
    torch.manual_seed(3)
    assert torch.equal(dropout(x), first)
    assert not torch.equal(first, second)


def test_nothing_is_taken_in_evaluation():
    x = torch.randn(5)
    assert Dropout(0.5).eval()(x) is x
