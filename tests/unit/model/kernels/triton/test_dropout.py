"""Dropout of attention weights by Triton kernels. Run by test_interpreter.py."""

import numpy as np
import pytest
import torch

from tests.unit.model.conftest import make_model, random_batch, random_memory
from tests.unit.model.kernels.cases import (
    DEVICE,
    INTERPRETED,
    SumWithoutGradient,
    attend,
    long_except,
    needs_triton,
    output_and_gradients,
    small_case,
    small_tiles,  # noqa: F401  an automatic fixture
)
from xlpre.model.kernels.backend import load_triton
from xlpre.model.kernels.reference import ReferenceBackend

pytestmark = needs_triton


@pytest.mark.parametrize("dropout", long_except([0.1, 0.7], 0.1))
def test_dropout_has_its_rate_scales_the_rest_and_is_seeded(dropout):
    """With equal scores and values of 1, outputs are the fractions kept, over 1 - dropout."""
    meta, tensors = small_case()
    meta.query_rank[:] = 20
    even = {name: torch.zeros_like(x) for name, x in tensors.items()} | {"value": torch.ones_like(tensors["value"])}
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(attend(load_triton(), meta, even, dropout=dropout))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
    kept = outs[0][..., 0] * (1 - dropout)
    torch.testing.assert_close(kept * 33, (kept * 33).round(), rtol=0, atol=5e-3)  # 33 keys
    head_means = kept.double().mean((0, 1))
    assert head_means[0] != head_means[1]
    # of 2904 weights: the standard deviation is at most 0.009
    assert kept.double().mean().item() == pytest.approx(1 - dropout, abs=0.04)
    # keys are independent: the fraction of the 33 keys of a row has the deviation of 33 coins
    assert kept.double().std().item() == pytest.approx((dropout * (1 - dropout) / 33) ** 0.5, rel=0.3)


def test_the_backward_pass_is_the_derivative_with_dropout():
    """Along one direction, by finite differences. The same seed drops the same weights in both passes."""
    meta, tensors = small_case()

    def loss(inputs):
        torch.manual_seed(3)
        return attend(load_triton(), meta, inputs, dropout=0.3).double().square().sum()

    gradients = torch.autograd.grad(loss(tensors), list(tensors.values()))
    torch.manual_seed(4)
    directions = [torch.randn_like(x) for x in tensors.values()]
    slope = sum((g.double() * d).sum() for g, d in zip(gradients, directions, strict=True)).item()
    step, values = 3e-3, []
    with torch.no_grad():
        for sign in (1, -1):
            moved = {name: x + sign * step * d for (name, x), d in zip(tensors.items(), directions, strict=True)}
            values.append(loss(moved).item())
    assert slope == pytest.approx((values[0] - values[1]) / (2 * step), rel=2e-3)


@pytest.fixture
def maxima_of_a_device(monkeypatch):
    """Let the maximum of nan and a number be the number, as on a GPU. That of the interpreter is nan."""
    if INTERPRETED:
        from triton.runtime.interpreter import InterpreterBuilder

        monkeypatch.setattr(InterpreterBuilder, "create_maxnumf", lambda self, x, y: self.binary_op(x, y, np.fmax))


@pytest.mark.usefixtures("maxima_of_a_device")
@pytest.mark.parametrize("name", ["query", "key"])
def test_nan_reaches_the_same_outputs_as_in_the_reference(name):
    meta, tensors = small_case()
    with torch.no_grad():
        tensors[name][0, 3, 1] = torch.nan
    result, expected = (
        output_and_gradients(backend, meta, tensors, dropout=0.5) for backend in (load_triton(), ReferenceBackend)
    )
    assert 0 < expected["out"].isnan().sum() < expected["out"].numel()
    assert torch.equal(result["out"].isnan(), expected["out"].isnan())
    assert all(result[x].isnan().any() for x in ("query", "key", "value"))


def test_no_integer_in_the_compiled_graph_needs_more_than_32_bits():
    """In torch 2.11: it writes the bounds of random numbers as 32 bits into the code that it compiles for GPUs."""
    model, numbers = make_model(True, attention_backend="triton", n_layer=1, dropatt=0.1).to(DEVICE), []
    memory = random_memory(model.config, 2, 12)
    memory = type(memory)(memory.hidden.to(DEVICE), memory.valid.to(DEVICE))

    def collect(graph, inputs):
        numbers.extend(x for node in graph.graph.nodes for x in (*node.args, *node.kwargs.values()))
        return graph.forward

    torch.compile(model, backend=collect, fullgraph=True)(random_batch(20, reuse=10).to(DEVICE), memory)
    integers = [x for x in numbers if isinstance(x, int)]
    assert integers and max(map(abs, integers)) < 2**31


def test_an_output_without_a_gradient_is_no_error():
    meta, tensors = small_case()
    SumWithoutGradient.apply(attend(load_triton(), meta, tensors, dropout=0.1)).backward()
    assert all(x.grad is None or not x.grad.any() for x in tensors.values())
