"""Fused add-norm and GELU-dropout against torch's operators. Run by test_interpreter.py."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from tests.unit.model.conftest import make_model, random_batch, random_memory
from tests.unit.model.kernels.cases import DEVICE, DTYPES, SumWithoutGradient, long_except, needs_triton
from xlpre.model.config import ModelConfig
from xlpre.model.kernels.selfcheck.fixtures import (
    FUSED_OPS,
    FusedCase,
    exact_fused_case,
    fused_kernel,
    random_fused_tensors,
)

pytestmark = needs_triton
# rows and width: one group of rows and several, widths that are no power of two, GELU in one program and several
SHAPES = [(1, 3), (8, 16), (21, 96), (19, 7), (3, 200), (9, 1100)]


def cases(op, n_rows, width, dtype=torch.float32):
    """The kernel, torch's operators in twice the precision, and a random gradient of the output."""
    torch.manual_seed(n_rows)
    tensors = random_fused_tensors(op, n_rows, width, dtype, DEVICE)
    exact = exact_fused_case(op, tensors)
    return FusedCase(tensors, fused_kernel(op)), exact, torch.randn_like(next(iter(tensors.values())))


@pytest.mark.parametrize(
    ("op", "shape", "dtype"),
    long_except(
        itertools.product(FUSED_OPS, SHAPES, DTYPES),
        ("add_norm", (21, 96), torch.float32),
        ("add_norm", (19, 7), torch.float16),
        ("gelu_dropout", (9, 1100), torch.float32),
        ("gelu_dropout", (8, 16), torch.float16),
    ),
    ids=str,
)
def test_outputs_and_gradients_equal_those_of_torchs_operators(op, shape, dtype):
    kernel, exact, d_output = cases(op, *shape, dtype)
    result, expected = kernel.run(d_output), exact.run(d_output)
    rtol = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    for name, tensor in expected.items():
        assert result[name].dtype == dtype
        atol = rtol * max(tensor.abs().max().item(), 0.1)
        torch.testing.assert_close(result[name].to(tensor.dtype), tensor, rtol=rtol, atol=atol, msg=name)


def dropout_factors(op, kernel, dropout):
    """The factor of dropout for each element, from gradients: 0, or 1 / (1 - dropout)."""
    if op == "gelu_dropout":
        kernel.tensors["x"].data.fill_(30.0)  # where the slope of GELU is 1
        return kernel.run(torch.ones_like(kernel.tensors["x"]), dropout)["x"]
    d_output = torch.linspace(1, 2, kernel.tensors["x"].numel(), device=DEVICE).view_as(kernel.tensors["x"])
    gradients = kernel.run(d_output.square(), dropout)
    assert gradients["x"].all()
    return gradients["branch"] / gradients["x"]


@pytest.mark.parametrize("dropout", long_except([0.1, 0.7], 0.1))
@pytest.mark.parametrize("op", FUSED_OPS)
def test_dropout_has_its_rate_everywhere_and_scales_the_rest(op, dropout):
    kernel, _, _ = cases(op, 64, 96)
    factors = dropout_factors(op, kernel, dropout)
    kept = factors != 0
    torch.testing.assert_close(factors[kept], torch.full_like(factors[kept], 1 / (1 - dropout)), rtol=1e-3, atol=0)
    n = kept.numel()
    assert abs(kept.double().mean().item() - (1 - dropout)) < 5 * (dropout * (1 - dropout) / n) ** 0.5
    for dim in (0, 1):  # in each column and each row
        fractions = kept.double().mean(dim)
        assert fractions.std().item() == pytest.approx((dropout * (1 - dropout) / kept.size(dim)) ** 0.5, rel=0.5)


@pytest.mark.parametrize("op", long_except(FUSED_OPS, "gelu_dropout"))
def test_elements_are_dropped_independently(op):
    """Compare with the next row, which may share a random word, with the next column, and with the next seed."""
    kernel, _, _ = cases(op, 256, 96)
    kept = (dropout_factors(op, kernel, 0.5) != 0).double().flatten() - 0.5
    for lag in (1, 2, 8, 96, 192, 8 * 96, 1024, 8 * 1024):
        correlation = (kept[lag:] * kept[:-lag]).mean().item() / 0.25
        assert abs(correlation) < 5 / (len(kept) - lag) ** 0.5, lag
    outputs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        outputs.append(kernel.output(0.5))
    assert not torch.equal(*outputs)


