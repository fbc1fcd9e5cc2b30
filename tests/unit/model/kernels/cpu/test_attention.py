"""Attention by the CPU kernels."""

import math
from dataclasses import replace

import pytest
import torch

from tests.unit.model.conftest import make_model, random_batch, random_memory
from xlpre.model.attention_mask import AttentionMeta
from xlpre.model.kernels.cpu import attention
from xlpre.model.kernels.cpu.attention import CpuBackend, schedule_blocks
from xlpre.model.kernels.cpu.build import is_available
from xlpre.model.kernels.reference import ReferenceBackend
from xlpre.model.kernels.selfcheck.fixtures import (
    attention_case,
    clone_leaves,
    random_attention_meta,
    random_attention_tensors,
    relative_error,
    unusual_attention_inputs,
)
from xlpre.model.memory import initial_memory
from xlpre.model.score_terms import ScoreTerms

pytestmark = pytest.mark.skipif(not is_available(), reason="no C++ compiler")


def prepared_rows(model, batch, memory):
    """The backend, prepared for all rows of a batch."""
    pos_encoding = model.backbone.pos_encoding(
        memory.mem_len + batch.input_ids.size(1), batch.input_ids.size(1), model.backbone.mask_embedding
    )
    return model.backbone._prepare_attention(batch, memory, pos_encoding)[0]


@pytest.mark.parametrize("shape", [{}, {"positions": "shaw", "n_positions": 9}])
def test_the_backward_pass_is_the_derivative_with_dropout(shape):
    """Along one direction, by finite differences. The same seed drops the same weights."""
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


def attention_weights(n_rows, dropout, seed, score=0.0):
    """Weights (2, H, N, K) of 64 keys that all rows see, with equal scores."""
    meta = AttentionMeta(
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
    backend = CpuBackend.prepare(meta, query.dtype)
    return backend.attend(ScoreTerms(query, 1.0), key, value, dropout).transpose(1, 2)


def test_dropout_has_its_rate_and_is_seeded():
    first, same_seed, other_seed = (attention_weights(403, 0.1, seed) for seed in (3, 3, 4))
    dropped = first == 0
    assert dropped.float().mean().item() == pytest.approx(0.1, abs=0.003)
    torch.testing.assert_close(first[~dropped], torch.full_like(first[~dropped], 1 / 64 / 0.9))
    assert torch.equal(first, same_seed)
    for other in (other_seed == 0, *(dropped.roll(1, dim) for dim in range(4))):
        assert (dropped & other).float().mean().item() == pytest.approx(0.01, abs=0.001)  # independent


def test_nan_is_not_masked():
    assert attention_weights(3, 0.0, 0, score=torch.nan).isnan().all()


def test_the_memory_layout_of_a_gradient_does_not_matter():
    batch, model = random_batch(40, reuse=20), make_model(attention_backend="cpu")
    backend = prepared_rows(model, batch, random_memory(model.config, 2, 10))
    n_rows = backend.attn_meta.query_rank.size(1)
    tensors = [torch.randn(2, n, 2, 8, requires_grad=True) for n in (n_rows, 50, 50)]
    out = backend.attend(ScoreTerms(tensors[0], 0.3), *tensors[1:], 0.0)
    d_out = torch.randn(out.shape)
    first, second = (
        torch.autograd.grad(out, tensors, gradient, retain_graph=True)
        for gradient in (d_out, d_out.transpose(1, 3).contiguous().transpose(1, 3))
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_the_number_of_threads(dtype):
    batch, results, n_threads = random_batch(40, reuse=20), [], torch.get_num_threads()
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            model = make_model(attention_backend="cpu", dropatt=0.2)
            backend = prepared_rows(model, batch, random_memory(model.config, 2, 10))
            torch.manual_seed(1)
            n_rows = backend.attn_meta.query_rank.size(1)
            tensors = [torch.randn(2, n, 2, 8, dtype=dtype, requires_grad=True) for n in (n_rows, 50, 50)]
            out = backend.attend(ScoreTerms(tensors[0], 0.3), *tensors[1:], 0.2)
            results.append([out, *torch.autograd.grad(out.square().sum(), tensors)])
    finally:
        torch.set_num_threads(n_threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_rows_of_the_reused_half_are_not_scored_against_the_other_half(monkeypatch):
    batch, model = random_batch(40, reuse=20), make_model(attention_backend="cpu")
    monkeypatch.setattr(attention, "BLOCK_ROWS", (10, 10))
    backend = prepared_rows(model, batch, random_memory(model.config, 2, 10))
    n_keys = backend.schedule.tensors["n_keys"]  # (B, blocks): 4 of content rows
    assert n_keys[:, :2].max() <= 10 + 20 < n_keys[:, 2:4].min()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_activation_checkpointing_stores_no_probabilities(checkpointing):
    batch, model, saved = random_batch(40, reuse=20), make_model(attention_backend="cpu"), []
    if checkpointing:
        model.backbone.enable_activation_checkpointing()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.shape) or x, lambda x: x):
        loss, _ = model(batch, random_memory(model.config, 2, 10))
    loss.backward()
    probabilities = [shape for shape in saved if len(shape) == 4 and shape[-1] == 50]  # (B, H, N, K)
    assert bool(probabilities) is not checkpointing


@pytest.mark.parametrize("grad_enabled", [True, False])
def test_without_gradients_no_probabilities_are_written(grad_enabled, monkeypatch):
    batch, model, written, fill = (
        random_batch(40, reuse=20),
        make_model(attention_backend="cpu"),
        set(),
        attention._attention_args,
    )
    monkeypatch.setattr(
        attention,
        "_attention_args",
        lambda schedule, tensors, **scalars: written.update(tensors) or fill(schedule, tensors, **scalars),
    )
    with torch.set_grad_enabled(grad_enabled):
        model(batch, random_memory(model.config, 2, 10))
    assert ("probs" in written) is grad_enabled


@pytest.mark.parametrize("is_within", [True, False])
def test_the_bound_on_saved_probabilities_counts_all_heads(is_within, monkeypatch):
    meta, saved = random_attention_meta(2, 8, 4, 2, "cpu"), []
    shape = (2, 4, 10, 12)  # (B, H, N, K)
    monkeypatch.setattr(attention, "MAX_SAVED_PROBS", math.prod(shape) - (not is_within))
    case = attention_case(CpuBackend, meta, random_attention_tensors(meta, 4, 8, torch.float32))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.shape) or x, lambda x: x):
        case.output()
    assert (shape in saved) is is_within


