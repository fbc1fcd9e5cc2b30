"""Dropout of attention probabilities by GPU kernels. Run by test_triton.py."""

import pytest
import torch

from tests.unit.model.conftest import make_model, random_batch, random_memory
from tests.unit.model.triton_cases import (  # noqa: F401  a fixture
    DEVICE,
    Unfelt,
    attended,
    runs_kernels,
    small_case,
    small_tiles,
)
from xlpre.model.kernels.backend import with_triton

pytestmark = runs_kernels


@pytest.mark.parametrize("dropout", [0.1, 0.7])
def test_dropout_takes_its_share_grows_the_rest_and_is_seeded(dropout):
    """Equal scores and values of one: outputs are the shares kept, over 1 - dropout."""
    attn_meta, tensors = small_case()
    attn_meta.query_rank[:] = 20
    even = {name: torch.zeros_like(x) for name, x in tensors.items()} | {"value": torch.ones_like(tensors["value"])}
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(attended(with_triton(), attn_meta, even, dropout=dropout))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
    kept = outs[0][..., 0] * (1 - dropout)
    torch.testing.assert_close(kept * 33, (kept * 33).round(), rtol=0, atol=5e-3)  # 33 keys
    of_heads = kept.double().mean((0, 1))
    assert of_heads[0] != of_heads[1]
    assert kept.double().mean().item() == pytest.approx(
        1 - dropout, abs=0.04
    )  # of 2904 draws: 0.009 at most is one deviation
    # each key by itself: the share of a row's 33 is spread as that of so many coins
    assert kept.double().std().item() == pytest.approx((dropout * (1 - dropout) / 33) ** 0.5, rel=0.3)


def test_the_backward_pass_is_the_derivative_with_dropout_too():
    """Along one direction, by differences; the same seed takes the same probabilities in both passes."""
    attn_meta, tensors = small_case()

    def loss(moved):
        torch.manual_seed(3)
        return attended(with_triton(), attn_meta, moved, dropout=0.3).double().square().sum()

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


def test_no_number_that_a_compiler_is_given_needs_more_than_32_bits():
    """Torch 2.11 writes the bounds of random numbers as 32 bits into what it compiles for GPUs."""
    model, numbers = make_model(True, attention_backend="triton", n_layer=1, dropatt=0.1).to(DEVICE), []
    memory = random_memory(model.config, 2, 12)
    memory = type(memory)(memory.hidden.to(DEVICE), memory.valid.to(DEVICE))

    def look(graph, inputs):
        numbers.extend(x for node in graph.graph.nodes for x in (*node.args, *node.kwargs.values()))
        return graph.forward

    torch.compile(model, backend=look, fullgraph=True)(random_batch(20, reuse=10).to(DEVICE), memory)
    whole = [x for x in numbers if isinstance(x, int)]
    assert whole and max(map(abs, whole)) < 2**31


def test_no_gradient_is_no_error():
    attn_meta, tensors = small_case()
    Unfelt.apply(attended(with_triton(), attn_meta, tensors, dropout=0.1)).backward()
    assert all(x.grad is None or not x.grad.any() for x in tensors.values())
