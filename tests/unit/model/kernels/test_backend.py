"""Attention backends: the same numbers from all, and the choice between them."""

import dataclasses
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import REPOSITORY, examples
from tests.unit.model.conftest import make_model, random_batch, random_memory
from xlpre.batch import HIDDEN_RANK
from xlpre.model.dropout import Dropout
from xlpre.model.embedding import _LookUpWithTable
from xlpre.model.feedforward import gelu
from xlpre.model.kernels import backend
from xlpre.model.kernels.backend import fastest_backend, load_triton, resolve_backend
from xlpre.model.kernels.cpu import attention
from xlpre.model.kernels.cpu.attention import CpuBackend
from xlpre.model.kernels.selfcheck.fixtures import random_attention_meta
from xlpre.model.lm_head import _LinearCrossEntropy
from xlpre.model.memory import initial_memory
from xlpre.model.positions import SCHEMES
from xlpre.model.score_terms import ScoreTerms

CPU, GPU = torch.device("cpu"), torch.device("cuda")
FAST_BACKENDS = ["sdpa", "cpu", "auto"]


def output_and_gradients(backend, two_streams, batch, memory, **shape):
    """Hidden states, memory and all gradients."""
    model = make_model(two_streams, attention_backend=backend, **shape)
    hidden, new_memory = model.backbone(batch, memory)
    weights = torch.linspace(-1, 1, hidden.numel()).view(hidden.shape)
    (hidden * weights).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"hidden": hidden.detach(), "memory": new_memory.hidden, **gradients}


def assert_equal(result, expected):
    assert result.keys() == expected.keys()
    for name, tensor in expected.items():
        largest = max(tensor.abs().max().item(), 1) if tensor.numel() else 1
        torch.testing.assert_close(result[name], tensor, rtol=1e-4, atol=1e-5 * largest, msg=name)


SHAPES = st.fixed_dictionaries(
    {
        "length": st.integers(4, 40),
        "rows": st.integers(1, 3),
        "mem_len": st.integers(0, 20),
        "n_head": st.sampled_from([1, 2, 4]),
        "two_streams": st.booleans(),
        "block_rows": st.sampled_from([1, 3, 8, 128]),
        "max_saved_probs": st.sampled_from([0, 1 << 20]),
        "positions": st.sampled_from(list(SCHEMES)),
        "attention_span": st.sampled_from(["all", "same_length"]),
        "relative_segments": st.booleans(),
        "untie_r": st.booleans(),
        "clamp_len": st.sampled_from([None, 5]),
        "visible_mem_len": st.sampled_from([0, 3, 10**6]),
        "seed": st.integers(0, 1000),
    }
)


