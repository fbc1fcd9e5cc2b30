"""Rows in panels on a GPU (kernels/triton_panels.py): the same numbers, and memory that grows with the window. Run by test_triton.py."""

import numpy as np
import pytest
import torch

from pretrain.planning.activation_memory import Tensors
from tests.unit.model.conftest import make_model, random_batch, random_memory
from tests.unit.model.triton_cases import (
    DEVICE,
    PLACE,
    STEP,
    attended,
    random_geometry,
    random_tensors,
    runs_kernels,
    small_tiles,  # noqa: F401  a fixture of these tests too
)
from xlpre.model.kernels.backend import with_triton
from xlpre.model.kernels.reference import Reference
from xlpre.model.kernels.selfcheck.fixtures import geometry_of

pytestmark = runs_kernels
SHAPES = {  # T, M, other rows, content rows, reach, H, E, left out; panels of 32 rows
    "two streams": (45, 9, 22, True, None, 1, 16, ("pos_offset",)),
    "offsets": (40, 0, 0, True, None, 1, 16, ("r_r_bias", *STEP)),
    "same length": (37, 16, 0, True, 16, 1, 12, ("pos_offset",)),
    "last layer": (50, 7, 35, False, None, 1, 16, ("pos_offset",)),
    "whole panels": (48, 16, 16, True, None, 1, 16, ("pos_offset",)),
    "absolute": (31, 3, 20, True, None, 2, 16, PLACE),
    "less than a panel": (9, 4, 3, True, None, 1, 16, ("pos_offset",)),
}
SUMS = ("r_w_bias", "r_r_bias", "key", "value", "pos_key", "pos_offset")  # over rows


def case(name, dtype=torch.float32):
    n_tokens, n_memory, n_others, content, reach, n_head, width, without = SHAPES[name]
    rng = np.random.default_rng(3)
    sizes = {"n_tokens": n_tokens, "n_memory": n_memory, "n_others": n_others, "content": content, "reach": reach}
    attn_meta = random_geometry(rng, **sizes)
    return attn_meta, random_tensors(attn_meta, rng, n_head, width, dtype, without)


def outcome(backend, attn_meta, tensors, dropout=0.0):
    """The output and every gradient; dropout draws the same each time."""
    torch.manual_seed(0)
    out = attended(backend, attn_meta, tensors, dropout)
    weights = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape)
    gradients = torch.autograd.grad((out.float() * weights).sum(), list(tensors.values()))
    return {"out": out.detach(), **dict(zip(tensors, gradients, strict=True))}


