"""Dropout, sum and norm, and GELU and dropout, each by one GPU kernel: kernels/between.py against torch. Run by test_triton.py."""

import pytest
import torch
from torch.nn import functional as F

from tests.unit.model.conftest import make_model, random_batch, random_memory
from tests.unit.model.triton_cases import DEVICE, DTYPES, Unfelt, runs_kernels
from xlpre.model.kernels.selfcheck.fused_fixtures import WORKS, FusedCase, exact_of, kernel_of, tensors_between

pytestmark = runs_kernels
SHAPES = [
    (1, 3),
    (8, 16),
    (21, 96),
    (19, 7),
    (3, 200),
    (9, 1100),
]  # rows, their width: of one group of rows and several, of no power of two; GELU's in one program and several


def both(work, n_rows, width, dtype=torch.float32):
    """By the kernel, and by torch in twice the precision; and random numbers like their output."""
    torch.manual_seed(n_rows)
    tensors = tensors_between(work, n_rows, width, dtype, DEVICE)
    exact = exact_of(work, tensors)
    return FusedCase(tensors, kernel_of(work)), exact, torch.randn_like(next(iter(tensors.values())))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("work", WORKS)
def test_outputs_and_gradients_are_those_of_torchs_operators(work, shape, dtype):
    kernel, exact, weights = both(work, *shape, dtype)
    found, expected = kernel.all(weights), exact.all(weights)
    rtol = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    for name, tensor in expected.items():
        assert found[name].dtype == dtype
        largest = tensor.abs().max().item()
        torch.testing.assert_close(
            found[name].to(tensor.dtype), tensor, rtol=rtol, atol=rtol * max(largest, 0.1), msg=name
        )


def kept_of(work, kernel, dropout):
    """What dropout kept, from gradients: of a branch where each element of rows has another, of GELU where its slope is 1."""
    if work == "gelu":
        kernel.tensors["inner"].data.fill_(30.0)
        return kernel.all(torch.ones_like(kernel.tensors["inner"]), dropout)["inner"]
    weights = torch.linspace(1, 2, kernel.tensors["rows"].numel(), device=DEVICE).view_as(kernel.tensors["rows"])
    found = kernel.all(weights.square(), dropout)
    assert found["rows"].all()
    return found["branch"] / found["rows"]


@pytest.mark.parametrize("dropout", [0.1, 0.7])
@pytest.mark.parametrize("work", WORKS)
def test_dropout_takes_its_share_everywhere_and_grows_the_rest(work, dropout):
    kernel, _, _ = both(work, 64, 96)
    grown = kept_of(work, kernel, dropout)
    kept = grown != 0
    torch.testing.assert_close(grown[kept], torch.full_like(grown[kept], 1 / (1 - dropout)), rtol=1e-3, atol=0)
    n = kept.numel()
    assert abs(kept.double().mean().item() - (1 - dropout)) < 5 * (dropout * (1 - dropout) / n) ** 0.5
    for along in (0, 1):  # each row and each column has its share, so that none is another's
        shares = kept.double().mean(along)
        assert shares.std().item() == pytest.approx((dropout * (1 - dropout) / kept.size(along)) ** 0.5, rel=0.5)


@pytest.mark.parametrize("work", WORKS)
def test_what_one_element_keeps_says_nothing_of_another(work):
    """Neither of the one under it, whose bits may be of the same random word, nor of one beside it, nor of the next seed."""
    kernel, _, _ = both(work, 256, 96)
    kept = (kept_of(work, kernel, 0.5) != 0).double().flatten() - 0.5
    for apart in (1, 2, 8, 96, 192, 8 * 96, 1024, 8 * 1024):
        together = (kept[apart:] * kept[:-apart]).mean().item() / 0.25
        assert abs(together) < 5 / (len(kept) - apart) ** 0.5, apart
    outputs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        outputs.append(kernel.output(0.5))
    assert not torch.equal(*outputs)


