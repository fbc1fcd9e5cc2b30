"""Layer-wise decay of the learning rate (XLNet, Table 8) and of the gradient (published code)."""

import pytest
import torch
from torch import nn

from tests.conftest import refused
from xlpre.training.config import LayerwiseOptimConfig, OptimConfig
from xlpre.training.optimizer import build_optimizer, set_lr


class Model(nn.Module):
    """Three layers with the names of the backbone, an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Module()
        self.backbone.word_embedding = nn.Linear(1, 1, bias=False)
        self.backbone.layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(3))
        self.head = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.head.weight, 1.0)

    def weights(self):
        return [
            self.backbone.word_embedding.weight,
            *(layer.weight for layer in self.backbone.layers),
            self.head.weight,
        ]


SCALES = [1.0, 0.25, 0.5, 1.0, 1.0]


def update(config, clip_and_skip, gradient=1.0):
    """Make one update with learning rate 0.1. Returns the decrease of each weight, the model and the optimizer."""
    model = Model()
    optimizer = build_optimizer(model, config, clip_and_skip)
    set_lr(optimizer, 0.1)
    previous = [weight.item() for weight in model.weights()]
    for weight in model.weights():
        weight.grad = torch.full_like(weight, gradient)
    optimizer.step()
    return [old - weight.item() for old, weight in zip(previous, model.weights(), strict=True)], model, optimizer


@pytest.mark.parametrize("clip_and_skip", [False, True])
def test_lower_layers_have_smaller_learning_rates_but_embedding_and_head_do_not(clip_and_skip):
    config = LayerwiseOptimConfig(layer_decay=0.5, weight_decay=0, max_grad_norm=None)
    decreases, _, _ = update(config, clip_and_skip)
    assert decreases == pytest.approx([0.1 * scale for scale in SCALES], rel=1e-4)


@pytest.mark.parametrize("clip_and_skip", [False, True])
def test_a_scaled_gradient_changes_the_update_of_adam_only_near_epsilon(clip_and_skip):
    config = LayerwiseOptimConfig(layer_decay=0.5, layer_decay_mode="grad_scale", weight_decay=0, max_grad_norm=None)
    decreases, model, optimizer = update(config, clip_and_skip)
    assert decreases == pytest.approx([0.1] * 5, rel=1e-4)
    momentum = [optimizer.state[weight]["exp_avg"].item() for weight in model.weights()]
    assert momentum == pytest.approx([0.1 * scale for scale in SCALES])
    near_epsilon, _, _ = update(config, clip_and_skip, gradient=1e-6)
    assert near_epsilon == pytest.approx([0.1 * scale / (scale + 1) for scale in SCALES], rel=1e-3)


def test_gradients_are_clipped_before_they_are_scaled():
    config = LayerwiseOptimConfig(layer_decay=0.5, layer_decay_mode="grad_scale", weight_decay=0, max_grad_norm=1.0)
    _, model, optimizer = update(config, clip_and_skip=True, gradient=10.0)
    momentum = [optimizer.state[weight]["exp_avg"].item() for weight in model.weights()]
    assert momentum == pytest.approx([0.1 * scale / 5**0.5 for scale in SCALES], rel=1e-4)


def test_a_layer_decay_that_is_zero_or_has_no_effect_is_refused():
    with pytest.raises(ValueError) as error:
        LayerwiseOptimConfig(layer_decay=0)
    refused(error, "optim.layer_decay", 0)
    with pytest.raises(ValueError) as error:
        LayerwiseOptimConfig(layer_decay_mode="grad_scale")
    refused(error, "optim.layer_decay_mode", "grad_scale", r"optim\.layer_decay\b")


def test_no_clipping_is_null_and_not_zero():
    assert OptimConfig(max_grad_norm=None).max_grad_norm is None
    with pytest.raises(ValueError) as error:
        OptimConfig(max_grad_norm=0)
    refused(error, "optim.max_grad_norm", 0, "Set optim.max_grad_norm=null")
