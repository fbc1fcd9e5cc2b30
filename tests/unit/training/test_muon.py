"""Updates of Muon: orthogonalized, as large as those of AdamW, equal for matrices and for a flat share of them."""

import copy
import math

import pytest
import torch

from pretrain.planning.activation_memory import TensorTracker
from xlpre.model.config import ModelConfig
from xlpre.model.language_model import LanguageModel
from xlpre.training import muon
from xlpre.training.config import OptimConfig, PretrainOptimConfig
from xlpre.training.muon import Muon, orthogonalize, working_bytes
from xlpre.training.optimizer import build_optimizer, set_lr

SHAPE = ModelConfig(vocab_size=50, n_layer=2, d_model=16, n_head=2, d_inner=32)
MUON = PretrainOptimConfig(name="muon", lr=0.1, matrix_lr=0.02, weight_decay=0)


def muon_groups(optimizer):
    """Return the parameter groups that Muon updates."""
    return [group for group in optimizer.param_groups if "matrices" in group]


def update(gradients, config=MUON, n_updates=1):
    """Make updates with `gradients`, by parameter name. Returns the change of each parameter, and the optimizer."""
    torch.manual_seed(1)
    model = LanguageModel(SHAPE, two_streams=True)
    optimizer = build_optimizer(model, config)
    set_lr(optimizer, config.lr)
    initial = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    for _ in range(n_updates):
        for name, weight in model.named_parameters():
            weight.grad = gradients[name].clone()
        optimizer.step()
    return {name: weight.detach() - initial[name] for name, weight in model.named_parameters()}, optimizer


@pytest.fixture
def gradients():
    torch.manual_seed(2)
    return {
        name: torch.randn_like(weight) for name, weight in LanguageModel(SHAPE, two_streams=True).named_parameters()
    }


@pytest.mark.parametrize("shape", [(3, 24, 24), (2, 16, 48), (2, 48, 16)])
def test_singular_vectors_stay_and_singular_values_become_about_one(shape):
    torch.manual_seed(1)
    matrices = torch.randn(shape, dtype=torch.float64)
    u, s, v = torch.linalg.svd(matrices, full_matrices=False)
    product = u.mT @ orthogonalize(matrices) @ v.mT
    values = product.diagonal(dim1=-2, dim2=-1)
    assert (values > 0.6).all() and (values < 1.3).all()
    assert (product - torch.diag_embed(values)).abs().max() < 1e-10
    assert s.amax() / s.amin() > 3  # they differed before


def test_zeros_stay_zeros():
    assert (orthogonalize(torch.zeros(2, 8, 4)) == 0).all()


def test_an_update_is_as_large_as_one_of_adamw_for_any_size_of_gradient(gradients):
    steps, optimizer = update(gradients)
    large, _ = update({name: 1000 * gradient for name, gradient in gradients.items()})
    (group,) = muon_groups(optimizer)
    for name in group["matrices"]:
        assert steps[name].square().mean().sqrt().item() == pytest.approx(0.2 * MUON.matrix_lr, rel=0.15)
        assert (steps[name] * gradients[name]).sum() < 0
        torch.testing.assert_close(steps[name], large[name], rtol=1e-4, atol=1e-7)


def test_muon_updates_the_matrices_of_layers_and_adamw_everything_else(gradients):
    steps, optimizer = update(gradients, n_updates=3)
    plain, _ = update(gradients, OptimConfig(lr=MUON.lr, weight_decay=0), n_updates=3)
    matrices = {name for group in muon_groups(optimizer) for name in group["matrices"]}
    kinds = {name.rpartition(".layers.")[2].partition(".")[2] for name in matrices}
    assert kinds == {
        *(f"attention.{part}.weight" for part in ("query", "key", "value", "output", "terms.position.key")),
        *(f"feed_forward.{part}.weight" for part in ("inner", "outer")),
    }
    for name, step in steps.items():
        if name not in matrices:
            assert torch.equal(step, plain[name]), name


def test_a_matrix_without_a_gradient_is_decayed():
    config = PretrainOptimConfig(name="muon", lr=0.1, weight_decay=0.5)
    zeros = {
        name: torch.zeros_like(weight) for name, weight in LanguageModel(SHAPE, two_streams=True).named_parameters()
    }
    torch.manual_seed(1)
    initial = dict(LanguageModel(SHAPE, two_streams=True).named_parameters())
    steps, optimizer = update(zeros, config)
    for name in muon_groups(optimizer)[0]["matrices"]:
        torch.testing.assert_close(steps[name], -0.1 * 0.5 * initial[name].detach())


