"""Muon's steps: orthogonal, as long as AdamW's, the same from whole matrices as from a flat share."""

import copy
import math

import pytest
import torch

from pretrain.planning.activation_memory import Tensors
from xlpre.model.config import ModelConfig
from xlpre.model.language_model import LanguageModel
from xlpre.training import muon
from xlpre.training.muon import Muon, orthogonalize, working_bytes
from xlpre.training.optimizer import OptimConfig, PretrainOptimConfig, build_optimizer, set_lr

SHAPE = ModelConfig(vocab_size=50, n_layer=2, d_model=16, n_head=2, d_inner=32)
MUON = PretrainOptimConfig(name="muon", lr=0.1, matrix_lr=0.02, weight_decay=0)


def matrices_of(optimizer):
    """Groups that Muon moves."""
    return [group for group in optimizer.param_groups if "matrices" in group]


def updated(gradients, config=MUON, updates=1):
    """A model and its optimizer after updates with `gradients`, by name."""
    torch.manual_seed(1)
    model = LanguageModel(SHAPE, two_streams=True)
    optimizer = build_optimizer(model, config)
    set_lr(optimizer, config.lr)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    for _ in range(updates):
        for name, weight in model.named_parameters():
            weight.grad = gradients[name].clone()
        optimizer.step()
    return {name: weight.detach() - before[name] for name, weight in model.named_parameters()}, optimizer


@pytest.fixture
def gradients():
    torch.manual_seed(2)
    return {
        name: torch.randn_like(weight) for name, weight in LanguageModel(SHAPE, two_streams=True).named_parameters()
    }


@pytest.mark.parametrize("shape", [(3, 24, 24), (2, 16, 48), (2, 48, 16)])
def test_singular_vectors_stay_and_singular_values_become_alike(shape):
    torch.manual_seed(1)
    matrices = torch.randn(shape, dtype=torch.float64)
    u, s, v = torch.linalg.svd(matrices, full_matrices=False)
    found = u.mT @ orthogonalize(matrices) @ v.mT
    values = found.diagonal(dim1=-2, dim2=-1)
    assert (values > 0.6).all() and (values < 1.3).all()
    assert (found - torch.diag_embed(values)).abs().max() < 1e-10
    assert s.amax() / s.amin() > 3  # they were not alike


def test_a_matrix_without_a_gradient_stays():
    assert (orthogonalize(torch.zeros(2, 8, 4)) == 0).all()


def test_a_step_is_as_long_as_one_of_adamw_whatever_the_size_of_the_gradient(gradients):
    steps, optimizer = updated(gradients)
    large, _ = updated({name: 1000 * gradient for name, gradient in gradients.items()})
    (group,) = matrices_of(optimizer)
    for name in group["matrices"]:
        assert steps[name].square().mean().sqrt().item() == pytest.approx(0.2 * MUON.matrix_lr, rel=0.15)
        assert (steps[name] * gradients[name]).sum() < 0
        torch.testing.assert_close(steps[name], large[name], rtol=1e-4, atol=1e-7)


def test_matrices_of_layers_are_moved_and_everything_else_goes_as_adamw_has_it(gradients):
    steps, optimizer = updated(gradients, updates=3)
    plain, _ = updated(gradients, OptimConfig(lr=MUON.lr, weight_decay=0), updates=3)
    matrices = {name for group in matrices_of(optimizer) for name in group["matrices"]}
    kinds = {name.rpartition(".layers.")[2].partition(".")[2] for name in matrices}
    assert kinds == {
        *(f"attention.{part}.weight" for part in ("query", "key", "value", "output", "terms.position.key")),
        *(f"feed_forward.{part}.weight" for part in ("inner", "outer")),
    }
    for name, step in steps.items():
        if name not in matrices:
            assert torch.equal(step, plain[name]), name


def test_a_matrix_decays_by_its_own_rate_without_a_gradient_too():
    config = PretrainOptimConfig(name="muon", lr=0.1, weight_decay=0.5)
    none = {
        name: torch.zeros_like(weight) for name, weight in LanguageModel(SHAPE, two_streams=True).named_parameters()
    }
    torch.manual_seed(1)
    start = dict(LanguageModel(SHAPE, two_streams=True).named_parameters())
    steps, optimizer = updated(none, config)
    for name in matrices_of(optimizer)[0]["matrices"]:
        torch.testing.assert_close(steps[name], -0.1 * 0.5 * start[name].detach())


