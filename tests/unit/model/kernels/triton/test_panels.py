"""Panels of rows on a GPU: the same numbers, and memory that grows linearly with the window. Run by test_interpreter.py."""

import itertools

import numpy as np
import pytest
import torch

from pretrain.planning.activation_memory import TensorTracker
from tests.unit.model.conftest import make_model, random_batch, random_memory
from tests.unit.model.kernels.cases import (
    DEVICE,
    POSITION_TERMS,
    SEGMENT_TERMS,
    attend,
    long_except,
    needs_triton,
    output_and_gradients,
    random_meta,
    random_tensors,
    small_tiles,  # noqa: F401  an automatic fixture
)
from xlpre.model.kernels.backend import load_triton
from xlpre.model.kernels.reference import ReferenceBackend
from xlpre.model.kernels.selfcheck.fixtures import random_attention_meta

pytestmark = needs_triton
SHAPES = {  # T, M, other rows, content rows, maximum distance, H, E, absent terms; panels of 32 rows
    "two streams": (45, 9, 22, True, None, 1, 16, ("pos_offset",)),
    "offsets": (40, 0, 0, True, None, 1, 16, ("r_r_bias", *SEGMENT_TERMS)),
    "same length": (37, 16, 0, True, 16, 1, 12, ("pos_offset",)),
    "last layer": (50, 7, 35, False, None, 1, 16, ("pos_offset",)),
    "full panels": (48, 16, 16, True, None, 1, 16, ("pos_offset",)),
    "absolute": (31, 3, 20, True, None, 2, 16, POSITION_TERMS),
    "less than a panel": (9, 4, 3, True, None, 1, 16, ("pos_offset",)),
}
ROW_SUMS = ("r_w_bias", "r_r_bias", "key", "value", "pos_key", "pos_offset")  # gradients that are sums over rows


def case(name, dtype=torch.float32):
    n_tokens, n_memory, n_others, has_content, max_distance, n_head, width, without = SHAPES[name]
    rng, sizes = np.random.default_rng(3), {"n_tokens": n_tokens, "n_memory": n_memory, "n_others": n_others}
    meta = random_meta(rng, **sizes, has_content=has_content, max_distance=max_distance)
    return meta, random_tensors(meta, rng, n_head, width, dtype, without)


@pytest.fixture
def use_small_panels(monkeypatch):
    """Call it to make panels as small as possible. It returns a list that records the rows of each forward kernel."""
    from xlpre.model.kernels.triton import panels
    from xlpre.model.kernels.triton.launch import KernelLauncher

    panel_rows, launch = [], KernelLauncher.launch

    def recording_launch(self, kernel, tiled, **args):
        panel_rows.extend([self._lengths["rows"]] * (kernel == "attention_forward"))
        launch(self, kernel, tiled, **args)

    def start():
        monkeypatch.setattr(panels, "PANEL_BYTES", 1)
        monkeypatch.setattr(KernelLauncher, "launch", recording_launch)
        return panel_rows

    return start