def test_momentum_is_nesterov():
    """Two updates with gradients g and h: the second update is that of h / 20 + 0.95 m, m = 0.95 g / 20 + h / 20 (Jordan, 2024)."""
    torch.manual_seed(1)
    g, h, weight = (torch.randn(1, 8, 8, dtype=torch.float64) for _ in range(3))
    matrix = torch.nn.Parameter(weight[0].clone())
    optimizer = Muon([{"params": [matrix], "matrices": {"m": matrix.shape}, "weight_decay": 0.0}], 0.95, lr=1.0)
    for gradient in (g, h):
        matrix.grad = gradient[0].clone()
        previous = matrix.detach().clone()
        optimizer.step()
    m = 0.05 * (0.95 * g + h)
    expected = -0.2 * 8**0.5 * orthogonalize(0.05 * h + 0.95 * m)[0]
    torch.testing.assert_close(matrix.detach() - previous, expected)


def test_a_flat_share_gets_the_same_updates_as_the_matrices():
    torch.manual_seed(1)
    shapes = {"a": torch.Size((4, 6)), "b": torch.Size((6, 4)), "c": torch.Size((4, 6))}
    separate = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes.values()]
    padding = torch.zeros(5)  # as ZeRO pads
    flat = torch.nn.Parameter(torch.cat([*(weight.detach().flatten() for weight in separate), padding]))
    settings = {"matrices": shapes, "weight_decay": 0.1}
    optimizers = [Muon([{"params": parameters, **settings}], 0.9, lr=0.1) for parameters in (separate, [flat])]
    for _ in range(3):
        for weight in separate:
            weight.grad = torch.randn_like(weight)
        flat.grad = torch.cat([*(weight.grad.flatten() for weight in separate), padding])
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(flat.detach(), torch.cat([*(weight.detach().flatten() for weight in separate), padding]))


@pytest.mark.parametrize("is_flat", [True, False])
@pytest.mark.parametrize("n_processes", [1, 3])
@pytest.mark.parametrize("shapes", [[(40, 40)] * 4 + [(20, 80)] * 2, [(30, 90)] * 7, [(64, 16)]], ids=str)
def test_working_bytes_predicts_the_peak_memory_of_an_update(monkeypatch, shapes, n_processes, is_flat):
    monkeypatch.setattr(muon, "world_size", lambda: n_processes)
    monkeypatch.setattr(muon, "_all_gather", lambda share: share.new_zeros(n_processes * share.numel()))
    monkeypatch.setattr(muon.dist, "all_reduce", lambda tensor: None)
    named = {f"m{number}": torch.Size(shape) for number, shape in enumerate(shapes)}
    n = sum(map(math.prod, shapes))
    sizes = [(-(-n // n_processes),)] if is_flat else shapes
    tensors = [torch.nn.Parameter(torch.randn(size)) for size in sizes]
    optimizer = Muon([{"params": tensors, "matrices": named, "weight_decay": 0.1}], 0.95, lr=0.1)
    for tensor in tensors:
        tensor.grad = torch.randn_like(tensor)
    optimizer.step()
    with TensorTracker([*tensors, *(x for held in optimizer.state.values() for x in held.values())]) as counted:
        optimizer.step()
    assert counted.peak == pytest.approx(working_bytes(shapes, n_processes, is_flat, on_gpu=False), rel=0.03)


def test_a_gradient_that_is_not_finite_changes_neither_weights_nor_moments():
    torch.manual_seed(1)
    model = LanguageModel(SHAPE, two_streams=True)
    optimizer = build_optimizer(model, MUON, clip_and_skip=True)
    for is_nan in (False, True):
        for weight in model.parameters():
            weight.grad = torch.full_like(weight, float("nan") if is_nan else 1.0)
        previous = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
        optimizer.step()
    assert optimizer.overflow
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, previous[0][name])
    for number, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(tensor, previous[1][number][key]) for key, tensor in state.items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "muon", "matrix_lr": -1.0}, r"optim.matrix_lr=-1.0 is invalid: .*positive"),
        ({"name": "muon", "momentum": 1.0}, r"optim.momentum=1.0 is invalid: .*below 1"),
    ],
)
def test_an_invalid_setting_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        PretrainOptimConfig(**settings)
