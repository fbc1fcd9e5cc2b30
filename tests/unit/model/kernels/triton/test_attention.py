"""Attention by Triton kernels against the reference. Run by test_interpreter.py."""

import types
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.unit.model.conftest import make_model, random_batch, random_memory
from tests.unit.model.kernels.cases import (
    DEVICE,
    DTYPES,
    POSITION_TERMS,
    SEGMENT_TERMS,
    attend,
    long_except,
    needs_triton,
    output_and_gradients,
    random_meta,
    random_tensors,
    small_case,
    small_tiles,  # noqa: F401  an automatic fixture
)
from xlpre.model.kernels.backend import load_triton
from xlpre.model.kernels.reference import ReferenceBackend
from xlpre.model.score_terms import ScoreTerms

pytestmark = needs_triton
SHAPES = {  # T, M, other rows, content rows, maximum distance, H, E, absent terms
    "two streams": (21, 9, 5, True, None, 2, 16, ("pos_offset",)),
    "two tile multiples": (33, 31, 17, True, None, 1, 32, ("pos_offset",)),
    "same length": (16, 16, 0, True, 16, 2, 16, ("pos_offset", *SEGMENT_TERMS)),  # Transformer-XL
    "last layer": (19, 7, 6, False, None, 2, 12, ("pos_offset",)),  # and a head width that is padded
    "tiny": (5, 0, 3, True, 2, 3, 5, ("pos_offset",)),  # less than a tile, no memory
    "shaw": (23, 4, 0, True, None, 2, 16, ("r_r_bias", *SEGMENT_TERMS)),
    "absolute": (18, 3, 4, True, None, 2, 16, POSITION_TERMS),
}


def to_device(memory):
    return type(memory)(memory.hidden.to(DEVICE), memory.valid.to(DEVICE))


@pytest.mark.parametrize(
    ("name", "seed", "dtype"),
    long_except(
        ((name, seed, dtype) for name in SHAPES for seed, dtype in enumerate(DTYPES)),
        *((name, 0, torch.float32) for name in ("two streams", "same length", "shaw", "absolute")),
        ("last layer", 1, torch.float16),
    ),
    ids=str,
)
def test_outputs_and_all_gradients_equal_the_reference(name, seed, dtype):
    n_tokens, n_memory, n_others, has_content, max_distance, n_head, width, without = SHAPES[name]
    rng = np.random.default_rng(seed)
    sizes = {"n_tokens": n_tokens, "n_memory": n_memory, "n_others": n_others}
    meta = random_meta(rng, **sizes, has_content=has_content, max_distance=max_distance)
    tensors = random_tensors(meta, rng, n_head, width, dtype, without)
    result = output_and_gradients(load_triton(), meta, tensors)
    exact = {name: x.detach().float().requires_grad_() for name, x in tensors.items()}
    expected = output_and_gradients(ReferenceBackend, meta, exact)
    # in 16 bits, a few units in the last place
    rtol = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}[dtype]
    for name, tensor in expected.items():
        assert result[name].dtype == dtype
        largest = tensor.abs().max().item()
        torch.testing.assert_close(result[name].float(), tensor, rtol=rtol, atol=rtol * max(largest, 0.1), msg=name)


def test_a_window_without_targets_has_no_output_and_updates_memory():
    batch = random_batch(20, reuse=10).to(DEVICE)
    empty = replace(batch, target_positions=batch.target_positions[:, :0], targets=batch.targets[:, :0])
    model = make_model(attention_backend="triton", n_layer=2).to(DEVICE)
    memory = to_device(random_memory(model.config, 2, 12))
    hidden, updated = model.backbone(empty, memory)
    assert hidden.shape[:2] == (2, 0)
    torch.testing.assert_close(updated.hidden, model.backbone(batch, memory)[1].hidden)


@pytest.mark.parametrize("two_streams", long_except([True, False], True))
def test_a_model_has_the_losses_and_gradients_of_the_reference(two_streams):
    batch, results = random_batch(20, reuse=10).to(DEVICE), []
    for backend in ("reference", "triton"):
        model = make_model(two_streams, attention_backend=backend, n_layer=1).to(DEVICE)
        loss = model(batch, to_device(random_memory(model.config, 2, 12)))[0]
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        results.append({"loss": loss.detach(), **gradients})
    assert results[0].keys() == results[1].keys()
    for name, tensor in results[0].items():
        torch.testing.assert_close(results[1][name], tensor, rtol=1e-4, atol=1e-4, msg=name)


def test_torch_compile_takes_a_model_as_one_graph_with_the_same_numbers():
    batch = random_batch(20, reuse=10).to(DEVICE)
    model = make_model(True, attention_backend="triton", n_layer=1, dropatt=0.1).to(DEVICE)
    memory, results = to_device(random_memory(model.config, 2, 12)), []
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(1)
        loss, new_memory = run(batch, memory)
        gradients = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
        results.append((loss, new_memory.hidden, *(x for x in gradients if x is not None)))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(eager, compiled, rtol=1e-4, atol=1e-5)


def test_the_fake_implementation_and_the_schema_match_the_operator(monkeypatch):
    from xlpre.model.kernels.triton import attention

    rng, calls, operator = np.random.default_rng(5), [], attention.relative_attention
    meta = random_meta(rng, n_tokens=6, n_memory=3, n_others=2, has_content=True, max_distance=None)
    tensors = random_tensors(meta, rng, 1, 8, torch.float32, ("pos_offset",))
    monkeypatch.setattr(attention, "relative_attention", lambda *args: calls.append(args) or operator(*args))
    attend(load_triton(), meta, tensors, dropout=0.1)
    args = [x.detach().requires_grad_(x.is_floating_point()) if torch.is_tensor(x) else x for x in calls[0]]
    torch.library.opcheck(operator, tuple(args))


