"""Attention by GPU kernels, which Triton's interpreter runs on a CPU: kernels/triton.py against kernels/reference.py.

The interpreter is chosen by TRITON_INTERPRET=1 before triton is first imported, so one test runs all the others in a process of their own.
bf16 is left to GPUs, because the interpreter multiplies its bits as integers; fp16 stands in for it here. On a machine with a
GPU: python -m pytest --noconftest tests/unit/model/test_triton.py
"""

import os
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.unit.model.conftest import make_model, random_batch, random_memory
from tests.unit.model.triton_cases import (
    DEVICE,
    DTYPES,
    INTERPRETED,
    ON_GPU,
    PLACE,
    STEP,
    attended,
    outcome,
    random_geometry,
    random_tensors,
    runs_kernels,
    small_case,
    small_tiles,  # noqa: F401  a fixture of these tests
)
from xlpre.model.kernels.backend import with_triton
from xlpre.model.kernels.reference import Reference
from xlpre.model.score_terms import ScoreTerms


@pytest.mark.skipif(INTERPRETED or ON_GPU, reason="the others run in this process")
@pytest.mark.parametrize(
    "name", ["test_triton.py", "test_triton_dropout.py", "test_triton_panels.py", "test_triton_between.py"]
)
def test_all_of_this_in_the_interpreter(name):
    pytest.importorskip("triton", reason="triton is installed with the tests on Linux (x86-64)")
    if np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("triton 3.6's interpreter needs numpy < 2.4")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        str(Path(__file__).with_name(name)),
    ]
    folder = Path(__file__).parents[3]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]


SHAPES = [  # T, M, other rows, content rows, reach, H, E, left out
    (21, 9, 5, True, None, 2, 16, ("pos_offset",)),  # XLNet: two streams
    (33, 31, 17, True, None, 1, 32, ("pos_offset",)),  # more than one granule of each
    (16, 16, 0, True, 16, 2, 16, ("pos_offset", *STEP)),  # Transformer-XL: one stream, same_length
    (19, 7, 6, False, None, 2, 12, ("pos_offset",)),  # the last layer's rows; a width that no tile has
    (5, 0, 3, True, 2, 3, 5, ("pos_offset",)),  # less than a tile; no memory
    (23, 4, 0, True, None, 2, 16, ("r_r_bias", *STEP)),  # Shaw et al.
    (18, 3, 4, True, None, 2, 16, PLACE),  # absolute positions
]


@runs_kernels
@pytest.mark.parametrize(
    "shape", SHAPES, ids=["two streams", "granules", "same length", "last layer", "tiny", "shaw", "absolute"]
)
@pytest.mark.parametrize(("seed", "dtype"), enumerate(DTYPES), ids=str)
def test_outputs_and_all_gradients_equal_the_reference(shape, seed, dtype):
    n_tokens, n_memory, n_others, content, reach, n_head, width, without = shape
    rng = np.random.default_rng(seed)
    attn_meta = random_geometry(
        rng, n_tokens=n_tokens, n_memory=n_memory, n_others=n_others, content=content, reach=reach
    )
    tensors = random_tensors(attn_meta, rng, n_head, width, dtype, without)
    found = outcome(with_triton(), attn_meta, tensors)
    exact = {name: x.detach().float().requires_grad_() for name, x in tensors.items()}
    expected = outcome(Reference(), attn_meta, exact)
    # in 16 bits, several of their last places
    rtol = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}[dtype]
    for name, tensor in expected.items():
        assert found[name].dtype == dtype
        largest = tensor.abs().max().item()
        torch.testing.assert_close(found[name].float(), tensor, rtol=rtol, atol=rtol * max(largest, 0.1), msg=name)


