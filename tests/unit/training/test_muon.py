"""Updates of Muon: orthogonalized, as large as those of AdamW, equal for matrices and for a flat share of them."""

import copy
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pretrain.planning.activation_memory import TensorTracker
from xlpre.model.config import ModelConfig
from xlpre.model.language_model import LanguageModel
from xlpre.training import muon
from xlpre.training.config import OptimConfig, PretrainOptimConfig
from xlpre.training.muon import Muon, orthogonalize, sent_bytes, working_bytes
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


def test_products_in_bf16_give_nearly_the_same_update():
    torch.manual_seed(1)
    updates = []
    for bf16_on_cpu in (False, True):
        matrix = torch.nn.Parameter(torch.zeros(16, 48))
        group = {"params": [matrix], "matrices": {"m": matrix.shape}, "weight_decay": 0.0}
        matrix.grad = torch.randn(16, 48, generator=torch.Generator().manual_seed(2))
        Muon([group], 0.95, bf16_on_cpu, lr=1.0).step()
        updates.append(matrix.detach())
    exact, rounded = updates
    assert 0 < (rounded - exact).norm() < 0.03 * exact.norm()


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


class Processes:
    """Threads that take the place of processes, and count the bytes that each sends in `exchange`."""

    def __init__(self, monkeypatch, n_processes):
        self.n_processes, self.sent = n_processes, [0] * n_processes
        self._thread, self._barrier = threading.local(), threading.Barrier(n_processes, timeout=60)
        self._tensors = {}
        monkeypatch.setattr(muon, "rank", lambda: self._thread.rank)
        monkeypatch.setattr(muon, "world_size", lambda: n_processes)
        monkeypatch.setattr(muon.dist, "all_to_all_single", self._all_to_all)
        monkeypatch.setattr(muon.dist, "broadcast", self._broadcast)

    def run(self, function):
        """Call `function(rank)` in all threads. Returns the results."""

        def call(rank):
            self._thread.rank = rank
            return function(rank)

        with ThreadPoolExecutor(self.n_processes) as threads:
            return list(threads.map(call, range(self.n_processes)))

    def _exchange(self, value):
        self._barrier.wait()
        self._tensors[self._thread.rank] = value
        self._barrier.wait()
        return [self._tensors[rank] for rank in range(self.n_processes)]

    def _all_to_all(self, output, own, received, sent):
        own_rank = self._thread.rank
        self.sent[own_rank] += own.element_size() * (sum(sent) - sent[own_rank])
        parts = [parts[own_rank] for parts in self._exchange(own.clone().split(sent))]
        assert [part.numel() for part in parts] == received
        output.copy_(torch.cat(parts))

    def _broadcast(self, tensor, src):
        self.sent[self._thread.rank] += (
            tensor.element_size() * tensor.numel() / self.n_processes * (self.n_processes - 1)
        )
        tensor.copy_(self._exchange(tensor.clone())[src])


def updated(tensors, shapes, gradients, n_updates=3):
    """Make updates of tensors with a learning rate of 0.1, with `gradients(update)` of all of them. Returns the tensors."""
    parameters = [torch.nn.Parameter(tensor.clone()) for tensor in tensors]
    named = {f"m{number}": torch.Size(shape) for number, shape in enumerate(shapes)}
    optimizer = Muon([{"params": parameters, "matrices": named, "weight_decay": 0.1}], 0.9, lr=0.1)
    for update in range(n_updates):
        for parameter, gradient in zip(parameters, gradients(update), strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize("is_flat", [True, False])
@pytest.mark.parametrize("n_processes", [2, 3, 7])
@pytest.mark.parametrize("shapes", [[(4, 6), (6, 4), (4, 6), (5, 5)], [(4, 6)] * 6, [(9, 8)]], ids=str)
def test_processes_exchange_matrices_and_make_the_updates_of_a_single_process(
    monkeypatch, shapes, n_processes, is_flat
):
    torch.manual_seed(1)
    weights, *gradients = ([torch.randn(shape) for shape in shapes] for _ in range(4))
    expected = updated(weights, shapes, lambda update: gradients[update])
    processes = Processes(monkeypatch, n_processes)
    if is_flat:
        n = sum(map(math.prod, shapes))
        padding = torch.zeros(-n % n_processes)

        def flat(tensors):
            return torch.cat([*(tensor.flatten() for tensor in tensors), padding])

        def own(tensors, rank):
            return [flat(tensors).chunk(n_processes)[rank]]

        results = processes.run(
            lambda rank: updated(own(weights, rank), shapes, lambda update: own(gradients[update], rank))
        )
        torch.testing.assert_close(torch.cat([share for (share,) in results]), flat(expected))
    else:
        for result in processes.run(lambda rank: updated(weights, shapes, lambda update: gradients[update])):
            torch.testing.assert_close(result, expected)
    assert max(processes.sent) / 3 == pytest.approx(sent_bytes(shapes, n_processes, is_flat))


def test_only_split_matrices_are_sent_under_zero():
    """Two processes with twelve layers send one matrix once, in parts; without ZeRO each sends half of all matrices."""
    layer = [(64, 64)] * 5 + [(64, 256)] * 2
    assert sent_bytes(layer * 12, 2, is_flat=True) == 0  # the border is between two layers
    assert sent_bytes([*layer * 12, (64, 64)], 2, is_flat=True) == 4 * 64 * 64 / 2
    assert sent_bytes(layer * 12, 2, is_flat=False) == 4 * 12 * (5 * 64 * 64 + 2 * 64 * 256) / 2
    assert sent_bytes(layer, 1, is_flat=True) == sent_bytes(layer, 1, is_flat=False) == 0


@pytest.mark.parametrize("is_flat", [True, False])
@pytest.mark.parametrize("n_processes", [1, 3])
@pytest.mark.parametrize("shapes", [[(40, 40)] * 4 + [(20, 80)] * 2, [(30, 90)] * 7, [(64, 16)]], ids=str)
def test_working_bytes_predicts_the_peak_memory_of_an_update(monkeypatch, shapes, n_processes, is_flat):
    named = {f"m{number}": torch.Size(shape) for number, shape in enumerate(shapes)}
    n = sum(map(math.prod, shapes))
    sizes = [(-(-n // n_processes),)] if is_flat else shapes
    monkeypatch.setattr(muon, "world_size", lambda: n_processes)
    monkeypatch.setattr(muon.dist, "all_to_all_single", lambda *arguments: None)
    monkeypatch.setattr(muon.dist, "broadcast", lambda tensor, src: None)
    peaks = []
    for rank in range(n_processes):
        monkeypatch.setattr(muon, "rank", lambda rank=rank: rank)
        tensors = [torch.nn.Parameter(torch.randn(size)) for size in sizes]
        optimizer = Muon([{"params": tensors, "matrices": named, "weight_decay": 0.1}], 0.95, lr=0.1)
        for tensor in tensors:
            tensor.grad = torch.randn_like(tensor)
        optimizer.step()
        with TensorTracker([*tensors, *(x for held in optimizer.state.values() for x in held.values())]) as counted:
            optimizer.step()
        peaks.append(counted.peak)
    assert max(peaks) == pytest.approx(working_bytes(shapes, n_processes, is_flat, in_bf16=False), rel=0.03)


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