@given(shape=SHAPES)
@settings(max_examples=examples(25))
def test_all_backends_equal_the_reference_in_outputs_memory_and_gradients(shape):
    shape = dict(shape)
    length, rows, seed, visible_mem_len = (shape.pop(name) for name in ("length", "rows", "seed", "visible_mem_len"))
    two_streams, block_rows, max_saved = (shape.pop(name) for name in ("two_streams", "block_rows", "max_saved_probs"))
    if shape["positions"] in ("shaw", "learned"):
        shape["n_positions"] = 12
    if shape["positions"] == "learned":
        shape["clamp_len"] = None
    batch = random_batch(length, reuse=length // 2, rows=rows, seed=seed, visible_mem_len=visible_mem_len)
    memory = random_memory(make_model(two_streams, **shape).config, rows, shape["mem_len"], seed=seed)
    expected = output_and_gradients("reference", two_streams, batch, memory, **shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "BLOCK_ROWS", (block_rows, block_rows))
        patch.setattr(attention, "MAX_SAVED_PROBS", max_saved)
        for name in FAST_BACKENDS:
            assert_equal(output_and_gradients(name, two_streams, batch, memory, **shape), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["reference", *FAST_BACKENDS])
def test_a_row_that_sees_no_key_gives_zero_and_gets_no_gradient(name, dtype):
    batch = random_batch(9, reuse=4)
    batch.key_rank[:], batch.query_rank[:] = HIDDEN_RANK, 0
    model = make_model(attention_backend=name, n_layer=1).to(dtype)
    memory, outputs = initial_memory(model.config, 2, mem_len=3, dtype=dtype), []
    layer = model.backbone.layers[0].attention
    layer.output.register_forward_pre_hook(lambda _, args: outputs.append(args[0]))
    model(batch, memory)[0].backward()
    assert not outputs[0].any()
    assert not layer.value.weight.grad.any()


@pytest.mark.parametrize("name", ["reference", "sdpa", "cpu"])
def test_a_window_without_targets_updates_memory(name):
    model = make_model(attention_backend=name)
    memory = initial_memory(model.config, 2, mem_len=4)
    batch = random_batch()
    empty = dataclasses.replace(batch, target_positions=batch.target_positions[:, :0], targets=batch.targets[:, :0])
    hidden, updated = model.backbone(empty, memory)
    assert hidden.shape[:2] == (2, 0)
    torch.testing.assert_close(updated.hidden, model.backbone(batch, memory)[1].hidden)


def test_auto_is_the_fastest_backend_of_a_device():
    assert fastest_backend(CPU, torch.float32, 64) == "cpu"
    assert fastest_backend(CPU, torch.bfloat16, 64) == "cpu"
    assert fastest_backend(CPU, torch.float16, 64) == "sdpa"
    if not torch.cuda.is_available():
        assert fastest_backend(GPU, torch.bfloat16, 64) == "sdpa"


def test_auto_stays_on_a_cpu_until_the_forward_pass():
    assert resolve_backend("auto", CPU, torch.float32, 64) == "auto"


def test_auto_keeps_the_backend_of_a_checkpoint_if_it_is_available_and_warns_otherwise(caplog):
    args = (CPU, torch.float32, 64)
    assert (
        resolve_backend("auto", *args, saved="cpu") == "auto" and resolve_backend("cpu", *args, saved="sdpa") == "cpu"
    )
    assert resolve_backend("auto", *args, saved="sdpa") == "sdpa"
    assert resolve_backend("auto", GPU, torch.bfloat16, 64, saved="reference") == "reference"
    assert not caplog.records
    assert resolve_backend("auto", *args, saved="triton") == "auto"
    assert "model.attention_backend=triton, which is not available here" in caplog.text


def test_a_model_with_auto_may_be_cast_between_two_forward_passes(monkeypatch):
    chosen, load_backend = [], backend.load_backend
    monkeypatch.setattr(backend, "load_backend", lambda name: chosen.append(name) or load_backend(name))
    model, batch = make_model(attention_backend="auto", n_layer=1), random_batch()
    for dtype in (torch.float32, torch.float16, torch.float32):
        model.to(dtype)(batch, initial_memory(model.config, 2, mem_len=4, dtype=dtype))
    assert [name for i, name in enumerate(chosen) if chosen[i - 1 : i] != [name]] == ["cpu", "sdpa", "cpu"]


def test_without_the_package_triton_a_model_is_refused(monkeypatch):
    monkeypatch.setattr(backend, "HAS_TRITON", False)
    for build in (load_triton, lambda: make_model(attention_backend="triton")):
        with pytest.raises(ValueError, match=r"attention_backend=triton .*package triton.*attention_backend=auto"):
            build()


def test_triton_on_a_cpu_is_refused():
    pytest.importorskip("triton", reason="triton is installed with the tests on Linux (x86-64)")
    model = make_model(attention_backend="triton", n_layer=1)
    with pytest.raises(ValueError, match=r"attention_backend=triton .* CPU.*attention_backend=auto"):
        model(random_batch(), initial_memory(model.config, 2, mem_len=4))


def test_a_kernel_is_launched_on_the_device_of_its_tensors(monkeypatch):
    """With tensors on the second GPU, while the first one is current."""
    pytest.importorskip("triton", reason="triton is installed with the tests on Linux (x86-64)")
    from xlpre.model.kernels.triton.launch import launch

    current, launched = [0], []
    exchange = lambda index: (current.append(index), current.pop(0))[1]  # noqa: E731
    monkeypatch.setattr(torch.cuda, "_exchange_device", exchange)
    monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", exchange)
    tensor = SimpleNamespace(is_cuda=True, get_device=lambda: 1)
    launch({(3,): lambda **args: launched.append((*current, args))}, (3,), tensor, N=5)
    assert launched == [(1, {"N": 5})] and current == [0]


@pytest.mark.parametrize("name", ["attention", "embedding", "lm_head", "gelu", "dropout"])
def test_a_second_derivative_is_an_error_instead_of_a_wrong_number(name):
    x = torch.randn(2, 6, 1, 4, requires_grad=True)
    meta = random_attention_meta(2, 4, 2, 2, "cpu")
    functions = {
        "attention": lambda: CpuBackend.prepare(meta, x.dtype).attend(ScoreTerms(x, 1.0), x, x, 0.0),
        "embedding": lambda: _LookUpWithTable.apply(x[0, :, 0], torch.tensor([[1, 3]]))[0],
        "lm_head": lambda: _LinearCrossEntropy.apply(x[0, :, 0], x[1, :, 0], x[0, :, 0, 0], torch.arange(6)),
        "gelu": lambda: gelu(x),
        "dropout": lambda: Dropout(0.5)(x),
    }
    (gradient,) = torch.autograd.grad((functions[name]() ** 2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_a_model_is_imported_without_torchs_compiler():
    """Importing the compiler takes a second or two. Using `torch.compiler.disable` would import it."""
    code = "import sys, xlpre.model.language_model, xlpre.conversion.model_folder; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_self_check_and_the_attention_benchmarks_need_only_torch_and_psutil():
    absent = ("deepspeed", "google_crc32c", "omegaconf", "safetensors", "sentencepiece", "transformers", "yaml")
    modules = "xlpre.model.kernels.selfcheck.selfcheck, benchmarks.speed.attention, benchmarks.gpu.window_length"
    code = f"import sys; sys.modules.update(dict.fromkeys({absent})); import {modules}"
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, env=env).returncode == 0


def test_position_offsets_without_position_keys_are_refused():
    with pytest.raises(AssertionError, match="pos_key"):
        ScoreTerms(torch.ones(1, 1, 1, 1), 1.0, pos_offset=torch.ones(2, 2, 1))
