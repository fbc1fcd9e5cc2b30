"""Whoever computes attention: the same numbers."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.model.conftest import make_model, random_batch, random_memory
from xlpre.model.kernels import cpu, cpu_parts
from xlpre.model.visibility import HIDDEN

FASTER = ["sdpa", "cpu", "auto"]


def outcome(backend, two_streams, batch, memory, **shape):
    """Hidden states, memory and every gradient."""
    model = make_model(two_streams, attention=backend, **shape)
    hidden, after = model.backbone(batch, memory)
    weights = torch.linspace(-1, 1, hidden.numel()).view(hidden.shape)
    (hidden * weights).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"hidden": hidden.detach(), "memory": after.hidden, **gradients}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        largest = max(tensor.abs().max().item(), 1) if tensor.numel() else 1
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5 * largest, msg=name)


SHAPES = st.fixed_dictionaries(
    {
        "length": st.integers(4, 40),
        "rows": st.integers(1, 3),
        "mem_len": st.integers(0, 20),
        "n_head": st.sampled_from([1, 2, 4]),
        "two_streams": st.booleans(),
        "block": st.sampled_from([3, 8, 128]),
        "scores": st.sampled_from([1, 200, 1 << 20]),
        "kept": st.sampled_from([0, 1 << 20]),
        "positions": st.sampled_from(["relative", "shaw", "sinusoidal", "learned"]),
        "attention_length": st.sampled_from(["all", "same_length"]),
        "relative_segments": st.booleans(),
        "untie_r": st.booleans(),
        "clamp_len": st.sampled_from([-1, 5]),
        "remembers": st.sampled_from([0, 3, 10**6]),
        "seed": st.integers(0, 1000),
    }
)


@given(shape=SHAPES)
@settings(max_examples=25, deadline=None)
def test_all_equal_the_reference_in_outputs_memory_and_gradients(shape):
    shape = dict(shape)
    length, rows, seed, remembers = (shape.pop(name) for name in ("length", "rows", "seed", "remembers"))
    two_streams, block, scores, kept = (shape.pop(name) for name in ("two_streams", "block", "scores", "kept"))
    if shape["positions"] in ("shaw", "learned"):
        shape["n_positions"] = 12
    if shape["positions"] == "learned":
        shape["clamp_len"] = -1
    batch = random_batch(length, reuse=length // 2, rows=rows, seed=seed, remembers=remembers)
    memory = random_memory(make_model(two_streams, **shape).config, rows, shape["mem_len"], seed=seed)
    expected = outcome("reference", two_streams, batch, memory, **shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_parts, "ROWS", block)
        patch.setattr(cpu_parts, "SCORES", scores)
        patch.setattr(cpu_parts, "KEPT", kept)
        for backend in FASTER:
            assert_equal(outcome(backend, two_streams, batch, memory, **shape), expected)


@pytest.mark.parametrize("backend", ["reference", *FASTER])
def test_a_row_that_sees_nothing_gives_zero_and_no_gradient(backend):
    batch = random_batch(9, reuse=4)
    batch.key_rank[:], batch.query_rank[:] = HIDDEN, 0
    model = make_model(attention=backend, n_layer=1)
    memory = random_memory(model.config, 2, 3, valid=0)
    seen = []
    model.backbone.layers[0].attention.output.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    model(batch, memory)[0].backward()
    assert not seen[0].any()
    assert not model.backbone.layers[0].attention.value.weight.grad.any()


@pytest.mark.parametrize("shape", [{}, {"positions": "shaw", "n_positions": 9}])
def test_the_backward_pass_by_hand_is_the_derivative_with_dropout_too(shape):
    """Along one direction, by differences; the same seed takes the same probabilities."""
    batch, model = random_batch(24, reuse=12), make_model(attention="cpu", dropatt=0.3, **shape).double()
    memory = random_memory(model.config, 2, 7)
    memory = type(memory)(memory.hidden.double(), memory.valid)

    def loss():
        torch.manual_seed(3)
        return model.backbone(batch, memory)[0].square().sum()

    loss().backward()
    torch.manual_seed(4)
    parameters = [p for p in model.backbone.parameters() if p.grad is not None]
    directions = [torch.randn_like(p) for p in parameters]
    slope = sum((p.grad * d).sum() for p, d in zip(parameters, directions, strict=True)).item()
    values, step = [], 1e-6
    with torch.no_grad():
        for sign in (1, -2):
            for p, d in zip(parameters, directions, strict=True):
                p.add_(d, alpha=sign * step)
            values.append(loss().item())
    assert slope == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-4)


def test_dropout_takes_its_share_and_is_seeded():
    taken, again = (cpu.Noise(3, 0.1).signed(torch.rand(1, 401, 503)).signbit() for _ in range(2))
    assert taken.float().mean().item() == pytest.approx(0.1, abs=0.003)
    assert torch.equal(taken, again)


def test_the_reused_half_is_never_scored_against_the_rest():
    batch = random_batch(40, reuse=20)
    model = make_model(attention="cpu")
    memory = random_memory(model.config, 2, 10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_parts, "ROWS", 10)
        everywhere, _ = model.backbone._geometries(batch, memory)
    keys = [block.n_keys for block in everywhere.prepared.blocks if block.n_in_order]
    assert max(keys[:4]) <= 10 + 20 < min(keys[4:])


@pytest.mark.parametrize("recomputed", [False, True])
def test_layers_that_are_computed_again_keep_no_probabilities(recomputed):
    batch, model, kept = random_batch(40, reuse=20), make_model(attention="cpu"), []
    if recomputed:
        model.backbone.recompute_layers()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape) or x, lambda x: x):
        loss, _ = model(batch, random_memory(model.config, 2, 10))
    loss.backward()
    of_all_keys = [shape for shape in kept if len(shape) == 3 and shape[-1] == 50]  # (g, n, K)
    assert bool(of_all_keys) is not recomputed


def test_a_model_is_imported_without_torchs_compiler():
    """Which takes a second or two, and comes with `torch.compiler.disable`."""
    code = "import sys, xlpre.model.language_model, xlpre.exchange.folder; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