@pytest.mark.parametrize("op", FUSED_OPS)
def test_the_backward_pass_is_the_derivative_with_dropout(op):
    """Along one direction, by finite differences. The same seed drops the same elements in both passes."""
    kernel, _, d_output = cases(op, 9, 24)
    gradients = kernel.run(d_output, 0.3)
    torch.manual_seed(5)
    directions = {name: torch.randn_like(x) for name, x in kernel.tensors.items()}
    slope = sum((gradients[name].double() * x).sum() for name, x in directions.items()).item()
    step, values = 1e-2, []
    with torch.no_grad():
        for sign in (1, -1):
            moved = {name: x + sign * step * directions[name] for name, x in kernel.tensors.items()}
            torch.manual_seed(0)
            values.append((FusedCase(moved, kernel.function).output(0.3).double() * d_output).sum().item())
    assert slope == pytest.approx((values[0] - values[1]) / (2 * step), rel=5e-3)


@pytest.mark.parametrize("op", FUSED_OPS)
def test_the_same_seed_gives_the_same_bits(op):
    kernel, _, d_output = cases(op, 40, 24)
    first, second = (kernel.run(d_output, 0.3) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("dropout", long_except([0.0, 0.3], 0.3))
def test_sums_over_many_rows_are_complete(monkeypatch, dropout):
    """When a program computes several groups of rows. The dropout mask is the same."""
    from xlpre.model.kernels.triton import fused_ops

    kernel, exact, d_output = cases("add_norm", 101, 16)
    one_group_each = kernel.run(d_output, dropout)
    monkeypatch.setattr(fused_ops, "MAX_PROGRAMS", 3)
    result = kernel.run(d_output, dropout)
    expected = one_group_each if dropout else exact.run(d_output)
    for name, x in expected.items():
        torch.testing.assert_close(result[name].to(x.dtype), x, rtol=1e-5, atol=1e-5)


def strided_tensors(n_rows, width):
    """Input of add-norm with strides, or expanded from one row."""
    x = torch.randn(1, width, device=DEVICE).expand(n_rows, -1)
    weight_and_bias = torch.randn(2, 2 * width, device=DEVICE)[:, ::2]
    return x, torch.randn(width, n_rows, device=DEVICE).t(), *weight_and_bias


def test_tensors_may_have_any_strides_and_a_norm_any_eps():
    from xlpre.model.kernels.triton.fused_ops import add_norm, gelu_dropout

    eps, inputs, copies = 0.5, *([x.detach().requires_grad_() for x in strided_tensors(11, 24)] for _ in range(2))
    for x, y in zip(inputs, copies, strict=True):
        y.data = x.data.clone()
    outs = add_norm(*inputs, eps, 0.0), F.layer_norm(copies[0] + copies[1], (24,), *copies[2:], eps)
    d_output = torch.randn(11, 1, device=DEVICE).expand(-1, 24)
    gradients = [torch.autograd.grad(out, x, d_output) for out, x in zip(outs, (inputs, copies), strict=True)]
    for x, y in zip((outs[0], *gradients[0]), (outs[1], *gradients[1]), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    transposed = torch.randn(24, 11, device=DEVICE).t().requires_grad_()
    out, expected = gelu_dropout(transposed, 0.0), F.gelu(transposed, approximate="tanh")
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    gelu_gradients = [torch.autograd.grad(x, transposed, d_output)[0] for x in (out, expected)]
    torch.testing.assert_close(*gelu_gradients, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("op", FUSED_OPS)
def test_no_rows_and_outputs_without_a_gradient_are_no_error(op):
    kernel, _, d_output = cases(op, 0, 16)
    result = kernel.run(d_output, 0.1)
    assert result["out"].shape == d_output.shape
    assert all(not x.any() for x in result.values())
    kernel, _, _ = cases(op, 3, 16)
    SumWithoutGradient.apply(kernel.output(0.1)).backward()
    assert all(x.grad is None or not x.grad.any() for x in kernel.tensors.values())


@pytest.mark.parametrize("width", [1, 768, 4096, 2**15])
def test_no_program_has_more_threads_than_a_gpu_allows(width):
    from xlpre.model.kernels.triton.fused_ops import add_norm_config

    assert 1 <= add_norm_config(width, has_dropout=True)["num_warps"] <= 32


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_the_fake_implementations_and_the_schemas_match_the_operators(dropout):
    from xlpre.model.kernels.triton import fused_ops

    tensors = random_fused_tensors("add_norm", 5, 6, torch.float32, DEVICE)
    seed = torch.tensor([7], device=DEVICE)
    torch.library.opcheck(fused_ops._add_norm, (*tensors.values(), seed if dropout else None, 1e-6, dropout))
    (x,) = random_fused_tensors("gelu_dropout", 5, 6, torch.float32, DEVICE).values()
    torch.library.opcheck(fused_ops._gelu_dropout, (x, seed, dropout))


def test_extreme_numbers_stay_finite():
    """A constant row has a standard deviation of 0. Far from zero, GELU must not compute 0 times infinity."""
    kernel, _, d_output = cases("add_norm", 4, 16)
    for name in ("x", "branch"):
        kernel.tensors[name].data.fill_(3.0)
    result = kernel.run(d_output)
    torch.testing.assert_close(result["out"], kernel.tensors["bias"].detach().expand(4, -1))
    x = torch.tensor([[-1e6, -1e3, -20, 0, 20, 1e3, 1e6]], device=DEVICE).requires_grad_()
    result = FusedCase({"x": x}, fused_kernel("gelu_dropout")).run(torch.ones(1, 7, device=DEVICE))
    assert result["out"].tolist() == [[0, 0, 0, 0, 20, 1e3, 1e6]]
    assert result["x"].tolist() == [[0, 0, 0, 0.5, 1, 1, 1]]


def test_a_training_step_of_a_model_uses_them(monkeypatch):
    """Two norms per layer and, with dropout, one GELU. The backend `sdpa` uses none."""
    from xlpre.model.kernels.triton import fused_ops

    calls = []
    for name in ("add_norm", "gelu_dropout"):
        function = getattr(fused_ops, name)
        monkeypatch.setattr(
            fused_ops, name, lambda *args, name=name, function=function: (calls.append(name), function(*args))[1]
        )
    batch = random_batch(20, reuse=10).to(DEVICE)
    for backend, dropout, expected in (("triton", 0.1, (4, 2)), ("triton", 0.0, (4, 0)), ("sdpa", 0.1, (0, 0))):
        model = make_model(True, attention_backend=backend, n_layer=2, dropout=dropout).to(DEVICE)
        memory = random_memory(model.config, 2, 12)
        memory = type(memory)(memory.hidden.to(DEVICE), memory.valid.to(DEVICE))
        calls.clear()
        model(batch, memory)[0].backward()
        assert (calls.count("add_norm"), calls.count("gelu_dropout")) == expected


def test_add_norm_applies_dropout_to_the_branch_only():
    from xlpre.model.norm import AddNorm

    norm = AddNorm(ModelConfig(vocab_size=9, d_model=16, n_head=2, dropout=0.5)).to(DEVICE)
    rows, branch = (torch.randn(2, 9, 16, device=DEVICE) for _ in range(2))
    zeros, expected = torch.zeros_like(rows), F.layer_norm(rows, (16,), eps=norm.eps)
    torch.testing.assert_close(norm(rows, zeros, fused=True), expected)
    assert not torch.allclose(norm(zeros, rows, fused=True), expected)
    in_evaluation = norm.eval()(rows, branch, fused=True)
    torch.testing.assert_close(in_evaluation, F.layer_norm(rows + branch, (16,), eps=norm.eps))


def activation_of(feed_forward):
    """A feed-forward layer without its second projection."""
    from xlpre.model.feedforward import build_feed_forward

    shape = {"vocab_size": 9, "d_model": 16, "n_head": 2, "d_inner": 24, "dropout": 0.5}
    layer = build_feed_forward(ModelConfig(feed_forward=feed_forward, **shape)).to(DEVICE)
    layer.outer = torch.nn.Identity()
    return layer


def test_a_feed_forward_layer_applies_dropout_once_and_in_training_only():
    layer, rows = activation_of("gelu"), torch.randn(2, 99, 16, device=DEVICE)
    assert (layer(rows, fused=True) != 0).double().mean().item() == pytest.approx(0.5, abs=0.04)
    assert (layer.eval()(rows, fused=True) != 0).all()


def test_other_activations_and_mixed_dtypes_use_torchs_operators():
    """torch.autocast leads to a sum of two dtypes."""
    from xlpre.model.norm import AddNorm

    rows = torch.randn(2, 9, 16, device=DEVICE)
    assert (activation_of("relu")(rows, fused=True) >= 0).all()
    norm = AddNorm(ModelConfig(vocab_size=9, d_model=16, n_head=2)).to(DEVICE)
    assert norm(rows.half(), rows, fused=True).dtype == torch.float32
