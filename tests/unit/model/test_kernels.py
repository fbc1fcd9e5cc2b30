"""Whoever computes attention: the same numbers."""

import dataclasses
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import REPOSITORY
from tests.unit.model.conftest import make_model, random_batch, random_memory
from xlpre.batch import HIDDEN_RANK
from xlpre.model.attention_mask import AttentionMeta
from xlpre.model.kernels.backend import fastest, with_triton
from xlpre.model.kernels.cpu import attention
from xlpre.model.kernels.cpu.attention import Cpu
from xlpre.model.kernels.sdpa import Sdpa
from xlpre.model.positions import SCHEMES
from xlpre.model.score_terms import ScoreTerms

FASTER = ["sdpa", "cpu", "auto"]


def outcome(backend, two_streams, batch, memory, **shape):
    """Hidden states, memory and every gradient."""
    model = make_model(two_streams, attention_backend=backend, **shape)
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
        "block": st.sampled_from([1, 3, 8, 128]),
        "kept": st.sampled_from([0, 1 << 20]),
        "positions": st.sampled_from(list(SCHEMES)),
        "attention_span": st.sampled_from(["all", "same_length"]),
        "relative_segments": st.booleans(),
        "untie_r": st.booleans(),
        "clamp_len": st.sampled_from([-1, 5]),
        "visible_mem_len": st.sampled_from([0, 3, 10**6]),
        "seed": st.integers(0, 1000),
    }
)