@pytest.mark.parametrize("saves_probs", [True, False])
@pytest.mark.parametrize(("window", "tile", "head_width"), [(24, 8, 8), (50, 16, 5), (70, 48, 48)])
def test_bf16_is_at_least_as_exact_as_torchs_operators(window, tile, head_width, saves_probs, monkeypatch):
    torch.manual_seed(tile)
    if not saves_probs:
        monkeypatch.setattr(attention, "MAX_SAVED_PROBS", 0)
    inputs = unusual_attention_inputs(tile, 3, head_width, torch.bfloat16, "cpu")
    usual = random_attention_meta(2, window, 11, 7, "cpu")
    inputs["usual"] = usual, random_attention_tensors(usual, 3, head_width, torch.bfloat16)
    for feature, (meta, rounded) in inputs.items():
        exact = clone_leaves(rounded, torch.float64)
        d_output = torch.randn_like(exact["query"])
        expected = attention_case(ReferenceBackend, meta, exact).run(d_output)
        errors, torchs_errors = (
            relative_error(attention_case(backend, meta, clone_leaves(rounded)).run(d_output.bfloat16()), expected)
            for backend in (CpuBackend, ReferenceBackend)
        )
        assert errors.keys() == torchs_errors.keys() and len(errors) > 5
        assert all(errors[name] <= 1.2 * torchs_errors[name] for name in errors), (feature, errors, torchs_errors)


def test_in_bf16_dropout_hits_the_same_weights_in_both_passes(monkeypatch):
    meta = random_attention_meta(2, 70, 11, 7, "cpu")
    rounded = random_attention_tensors(meta, 3, 16, torch.bfloat16)
    d_output = torch.randn_like(rounded["query"])
    results = {}
    for dtype in (torch.float32, torch.bfloat16):
        for max_saved in (0, attention.MAX_SAVED_PROBS):
            monkeypatch.setattr(attention, "MAX_SAVED_PROBS", max_saved)
            case = attention_case(CpuBackend, meta, clone_leaves(rounded, dtype))
            results[dtype, max_saved] = case.run(d_output, dropout=0.3)
    (exact, *others) = results.values()
    assert all(max(relative_error(other, exact).values()) < 0.02 for other in others)


def test_without_query_rows_all_gradients_are_zero():
    meta = random_attention_meta(2, 8, 4, 2, "cpu")
    meta = replace(
        meta,
        query_rank=meta.query_rank[:, :0],
        row_segments=meta.row_segments[:, :0],
        positions=meta.positions[:, :0],
        n_content=0,
        n_self_visible=0,
    )
    case = attention_case(CpuBackend, meta, random_attention_tensors(meta, 2, 4, torch.float32))
    _, *gradients = case.run(torch.ones_like(case.tensors["query"])).values()
    assert not any(x.any() for x in gradients)


def test_other_dtypes_are_refused():
    model = make_model(attention_backend="cpu").half()
    memory = initial_memory(model.config, 2, mem_len=4, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"attention_backend=cpu .*float16 on cpu.*model.attention_backend=auto"):
        model(random_batch(), memory)


@pytest.mark.parametrize("name", ["query", "key", "value", "pos_key", "r_w_bias", "segment_diff"])
def test_tensors_of_another_shape_or_dtype_do_not_reach_the_kernels(name):
    meta = random_attention_meta(2, 8, 4, 2, "cpu")
    case = attention_case(CpuBackend, meta, random_attention_tensors(meta, 2, 4, torch.float32))
    for tensor in (case.tensors[name][:, :1], case.tensors[name].double()):
        with pytest.raises(AssertionError):
            replace(case, tensors={**case.tensors, name: tensor}).output()


def test_metadata_with_a_row_missing_is_not_scheduled():
    meta = random_attention_meta(2, 8, 4, 2, "cpu")
    with pytest.raises(AssertionError):
        schedule_blocks(replace(meta, direction=meta.direction[:1]))