@pytest.fixture
def in_panels(monkeypatch):
    """Call it, and from then on panels are the smallest there can be: so many rows were then worked on by `attend`, one number a call."""
    from xlpre.model.kernels.triton import panels
    from xlpre.model.kernels.triton.launch import Launch

    rows, call = [], Launch.call

    def counted(launch, over, kernel, *given):
        rows.extend([launch._length["rows"]] * (kernel == "attend"))
        call(launch, over, kernel, *given)

    def begin():
        monkeypatch.setattr(panels, "PANEL_BYTES", 1)
        monkeypatch.setattr(Launch, "call", counted)
        return rows

    return begin


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("name", SHAPES)
def test_panels_give_the_numbers_of_all_rows_at_once(name, dropout, in_panels):
    """The same bits of what belongs to rows, with the same dropout; sums over rows are taken in another order."""
    attn_meta, tensors = case(name)
    expected = outcome(with_triton(), attn_meta, tensors, dropout)
    worked_on = in_panels()
    found = outcome(with_triton(), attn_meta, tensors, dropout)
    n_rows = attn_meta.query_rank.size(1)
    assert worked_on == [32] * (n_rows // 32) + [n_rows % 32] * (n_rows % 32 > 0)
    for key, tensor in expected.items():
        if key in SUMS:
            torch.testing.assert_close(found[key], tensor, rtol=1e-5, atol=1e-5 * tensor.abs().max().item(), msg=key)
        else:
            assert torch.equal(found[key], tensor), key


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_panels_give_the_numbers_of_the_reference(name, dtype, in_panels):
    attn_meta, tensors = case(name, dtype)
    in_panels()
    found = outcome(with_triton(), attn_meta, tensors)
    expected = outcome(Reference(), attn_meta, {key: x.detach().float().requires_grad_() for key, x in tensors.items()})
    rtol = {torch.float32: 1e-4, torch.float16: 1e-2}[dtype]
    for key, tensor in expected.items():
        assert found[key].dtype == dtype
        atol = rtol * max(tensor.abs().max().item(), 0.1)
        torch.testing.assert_close(found[key].float(), tensor, rtol=rtol, atol=atol, msg=key)


@pytest.mark.parametrize("two_streams", [True, False])
def test_a_model_with_memory_has_the_same_loss_and_gradients_in_panels(two_streams, in_panels):
    batch, found = random_batch(40, reuse=20), []
    moved = type(batch)(**{name: x.to(DEVICE) if torch.is_tensor(x) else x for name, x in vars(batch).items()})
    for attention in ("reference", "triton"):
        model = make_model(two_streams, attention_backend=attention, n_layer=2).to(DEVICE)
        memory = random_memory(model.config, 2, 12)
        memory = type(memory)(memory.hidden.to(DEVICE), memory.valid.to(DEVICE))
        worked_on = in_panels()
        loss = model(moved, memory)[0]
        loss.backward()
        found.append({"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}})
    assert len(worked_on) > 1
    assert found[0].keys() == found[1].keys()
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("name", SHAPES)
def test_what_granules_see_is_found_panel_by_panel_too(name, in_panels):
    from xlpre.model.kernels.triton.attention import Triton

    attn_meta, _ = case(name)
    attn_meta.key_rank[0, 20:] = 99  # so that some granules see no key, and some keys are seen by none
    whole = Triton().prepare(attn_meta, torch.zeros(1))
    in_panels()
    found = Triton().prepare(attn_meta, torch.zeros(1))
    assert torch.equal(found.row_facts, whole.row_facts)
    assert torch.equal(found.key_facts, whole.key_facts)


def test_the_operator_is_in_panels_what_it_told_torch_that_it_is(in_panels, monkeypatch):
    from xlpre.model.kernels.triton import attention

    (attn_meta, tensors), caught, operator = case("last layer"), [], attention.relative_attention
    monkeypatch.setattr(attention, "relative_attention", lambda *given: caught.append(given) or operator(*given))
    worked_on = in_panels()
    attended(with_triton(), attn_meta, tensors, dropout=0.1)
    assert len(worked_on) == 2
    given = [x.detach().requires_grad_(x.is_floating_point()) if torch.is_tensor(x) else x for x in caught[0]]
    torch.library.opcheck(operator, tuple(given))


def test_sums_over_panels_are_rounded_once():
    """One and eight times a quarter of its last place, each of which alone would be rounded away."""
    from xlpre.model.kernels.triton.panels import together

    given, _ = meta_model(rows=1, window=64)
    one = torch.ones(2, 3)
    given = given._replace(
        query=one,
        r_w_bias=None,
        r_r_bias=None,
        pos_key=None,
        offsets=None,
        step=None,
        key=one.half(),
        value=one,
    )
    parts = [(one, None, None, None, None, None, torch.full((2, 3), x), one.clone()) for x in (1.0, *[2**-12] * 8)]
    query, key, value = together(parts, given)
    assert key.dtype == torch.float16
    assert key.unique().tolist() == [1 + 2**-9]
    assert value.unique().tolist() == [9]
    assert query.shape == (2, 27)


def test_xlnet_large_with_64_rows_a_gpu_is_one_panel():
    from xlpre.model.kernels.triton.panels import panels

    for rows, n_panels in ((64, 1), (128, 2)):
        given, _ = meta_model(rows, window=512)
        assert len(list(panels(given))) == n_panels


def test_memory_grows_with_the_window_not_its_square():
    """Of tensors without data: the most bytes at any moment of a layer's forward and backward and of `prepare`."""
    from xlpre.model.kernels.triton.attention import attended, differentiated

    peaks = []
    for window in (8192, 16384, 32768):
        given, preparing = meta_model(rows=2, window=window)
        with Tensors([*given.tensors]) as forward:
            out, log_total = attended(*given)
        with Tensors([*given.tensors, out, log_total]) as backward:
            differentiated(out, log_total, log_total, *given)
        peaks.append((preparing, forward.peak, backward.peak))
    for first, second, third in zip(
        *peaks, strict=True
    ):  # twice the window adds twice as much again; its square would add four times
        assert third - second < 2.2 * max(second - first, 0) + 2**27


def meta_model(rows, window):
    """What XLNet-Large's attention in bf16 with dropout is given, and the most bytes that it took to prepare."""
    from xlpre.model.kernels.triton.attention import Triton
    from xlpre.model.kernels.triton.launch import Given

    attn_meta = geometry_of(rows, window, window * 3 // 4, window // 6, "meta")
    with Tensors([]) as preparing:
        ready = Triton().prepare(attn_meta, torch.zeros(1, device="meta"))
    (B, N), K, R, H, E = attn_meta.query_rank.shape, attn_meta.n_keys, attn_meta.n_distances, 16, 64
    shapes = {
        "query": (B, N, H, E),
        "r_w_bias": (H, E),
        "r_r_bias": (H, E),
        "pos_key": (2, R, H, E),
        "step": (B, H, N),
    }
    shapes |= {"key": (B, K, H, E), "value": (B, K, H, E)}
    made = {name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in shapes.items()}
    made |= {"offsets": None, "seed": torch.empty(1, dtype=torch.int64, device="meta"), "dropout": 0.1}
    return Given(**made, **vars(ready)), preparing.peak