def test_momentum_looks_ahead():
    """Two updates with gradients g and h: the second step is that of h / 20 + 0.95 m, m = 0.95 g / 20 + h / 20 (Jordan, 2024)."""
    torch.manual_seed(1)
    g, h, weight = (torch.randn(1, 8, 8, dtype=torch.float64) for _ in range(3))
    matrix = torch.nn.Parameter(weight[0].clone())
    optimizer = Muon([{"params": [matrix], "matrices": {"m": matrix.shape}, "weight_decay": 0.0}], 0.95, lr=1.0)
    for gradient in (g, h):
        matrix.grad = gradient[0].clone()
        before = matrix.detach().clone()
        optimizer.step()
    m = 0.05 * (0.95 * g + h)
    expected = -0.2 * 8**0.5 * orthogonalize(0.05 * h + 0.95 * m)[0]
    torch.testing.assert_close(matrix.detach() - before, expected)


def test_a_flat_share_moves_as_the_matrices_do():
    torch.manual_seed(1)
    shapes = {"a": torch.Size((4, 6)), "b": torch.Size((6, 4)), "c": torch.Size((4, 6))}
    apart = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes.values()]
    padding = torch.zeros(5)  # as ZeRO pads
    flat = torch.nn.Parameter(torch.cat([*(weight.detach().flatten() for weight in apart), padding]))
    settings = {"matrices": shapes, "weight_decay": 0.1}
    optimizers = [Muon([{"params": found, **settings}], 0.9, lr=0.1) for found in (apart, [flat])]
    for _ in range(3):
        for weight in apart:
            weight.grad = torch.randn_like(weight)
        flat.grad = torch.cat([*(weight.grad.flatten() for weight in apart), padding])
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(flat.detach(), torch.cat([*(weight.detach().flatten() for weight in apart), padding]))


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("processes", [1, 3])
@pytest.mark.parametrize("shapes", [[(40, 40)] * 4 + [(20, 80)] * 2, [(30, 90)] * 7, [(64, 16)]], ids=str)
def test_the_memory_that_an_update_takes_is_foretold(monkeypatch, shapes, processes, flat):
    monkeypatch.setattr(muon, "world_size", lambda: processes)
    monkeypatch.setattr(muon, "_gathered", lambda share: share.new_zeros(processes * share.numel()))
    monkeypatch.setattr(muon.dist, "all_reduce", lambda tensor: None)
    named = {f"m{number}": torch.Size(shape) for number, shape in enumerate(shapes)}
    n = sum(map(math.prod, shapes))
    sizes = [(-(-n // processes),)] if flat else shapes
    tensors = [torch.nn.Parameter(torch.randn(size)) for size in sizes]
    optimizer = Muon([{"params": tensors, "matrices": named, "weight_decay": 0.1}], 0.95, lr=0.1)
    for tensor in tensors:
        tensor.grad = torch.randn_like(tensor)
    optimizer.step()
    with Tensors([*tensors, *(x for held in optimizer.state.values() for x in held.values())]) as counted:
        optimizer.step()
    assert counted.peak == pytest.approx(working_bytes(shapes, processes, flat, on_gpu=False), rel=0.03)


def test_a_gradient_that_is_not_finite_moves_nothing_and_leaves_no_trace():
    torch.manual_seed(1)
    model = LanguageModel(SHAPE, two_streams=True)
    optimizer = build_optimizer(model, MUON, clip_and_skip=True)
    for bad in (False, True):
        for weight in model.parameters():
            weight.grad = torch.full_like(weight, float("nan") if bad else 1.0)
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
        optimizer.step()
    assert optimizer.overflow
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[0][name])
    for number, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(tensor, before[1][number][key]) for key, tensor in state.items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "muon", "matrix_lr": -1.0}, r"optim.matrix_lr \(-1.0\) must be positive"),
        ({"name": "muon", "momentum": 1.0}, r"optim.momentum \(1.0\) must be at least 0 and below 1"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        PretrainOptimConfig(**settings)