@pytest.mark.parametrize(
    ("name", "dropout"),
    long_except(
        itertools.product(SHAPES, [0.0, 0.3]), ("two streams", 0.3), ("absolute", 0.3), ("less than a panel", 0.0)
    ),
)
def test_panels_give_the_numbers_of_all_rows_at_once(name, dropout, use_small_panels):
    """The same bits for each row, with the same dropout. Sums over rows are added in another order."""
    meta, tensors = case(name)
    expected = output_and_gradients(load_triton(), meta, tensors, dropout)
    panel_rows = use_small_panels()
    result = output_and_gradients(load_triton(), meta, tensors, dropout)
    n_rows = meta.query_rank.size(1)
    assert panel_rows == [32] * (n_rows // 32) + [n_rows % 32] * (n_rows % 32 > 0)
    for key, tensor in expected.items():
        if key in ROW_SUMS:
            torch.testing.assert_close(result[key], tensor, rtol=1e-5, atol=1e-5 * tensor.abs().max().item(), msg=key)
        else:
            assert torch.equal(result[key], tensor), key


@pytest.mark.parametrize(
    ("name", "dtype"),
    long_except(
        itertools.product(SHAPES, [torch.float32, torch.float16]),
        ("same length", torch.float32),
        ("last layer", torch.float32),
        ("offsets", torch.float16),
    ),
    ids=str,
)
def test_panels_give_the_numbers_of_the_reference(name, dtype, use_small_panels):
    meta, tensors = case(name, dtype)
    use_small_panels()
    result = output_and_gradients(load_triton(), meta, tensors)
    exact = {key: x.detach().float().requires_grad_() for key, x in tensors.items()}
    rtol = {torch.float32: 1e-4, torch.float16: 1e-2}[dtype]
    for key, tensor in output_and_gradients(ReferenceBackend, meta, exact).items():
        assert result[key].dtype == dtype
        atol = rtol * max(tensor.abs().max().item(), 0.1)
        torch.testing.assert_close(result[key].float(), tensor, rtol=rtol, atol=atol, msg=key)


@pytest.mark.parametrize("two_streams", long_except([True, False], True))
def test_a_model_with_memory_has_the_same_loss_and_gradients_in_panels(two_streams, use_small_panels):
    batch, results = random_batch(40, reuse=20).to(DEVICE), []
    for backend in ("reference", "triton"):
        model = make_model(two_streams, attention_backend=backend, n_layer=2).to(DEVICE)
        memory = random_memory(model.config, 2, 12)
        memory = type(memory)(memory.hidden.to(DEVICE), memory.valid.to(DEVICE))
        panel_rows = use_small_panels()
        loss = model(batch, memory)[0]
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        results.append({"loss": loss.detach(), **gradients})
    assert len(panel_rows) > 1
    assert results[0].keys() == results[1].keys()
    for name, tensor in results[0].items():
        torch.testing.assert_close(results[1][name], tensor, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("name", SHAPES)
def test_visible_ranges_are_the_same_when_computed_in_panels(name, use_small_panels):
    meta, _ = case(name)
    meta.key_rank[0, 20:] = 99  # so that some groups see no key, and no row sees some keys
    expected = load_triton().prepare(meta, torch.float32)
    use_small_panels()
    result = load_triton().prepare(meta, torch.float32)
    assert torch.equal(result.row_info, expected.row_info)
    assert torch.equal(result.key_info, expected.key_info)


def test_the_fake_implementation_and_the_schema_match_the_operator_in_panels(use_small_panels, monkeypatch):
    from xlpre.model.kernels.triton import attention

    (meta, tensors), calls, operator = case("last layer"), [], attention.relative_attention
    monkeypatch.setattr(attention, "relative_attention", lambda *args: calls.append(args) or operator(*args))
    panel_rows = use_small_panels()
    attend(load_triton(), meta, tensors, dropout=0.1)
    assert len(panel_rows) == 2
    args = [x.detach().requires_grad_(x.is_floating_point()) if torch.is_tensor(x) else x for x in calls[0]]
    torch.library.opcheck(operator, tuple(args))


def test_sums_over_panels_are_rounded_once():
    """1 plus eight times a quarter of its last place. Each of the eight alone would be rounded away."""
    from xlpre.model.kernels.triton.panels import merge_gradients

    args, _ = meta_args(rows=1, window=64)
    ones = torch.ones(2, 3)
    absent = dict.fromkeys(("r_w_bias", "r_r_bias", "pos_key", "pos_offset", "segment_score"))
    args = args._replace(query=ones, key=ones.half(), value=ones, **absent)
    panels = [{"query": ones, "key": torch.full((2, 3), x), "value": ones.clone()} for x in (1.0, *[2**-12] * 8)]
    query, key, value = merge_gradients(panels, args)
    assert key.dtype == torch.float16
    assert key.unique().tolist() == [1 + 2**-9]
    assert value.unique().tolist() == [9]
    assert query.shape == (2, 27)


def test_xlnet_large_with_64_rows_a_gpu_is_one_panel():
    from xlpre.model.kernels.triton.panels import split_panels

    for rows, n_panels in ((64, 1), (128, 2)):
        args, _ = meta_args(rows, window=512)
        assert len(list(split_panels(args))) == n_panels


def test_memory_grows_linearly_with_the_window():
    """On the meta device: peak bytes of a layer's forward and backward pass and of `prepare`."""
    from xlpre.model.kernels.triton.attention import attention_backward, attention_forward
    from xlpre.model.kernels.triton.launch import TENSORS

    peaks = []
    for window in (8192, 16384, 32768):
        args, prepare_peak = meta_args(rows=2, window=window)
        tensors = [getattr(args, name) for name in TENSORS]
        with TensorTracker(tensors) as forward:
            out, lse = attention_forward(*args)
        with TensorTracker([*tensors, out, lse]) as backward:
            attention_backward(out, lse, lse, *args)
        peaks.append((prepare_peak, forward.peak, backward.peak))
    # twice the window adds twice as much; quadratic growth would add four times as much
    for first, second, third in zip(*peaks, strict=True):
        assert third - second < 2.2 * max(second - first, 0) + 2**27


def meta_args(rows, window):
    """Arguments of XLNet-Large's attention in bf16 with dropout on the meta device, and peak bytes of `prepare`."""
    from xlpre.model.kernels.triton.launch import KernelArgs

    meta = random_attention_meta(rows, window, window * 3 // 4, window // 6, "meta")
    with TensorTracker([]) as preparing:
        backend = load_triton().prepare(meta, torch.bfloat16)
    (B, N), K, R, H, E = meta.query_rank.shape, meta.n_keys, meta.n_distances, 16, 64
    shapes = {"query": (B, N, H, E), "r_w_bias": (H, E), "r_r_bias": (H, E), "pos_key": (2, R, H, E)}
    shapes |= {"segment_score": (B, H, N), "key": (B, K, H, E), "value": (B, K, H, E)}
    tensors = {name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in shapes.items()}
    tensors |= {"row_info": backend.row_info, "key_info": backend.key_info, "direction": backend.direction}
    seed = torch.empty(1, dtype=torch.int64, device="meta")
    args = KernelArgs(**tensors, pos_offset=None, seed=seed, n_distances=R, max_distance=None, dropout=0.1)
    return args, preparing.peak
