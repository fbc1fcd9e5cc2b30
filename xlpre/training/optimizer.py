"""Construction of AdamW and Muon, with weight decay for the parameters that XLNet decays, and smaller updates for lower layers."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from xlpre.training.clip_and_skip import ClipAndSkipAdamW, ClipAndSkipMixin, ClipAndSkipMuon, scale_gradients
from xlpre.training.config import LayerwiseOptimConfig, OptimConfig, PretrainOptimConfig
from xlpre.training.muon import Muon


def is_decayed(name: str) -> bool:
    """Return True if weight decay applies to a parameter. Norms and the biases of linear layers are not decayed; attention biases are.

    Source: zihangdai/xlnet model_utils.py `_do_use_weight_decay`, whose pattern excludes `bias` but not `r_w_bias`.
    """
    return "norm" not in name and re.search(r"(?<!\br_)(?<!\br_[wrs]_)bias$", name) is None


def is_layer_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Return True if a parameter is a matrix of a layer, which Muon updates."""
    return _layer_index(name) >= 0 and parameter.ndim == 2 and name.endswith(".weight")


def build_optimizer(
    model: nn.Module, config: OptimConfig, clip_and_skip: bool = False, bf16_on_cpu: bool = False
) -> torch.optim.Optimizer:
    """Build Muon or the fused AdamW of torch.

    Each parameter group has an `lr_scale`; see `set_lr`.

    Args:
        model: the model.
        config: settings of the optimizer.
        clip_and_skip: True if the optimizer itself must clip gradients, and skip updates whose gradients are not finite.
        bf16_on_cpu: see Muon.
    """
    settings: dict[str, Any] = {
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "fused": True,
    }
    groups = _parameter_groups(model, config)
    optimizer: torch.optim.Optimizer
    if isinstance(config, PretrainOptimConfig) and config.muon:
        optimizer = (ClipAndSkipMuon if clip_and_skip else Muon)(groups, config.momentum, bf16_on_cpu, **settings)
    else:
        optimizer = (ClipAndSkipAdamW if clip_and_skip else torch.optim.AdamW)(groups, **settings)
    if isinstance(optimizer, ClipAndSkipMixin):
        optimizer.max_grad_norm = config.max_grad_norm
    elif any(group["grad_scale"] != 1 for group in groups):
        # a hook, because DeepSpeed does not accept a subclass of AdamW; it runs after DeepSpeed has clipped
        optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: scale_gradients(optimizer))
    return optimizer


def set_lr(optimizer: Any, lr: float) -> None:
    """Set the learning rate of all parameter groups, each multiplied by its `lr_scale`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def _parameter_groups(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """Group the parameters by optimizer (Muon or AdamW), weight decay and layer-wise scale."""
    layer_decay, mode, matrix_lr_scale = 1.0, "lr", 1.0
    if isinstance(config, LayerwiseOptimConfig):
        layer_decay, mode = config.layer_decay, config.layer_decay_mode
    if isinstance(config, PretrainOptimConfig) and config.matrix_lr:
        matrix_lr_scale = config.matrix_lr / config.lr
    layers = {name: _layer_index(name) for name, _ in model.named_parameters()}
    top_layer = max(layers.values(), default=-1)
    groups: dict[tuple[bool, bool, float], dict[str, nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        is_unscaled = layers[name] < 0 or (mode == "grad_scale" and _is_shared_in_published_code(name))
        scale = 1.0 if is_unscaled else layer_decay ** (top_layer - layers[name])
        is_matrix = config.muon and is_layer_matrix(name, parameter)
        groups.setdefault((is_matrix, is_decayed(name), scale), {})[name] = parameter
    return [
        {
            "params": list(parameters.values()),
            "weight_decay": config.weight_decay * decayed,
            "lr_scale": (matrix_lr_scale if is_matrix else 1.0) * (scale if mode == "lr" else 1.0),
            "grad_scale": scale if mode == "grad_scale" else 1.0,
            **({"matrices": {name: parameter.shape for name, parameter in parameters.items()}} if is_matrix else {}),
        }
        for (is_matrix, decayed, scale), parameters in sorted(groups.items(), key=lambda entry: entry[0], reverse=True)
    ]


def _layer_index(name: str) -> int:
    """Return the index of the layer that a parameter belongs to; -1 if it is not in a layer."""
    match = re.search(r"(?:^|\.)backbone\.layers\.(\d+)\.", name)
    return int(match[1]) if match else -1


def _is_shared_in_published_code(name: str) -> bool:
    """Return True if the published code stores this parameter of all layers in one variable outside of the layers."""
    return re.search(r"\.terms\.\w+\.(r_bias|seg_embed)$", name) is not None