def test_a_row_that_sees_no_key_gives_zero_and_gets_no_gradient():
    meta, tensors = small_case()
    blind = ~meta.visible().any(-1)
    assert blind.any()
    result = output_and_gradients(load_triton(), meta, tensors)
    assert not result["out"][blind].any()
    assert not result["query"][blind].any()


def test_gradients_have_the_same_bits_each_time():
    meta, tensors = small_case()
    first, second = (output_and_gradients(load_triton(), meta, tensors) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_uninitialized_memory_is_never_used(monkeypatch):
    meta, tensors = small_case()
    first = output_and_gradients(load_triton(), meta, tensors)
    new_empty, filled = torch.Tensor.new_empty, []

    def full_of_nan(like, *shape, **kwargs):
        tensor = new_empty(like, *shape, **kwargs)
        if len(shape) == 4:  # the bias of both passes, and the gradient of position keys per batch row
            filled.append(tensor.fill_(torch.nan))
        return tensor

    monkeypatch.setattr(torch.Tensor, "new_empty", full_of_nan)
    second = output_and_gradients(load_triton(), meta, tensors)
    assert len(filled) == 3
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_ranges_of_keys_and_rows_cover_visible_tiles_only():
    meta, _ = small_case()
    meta = replace(meta.slice_rows(0, 18), n_self_visible=0)
    meta.query_rank[:], meta.key_rank[:] = 9, 3
    meta.key_rank[:, 20:] = 10
    meta.key_rank[:, :3] = 10
    backend = load_triton().prepare(meta, torch.float32)
    assert backend.row_info[:, 4].unique().tolist() == [3]
    assert backend.row_info[:, 5].unique().tolist() == [20]
    assert backend.key_info[:, 3, 0].unique().tolist() == [18]
    assert backend.key_info[:, 3, 32].unique().tolist() == [0]  # no row sees the second tile multiple


def test_heads_that_are_too_wide_are_refused():
    meta, _ = small_case()
    tensors = random_tensors(meta, np.random.default_rng(0), 1, 257, torch.float32, ("pos_offset",))
    with pytest.raises(ValueError, match=r"triton .* 257 .* model.attention_backend=sdpa"):
        attend(load_triton(), meta, tensors)


@pytest.mark.parametrize(
    ("shape", "n_distances", "message"),
    [
        ((1, 2**20, 16, 64), 2**21, r"1,048,576 query rows and 2,097,152 distances.* model.attention_backend=sdpa"),
        ((2**12, 8, 16, 16), 16, r"4,096 batch rows x 16 heads.* 65,535.* model.attention_backend=sdpa"),
    ],
    ids=["elements", "heads"],
)
def test_sizes_that_exceed_the_limits_of_the_kernels_are_refused(shape, n_distances, message):
    key = torch.empty(1, 1, 1, 1).expand(shape)
    backend = load_triton()(types.SimpleNamespace(n_distances=n_distances), None, None, None)
    with pytest.raises(ValueError, match=message):
        backend.attend(ScoreTerms(key, 0.125), key, key, 0.0)


FAULTS = [
    None,
    "wrong attention",
    "wrong position offsets",
    "wrong GELU",
    "wrong norm of wide rows",
    "different dropout each time",
]


@pytest.mark.parametrize("fault", long_except(FAULTS, "wrong attention"))
def test_the_self_check_detects_faults(monkeypatch, fault):
    from xlpre.model.kernels.selfcheck import selfcheck
    from xlpre.model.kernels.triton import fused_ops
    from xlpre.model.kernels.triton.attention import TritonBackend

    attend, add_norm, gelu_dropout, n_calls = TritonBackend.attend, fused_ops.add_norm, fused_ops.gelu_dropout, [0]

    def faulty_attend(self, terms, key, value, dropout):
        n_calls[0] += 1
        is_random = fault == "different dropout each time" and dropout > 0
        return attend(self, terms, key, value, dropout) * (
            1
            + 0.05 * (fault == "wrong attention")
            + 0.05 * (fault == "wrong position offsets" and terms.pos_offset is not None)
            + 1e-3 * n_calls[0] * is_random
        )

    def faulty_gelu(x, dropout):
        return gelu_dropout(x, dropout) * (1 + 0.05 * (fault == "wrong GELU"))

    def faulty_norm(x, *args):
        return add_norm(x, *args) * (1 + 0.05 * (fault == "wrong norm of wide rows" and x.size(-1) > 1024))

    monkeypatch.setattr(TritonBackend, "attend", faulty_attend)
    monkeypatch.setattr(fused_ops, "add_norm", faulty_norm)
    monkeypatch.setattr(fused_ops, "gelu_dropout", faulty_gelu)
    monkeypatch.setattr(selfcheck, "TIMED_SECONDS", 0.01)
    shape = {"rows": 1, "window": 16, "memory": 8, "targets": 3}
    result = selfcheck.check_kernels(torch.device(DEVICE), torch.float32, 8, shape, n_head=1, timed_rows=2)
    reason = {None: "slower", "different dropout each time": "differ or are not finite"}.get(
        fault, "differ from the reference"
    )
    assert result["passed"] or reason in result["reason"]
    assert not (result["passed"] and fault)