@runs_kernels
@pytest.mark.parametrize("two_streams", [True, False])
def test_a_model_has_the_same_losses_memory_and_gradients(two_streams):
    batch = random_batch(20, reuse=10)
    found = []
    for backend in ("reference", "triton"):
        model = make_model(two_streams, attention_backend=backend, n_layer=1).to(DEVICE)
        memory = random_memory(model.config, 2, 12)
        memory = type(memory)(memory.hidden.to(DEVICE), memory.valid.to(DEVICE))
        moved = type(batch)(**{name: x.to(DEVICE) if torch.is_tensor(x) else x for name, x in vars(batch).items()})
        loss = model(moved, memory)[0]
        loss.backward()
        found.append({"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}})
    assert found[0].keys() == found[1].keys()
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor, rtol=1e-4, atol=1e-4, msg=name)


@runs_kernels
def test_a_compiler_of_torch_takes_a_model_as_one_graph_of_the_same_numbers():
    batch = random_batch(20, reuse=10)
    model = make_model(True, attention_backend="triton", n_layer=1, dropatt=0.1).to(DEVICE)
    memory = random_memory(model.config, 2, 12)
    memory = type(memory)(memory.hidden.to(DEVICE), memory.valid.to(DEVICE))
    moved = type(batch)(**{name: x.to(DEVICE) if torch.is_tensor(x) else x for name, x in vars(batch).items()})
    found = []
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(1)
        loss, remembered = run(moved, memory)
        gradients = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
        found.append((loss, remembered.hidden, *(x for x in gradients if x is not None)))
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(eager, compiled, rtol=1e-4, atol=1e-5)


@runs_kernels
def test_the_operators_are_what_they_told_torch_that_they_are():
    from xlpre.model.kernels.triton.attention import relative_attention

    rng = np.random.default_rng(5)
    attn_meta = random_geometry(rng, n_tokens=6, n_memory=3, n_others=2, content=True, reach=None)
    tensors = random_tensors(attn_meta, rng, 1, 8, torch.float32, ("pos_offset",))
    backend, caught = with_triton(), []
    prepared = replace(attn_meta, prepared=backend.prepare(attn_meta, tensors["query"]))

    def catch(*given):
        caught.append(given)
        return relative_attention(*given)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("xlpre.model.kernels.triton.attention.relative_attention", catch)
        attended(backend, prepared, tensors, dropout=0.1)
    given = [x.detach().requires_grad_(x.is_floating_point()) if torch.is_tensor(x) else x for x in caught[0]]
    torch.library.opcheck(relative_attention, tuple(given))


@runs_kernels
def test_a_row_that_sees_nothing_gives_zero_and_no_gradient():
    attn_meta, tensors = small_case()
    blind = ~attn_meta.visible().any(-1)
    assert blind.any()
    found = outcome(with_triton(), attn_meta, tensors)
    assert not found["out"][blind].any()
    assert not found["query"][blind].any()


@runs_kernels
def test_gradients_are_the_same_bits_each_time():
    attn_meta, tensors = small_case()
    first, second = (outcome(with_triton(), attn_meta, tensors) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@runs_kernels
def test_memory_that_nothing_wrote_is_never_used(monkeypatch):
    attn_meta, tensors = small_case()
    first = outcome(with_triton(), attn_meta, tensors)
    new_empty, found = torch.Tensor.new_empty, []

    def full_of_nan(like, *shape, **named):
        made = new_empty(like, *shape, **named)
        if len(shape) == 4:  # the bias of both passes, and the gradient of place keys of each batch row
            found.append(made.fill_(torch.nan))
        return made

    monkeypatch.setattr(torch.Tensor, "new_empty", full_of_nan)
    second = outcome(with_triton(), attn_meta, tensors)
    assert len(found) == 3
    assert all(torch.equal(first[name], second[name]) for name in first)


@runs_kernels
def test_rows_need_only_the_tiles_that_they_see():
    from xlpre.model.kernels.triton.attention import Triton

    attn_meta, _ = small_case()
    attn_meta.key_rank[:], attn_meta.query_rank[:] = 3, 9
    attn_meta = replace(attn_meta, n_self_visible=0, query_rank=attn_meta.query_rank[:, :18], key_rank=attn_meta.key_rank)
    attn_meta = replace(attn_meta, positions=attn_meta.positions[:, :18], row_segments=attn_meta.row_segments[:, :18])
    attn_meta.key_rank[:, 20:] = 10
    attn_meta.key_rank[:, :3] = 10
    prepared = Triton().prepare(attn_meta, torch.zeros(1))
    assert prepared.row_facts[:, 4].unique().tolist() == [3]
    assert prepared.row_facts[:, 5].unique().tolist() == [20]
    assert prepared.key_facts[:, 3, 0].unique().tolist() == [18]
    assert prepared.key_facts[:, 3, 32].unique().tolist() == [0]  # nobody sees the second granule


@runs_kernels
def test_heads_too_wide_are_refused_with_a_way_out():
    attn_meta, _ = small_case()
    tensors = random_tensors(attn_meta, np.random.default_rng(0), 1, 257, torch.float32, ("pos_offset",))
    with pytest.raises(ValueError, match="model.attention_backend=sdpa"):
        attended(with_triton(), attn_meta, tensors)


@runs_kernels
def test_windows_of_more_numbers_than_32_bits_count_are_refused_with_a_way_out():
    key = torch.empty(1, 1, 1, 1).expand(1, 2**20, 16, 64)
    attn_meta = types.SimpleNamespace(prepared=types.SimpleNamespace(n_distances=2**21))
    with pytest.raises(ValueError, match="1 x 1,048,576 rows at 2,097,152 distances .* model.attention_backend=sdpa"):
        with_triton().attend(ScoreTerms(key, 0.125), key, key, attn_meta, 0.0)


@runs_kernels
def test_more_heads_of_rows_than_a_grid_has_room_for_are_refused_with_a_way_out():
    key = torch.empty(1, 1, 1, 1).expand(2**12, 8, 16, 16)
    attn_meta = types.SimpleNamespace(prepared=types.SimpleNamespace(n_distances=16))
    with pytest.raises(
        ValueError, match="up to 65,535 heads .* not 4,096 rows of 16 heads; .* model.attention_backend=sdpa"
    ):
        with_triton().attend(ScoreTerms(key, 0.25), key, key, attn_meta, 0.0)


@runs_kernels
@pytest.mark.parametrize("fault", [None, "wrong", "wrong between products", "wrong in wide rows", "not the same twice"])
def test_a_trial_finds_what_is_wrong_with_them(monkeypatch, fault):
    from xlpre.model.kernels.selfcheck import selfcheck
    from xlpre.model.kernels.triton.attention import Triton
    from xlpre.model.kernels.triton.fused_ops import add_norm, gelu_dropout

    attend, calls = Triton.attend, []

    def faulty(self, scores, key, value, attn_meta, dropout):
        calls.append(dropout)
        of = 1 + 0.05 * (fault == "wrong") + 1e-3 * len(calls) * (fault == "not the same twice" and dropout > 0)
        return attend(self, scores, key, value, attn_meta, dropout) * of

    def between(x, dropout):
        return gelu_dropout(x, dropout) * (1 + 0.05 * (fault == "wrong between products"))

    def norm(rows, *given):
        return add_norm(rows, *given) * (1 + 0.05 * (fault == "wrong in wide rows" and rows.size(-1) > 1024))

    monkeypatch.setattr(Triton, "attend", faulty)
    monkeypatch.setattr("xlpre.model.kernels.triton.fused_ops.add_norm", norm)
    monkeypatch.setattr("xlpre.model.kernels.triton.fused_ops.gelu_dropout", between)
    shape = {"rows": 1, "window": 16, "memory": 8, "targets": 3}
    monkeypatch.setattr(selfcheck, "TIMED_SECONDS", 0.01)
    found = selfcheck.verdict(torch.device(DEVICE), torch.float32, 8, shape, heads=1, rows=2)
    why = {None: "slower", "not the same twice": "same finite numbers twice"}.get(fault, "not those of reference")
    assert found["taken"] or why in found["why"]
    assert not (found["taken"] and fault)
