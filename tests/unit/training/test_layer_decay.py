"""Layer-wise decay in both readings: of the learning rate (XLNet, Table 8), and of the gradient (its code)."""

import pytest
import torch
from torch import nn

from xlpre.training.optimizer import LayerwiseOptimConfig, build_optimizer, set_lr


class Model(nn.Module):
    """Three layers by the backbone's names, an embedding, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Module()
        self.backbone.word_embedding = nn.Linear(1, 1, bias=False)
        self.backbone.layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(3))
        self.head = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.head.weight, 1.0)

    def weights(self):
        return [self.backbone.word_embedding.weight, *(layer.weight for layer in self.backbone.layers), self.head.weight]


SCALES = [1.0, 0.25, 0.5, 1.0, 1.0]


def moved(config, guarded, gradient=1.0):
    """How far each weight moves in one update at a learning rate of 0.1, its gradient being `gradient`."""
    model = Model()
    optimizer = build_optimizer(model, config, guarded)
    set_lr(optimizer, 0.1)
    before = [weight.item() for weight in model.weights()]
    for weight in model.weights():
        weight.grad = torch.full_like(weight, gradient)
    optimizer.step()
    return [was - weight.item() for was, weight in zip(before, model.weights(), strict=True)], model, optimizer


@pytest.mark.parametrize("guarded", [False, True])
def test_the_rate_of_a_layer_falls_with_its_depth_and_embedding_and_head_keep_theirs(guarded):
    config = LayerwiseOptimConfig(layer_decay=0.5, weight_decay=0, max_grad_norm=0)
    found, _, _ = moved(config, guarded)
    assert found == pytest.approx([0.1 * scale for scale in SCALES], rel=1e-4)


@pytest.mark.parametrize("guarded", [False, True])
def test_a_scaled_gradient_moves_adam_as_far_but_for_epsilon(guarded):
    config = LayerwiseOptimConfig(layer_decay=0.5, layer_decay_mode="grad_scale", weight_decay=0, max_grad_norm=0)
    found, model, optimizer = moved(config, guarded)
    assert found == pytest.approx([0.1] * 5, rel=1e-4)
    momentum = [optimizer.state[weight]["exp_avg"].item() for weight in model.weights()]
    assert momentum == pytest.approx([0.1 * scale for scale in SCALES])
    near_epsilon, _, _ = moved(config, guarded, gradient=1e-6)
    assert near_epsilon == pytest.approx([0.1 * scale / (scale + 1) for scale in SCALES], rel=1e-3)


def test_gradients_are_clipped_before_they_are_scaled():
    config = LayerwiseOptimConfig(layer_decay=0.5, layer_decay_mode="grad_scale", weight_decay=0, max_grad_norm=1.0)
    _, model, optimizer = moved(config, guarded=True, gradient=10.0)
    momentum = [optimizer.state[weight]["exp_avg"].item() for weight in model.weights()]
    assert momentum == pytest.approx([0.1 * scale / 5**0.5 for scale in SCALES], rel=1e-4)


def test_a_decay_that_is_none_or_does_nothing_is_refused():
    with pytest.raises(ValueError, match=r"optim.layer_decay \(0\) must be above 0"):
        LayerwiseOptimConfig(layer_decay=0)
    with pytest.raises(ValueError, match="does nothing with optim.layer_decay=1"):
        LayerwiseOptimConfig(layer_decay_mode="grad_scale")