@pytest.mark.parametrize("work", WORKS)
def test_the_backward_pass_is_the_derivative_with_dropout_too(work):
    """Along one direction, by differences; the same seed drops the same in both passes."""
    kernel, _, weights = both(work, 9, 24)
    gradients = kernel.all(weights, 0.3)
    torch.manual_seed(5)
    directions = {name: torch.randn_like(x) for name, x in kernel.tensors.items()}
    slope = sum((gradients[name].double() * x).sum() for name, x in directions.items()).item()
    step, values = 1e-2, []
    with torch.no_grad():
        for sign in (1, -1):
            moved = {name: x + sign * step * directions[name] for name, x in kernel.tensors.items()}
            torch.manual_seed(0)
            values.append((FusedCase(moved, kernel.work).output(0.3).double() * weights).sum().item())
    assert slope == pytest.approx((values[0] - values[1]) / (2 * step), rel=5e-3)


@pytest.mark.parametrize("work", WORKS)
def test_the_same_seed_gives_the_same_bits(work):
    kernel, _, weights = both(work, 40, 24)
    first, second = (kernel.all(weights, 0.3) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_sums_over_many_rows_are_whole(monkeypatch, dropout):
    """Where a program has several groups of rows; which elements dropout takes is the same there."""
    from xlpre.model.kernels.triton import fused_ops

    kernel, exact, weights = both("norm", 101, 16)
    alone = kernel.all(weights, dropout)
    monkeypatch.setattr(fused_ops, "PROGRAMS", 3)
    found = kernel.all(weights, dropout)
    expected = alone if dropout else exact.all(weights)
    for name, x in expected.items():
        torch.testing.assert_close(found[name].to(x.dtype), x, rtol=1e-5, atol=1e-5)


def far_apart(n_rows, width):
    """Tensors of the norm that stand in memory in strides, or once for many."""
    rows = torch.randn(1, width, device=DEVICE).expand(n_rows, -1)
    of_norm = torch.randn(2, 2 * width, device=DEVICE)[:, ::2]
    return rows, torch.randn(width, n_rows, device=DEVICE).t(), *of_norm


def test_tensors_may_stand_in_memory_as_they_like_and_a_norm_has_an_eps_of_its_own():
    from xlpre.model.kernels.triton.fused_ops import add_norm, gelu_dropout

    eps, found, expected = 0.5, *([x.detach().requires_grad_() for x in far_apart(11, 24)] for _ in range(2))
    for x, y in zip(found, expected, strict=True):
        y.data = x.data.clone()
    outs = add_norm(*found, eps, 0.0), F.layer_norm(expected[0] + expected[1], (24,), *expected[2:], eps)
    once = torch.randn(11, 1, device=DEVICE).expand(-1, 24)
    gradients = [torch.autograd.grad(out, x, once) for out, x in zip(outs, (found, expected), strict=True)]
    for x, y in zip((outs[0], *gradients[0]), (outs[1], *gradients[1]), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    turned = torch.randn(24, 11, device=DEVICE).t().requires_grad_()
    out = gelu_dropout(turned, 0.0)
    torch.testing.assert_close(out, F.gelu(turned, approximate="tanh"), rtol=1e-5, atol=1e-6)
    of_gelu = [torch.autograd.grad(x, turned, once)[0] for x in (out, F.gelu(turned, approximate="tanh"))]
    torch.testing.assert_close(*of_gelu, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("work", WORKS)
def test_no_rows_and_no_gradient_are_no_error(work):
    kernel, _, weights = both(work, 0, 16)
    found = kernel.all(weights, 0.1)
    assert found["out"].shape == weights.shape
    assert all(not x.any() for x in found.values())
    kernel, _, _ = both(work, 3, 16)
    Unfelt.apply(kernel.output(0.1)).backward()
    assert all(x.grad is None or not x.grad.any() for x in kernel.tensors.values())


@pytest.mark.parametrize("width", [1, 768, 4096, 2**15])
def test_no_program_has_more_threads_than_a_gpu_allows(width):
    from xlpre.model.kernels.triton.fused_ops import cut

    assert 1 <= cut(width, drops=True)["num_warps"] <= 32


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_the_operators_are_what_they_told_torch_that_they_are(dropout):
    from xlpre.model.kernels.triton import fused_ops

    rows = tensors_between("norm", 5, 6, torch.float32, DEVICE)
    seed = torch.tensor([7], device=DEVICE)
    torch.library.opcheck(fused_ops._add_norm, (*rows.values(), seed if dropout else None, 1e-6, dropout))
    (inner,) = tensors_between("gelu", 5, 6, torch.float32, DEVICE).values()
    torch.library.opcheck(fused_ops._gelu, (inner, seed, dropout))


def test_extreme_numbers_stay_finite():
    """A row of one number has no deviation; what is far from zero is not 0 times infinity."""
    kernel, exact, weights = both("norm", 4, 16)
    for name in ("rows", "branch"):
        kernel.tensors[name].data.fill_(3.0)
    found = kernel.all(weights)
    torch.testing.assert_close(found["out"], kernel.tensors["bias"].detach().expand(4, -1))
    far = FusedCase(
        {"inner": torch.tensor([[-1e6, -1e3, -20, 0, 20, 1e3, 1e6]], device=DEVICE).requires_grad_()}, kernel_of("gelu")
    )
    found = far.all(torch.ones(1, 7, device=DEVICE))
    assert found["out"].tolist() == [[0, 0, 0, 0, 20, 1e3, 1e6]]
    assert found["inner"].tolist() == [[0, 0, 0, 0.5, 1, 1, 1]]


def test_a_training_step_of_a_model_takes_them(monkeypatch):
    """Two norms of each layer and, where there is dropout, one GELU; a model that says `sdpa` takes none."""
    from xlpre.model.kernels.triton import fused_ops

    called = []
    for name in ("add_norm", "gelu_dropout"):
        work = getattr(fused_ops, name)
        monkeypatch.setattr(
            fused_ops, name, lambda *given, name=name, work=work: (called.append(name), work(*given))[1]
        )
    batch = random_batch(20, reuse=10)
    for attention, dropout, expected in (("triton", 0.1, (4, 2)), ("triton", 0.0, (4, 0)), ("sdpa", 0.1, (0, 0))):
        model = make_model(True, attention_backend=attention, n_layer=2, dropout=dropout).to(DEVICE)
        memory = random_memory(model.config, 2, 12)
        memory = type(memory)(memory.hidden.to(DEVICE), memory.valid.to(DEVICE))
        called.clear()
        model(batch.to(DEVICE), memory)[0].backward()
        assert (called.count("add_norm"), called.count("gelu_dropout")) == expected


def test_rows_go_in_whole_and_only_the_branch_is_dropped():
    from xlpre.model.config import ModelConfig
    from xlpre.model.norm import AddNorm

    norm = AddNorm(ModelConfig(vocab_size=9, d_model=16, n_head=2, attention_backend="triton", dropout=0.5)).to(DEVICE)
    rows, branch = (torch.randn(2, 9, 16, device=DEVICE) for _ in range(2))
    nothing = torch.zeros_like(rows)
    whole = F.layer_norm(rows, (16,), eps=norm.eps)
    torch.testing.assert_close(norm(rows, nothing), whole)
    assert not torch.allclose(norm(nothing, rows), whole)
    torch.testing.assert_close(norm.eval()(rows, branch), F.layer_norm(rows + branch, (16,), eps=norm.eps))


def without_outer(feed_forward):
    from xlpre.model.config import ModelConfig
    from xlpre.model.feedforward import build_feed_forward

    settings = {"d_model": 16, "n_head": 2, "d_inner": 24, "attention_backend": "triton", "dropout": 0.5}
    found = build_feed_forward(ModelConfig(vocab_size=9, feed_forward=feed_forward, **settings)).to(DEVICE)
    found.outer = torch.nn.Identity()
    return found


def test_a_feed_forward_layer_drops_once_and_while_training_only():
    gelu, rows = without_outer("gelu"), torch.randn(2, 99, 16, device=DEVICE)
    assert (gelu(rows) != 0).double().mean().item() == pytest.approx(0.5, abs=0.04)
    assert (gelu.eval()(rows) != 0).all()


def test_what_is_not_gelu_or_of_several_types_is_left_to_torch():
    """Other activations; and a sum of types, as torch.autocast makes one."""
    from xlpre.model.config import ModelConfig
    from xlpre.model.norm import AddNorm

    rows = torch.randn(2, 9, 16, device=DEVICE)
    assert (without_outer("relu")(rows) >= 0).all()
    norm = AddNorm(ModelConfig(vocab_size=9, d_model=16, n_head=2, attention_backend="triton")).to(DEVICE)
    assert norm(rows.half(), rows).dtype == torch.float32