@given(shape=SHAPES)
@settings(max_examples=25, deadline=None)
def test_all_equal_the_reference_in_outputs_memory_and_gradients(shape):
    shape = dict(shape)
    length, rows, seed, visible_mem_len = (shape.pop(name) for name in ("length", "rows", "seed", "visible_mem_len"))
    two_streams, block, kept = (shape.pop(name) for name in ("two_streams", "block", "kept"))
    if shape["positions"] in ("shaw", "learned"):
        shape["n_positions"] = 12
    if shape["positions"] == "learned":
        shape["clamp_len"] = -1
    batch = random_batch(length, reuse=length // 2, rows=rows, seed=seed, visible_mem_len=visible_mem_len)
    memory = random_memory(make_model(two_streams, **shape).config, rows, shape["mem_len"], seed=seed)
    expected = outcome("reference", two_streams, batch, memory, **shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "ROWS", (block, block))
        patch.setattr(attention, "KEPT", kept)
        for backend in FASTER:
            assert_equal(outcome(backend, two_streams, batch, memory, **shape), expected)


@pytest.mark.parametrize("backend", ["reference", *FASTER])
def test_a_row_that_sees_nothing_gives_zero_and_no_gradient(backend):
    batch = random_batch(9, reuse=4)
    batch.key_rank[:], batch.query_rank[:] = HIDDEN_RANK, 0
    model = make_model(attention_backend=backend, n_layer=1)
    memory = random_memory(model.config, 2, 3, valid=0)
    seen = []
    model.backbone.layers[0].attention.output.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    model(batch, memory)[0].backward()
    assert not seen[0].any()
    assert not model.backbone.layers[0].attention.value.weight.grad.any()


@pytest.mark.parametrize("shape", [{}, {"positions": "shaw", "n_positions": 9}])
def test_the_backward_pass_by_hand_is_the_derivative_with_dropout_too(shape):
    """Along one direction, by differences; the same seed takes the same probabilities."""
    batch, model = random_batch(24, reuse=12), make_model(attention_backend="cpu", dropatt=0.3, **shape).double()
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


def weights(n_rows, dropout, seed, score=0.0):
    """P', (2, H, N, K): what attention gives each of 64 keys that all rows see, whose scores are equal, at first."""
    attn_meta = AttentionMeta(
        query_rank=torch.ones(2, n_rows, dtype=torch.int32),
        key_rank=torch.zeros(2, 64, dtype=torch.int32),
        row_segments=torch.zeros(2, n_rows, dtype=torch.int64),
        key_segments=torch.zeros(2, 64, dtype=torch.int64),
        positions=torch.zeros(2, n_rows, dtype=torch.int64),
        n_content=0,
        n_self_visible=0,
        max_distance=None,
        direction=torch.zeros(2, dtype=torch.int64),
        pos_encoding=torch.zeros(2, 65, 1),
    )
    torch.manual_seed(seed)
    query, key = torch.ones(2, n_rows, 4, 64), torch.full((2, 64, 4, 64), score)
    value = torch.eye(64)[None, :, None].expand(2, -1, 4, -1).contiguous()
    attention = Cpu()
    attn_meta = dataclasses.replace(attn_meta, prepared=attention.prepare(attn_meta, query))
    return attention.attend(ScoreTerms(query, 1.0), key, value, attn_meta, dropout).transpose(1, 2)


def test_dropout_takes_its_share_and_is_seeded():
    first, again, other = (weights(403, 0.1, seed) for seed in (3, 3, 4))
    taken = first == 0
    assert taken.float().mean().item() == pytest.approx(0.1, abs=0.003)
    torch.testing.assert_close(first[~taken], torch.full_like(first[~taken], 1 / 64 / 0.9))
    assert torch.equal(first, again)
    for others in (other == 0, taken.roll(1, 0), taken.roll(1, 1), taken.roll(1, 2), taken.roll(1, 3)):
        assert (taken & others).float().mean().item() == pytest.approx(0.01, abs=0.001)  # as if by chance


def test_what_is_no_number_is_not_hidden():
    assert weights(3, 0.0, 0, score=torch.nan).isnan().all()


def test_a_gradient_in_another_order_in_memory_is_the_same_gradient():
    batch, model = random_batch(40, reuse=20), make_model(attention_backend="cpu")
    attn_meta, _ = model.backbone._geometries(batch, random_memory(model.config, 2, 10))
    terms = [torch.randn(2, n, 2, 8, requires_grad=True) for n in (attn_meta.query_rank.size(1), 50, 50)]
    out = Cpu().attend(ScoreTerms(terms[0], 0.3), *terms[1:], attn_meta, 0.0)
    grad = torch.randn(out.shape)
    first, second = (
        torch.autograd.grad(out, terms, given, retain_graph=True)
        for given in (grad, grad.transpose(1, 3).contiguous().transpose(1, 3))
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_bits_do_not_depend_on_the_number_of_threads():
    batch, found, before = random_batch(40, reuse=20), [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            model = make_model(attention_backend="cpu", dropatt=0.2)
            attn_meta, _ = model.backbone._geometries(batch, random_memory(model.config, 2, 10))
            torch.manual_seed(1)
            terms = [torch.randn(2, n, 2, 8, requires_grad=True) for n in (attn_meta.query_rank.size(1), 50, 50)]
            out = Cpu().attend(ScoreTerms(terms[0], 0.3), *terms[1:], attn_meta, 0.2)
            found.append([out, *torch.autograd.grad(out.square().sum(), terms)])
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_the_reused_half_is_never_scored_against_the_rest():
    batch = random_batch(40, reuse=20)
    model = make_model(attention_backend="cpu")
    memory = random_memory(model.config, 2, 10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "ROWS", (10, 10))
        everywhere, _ = model.backbone._geometries(batch, memory)
    keys = everywhere.prepared.places["n_keys"]  # (B, blocks): 4 of content rows
    assert keys[:, :2].max() <= 10 + 20 < keys[:, 2:4].min()


@pytest.mark.parametrize("recomputed", [False, True])
def test_layers_that_are_computed_again_keep_no_probabilities(recomputed):
    batch, model, kept = random_batch(40, reuse=20), make_model(attention_backend="cpu"), []
    if recomputed:
        model.backbone.enable_activation_checkpointing()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape) or x, lambda x: x):
        loss, _ = model(batch, random_memory(model.config, 2, 10))
    loss.backward()
    of_all_keys = [shape for shape in kept if len(shape) == 4 and shape[-1] == 50]  # (B, H, N, K)
    assert bool(of_all_keys) is not recomputed


def test_a_model_is_imported_without_torchs_compiler():
    """Which takes a second or two, and comes with `torch.compiler.disable`."""
    code = "import sys, xlpre.model.language_model, xlpre.conversion.model_folder; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_attention_is_tried_and_timed_where_nothing_but_torch_and_psutil_is_installed():
    absent = ("deepspeed", "google_crc32c", "omegaconf", "safetensors", "sentencepiece", "transformers", "yaml")
    code = f"import sys; sys.modules.update(dict.fromkeys({absent})); import xlpre.model.kernels.selfcheck.selfcheck, kernels, windows"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY / "benchmarks", env=environment).returncode == 0


def test_auto_is_what_the_device_serves():
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert isinstance(fastest(cpu, torch.float32, 64), Cpu)
    assert isinstance(fastest(cpu, torch.bfloat16, 64), Sdpa)
    if not torch.cuda.is_available():
        assert isinstance(fastest(gpu, torch.bfloat16, 64), Sdpa)


def test_without_the_package_the_error_says_what_to_set(monkeypatch):
    monkeypatch.setattr("xlpre.model.kernels.backend.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="model.attention_backend=auto"):
        with_triton()


def test_offsets_of_distances_without_keys_are_refused():
    with pytest.raises(AssertionError, match="hands over keys of zeros too"):
        ScoreTerms(torch.ones(1, 1, 1, 1), 1.0, pos_offset=torch.ones(2, 2, 1))
