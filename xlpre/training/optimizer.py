"""AdamW or Muon, with XLNet's choice of what decays, and learning rates that fall from layer to layer."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from xlpre.training.muon import Muon


@dataclass(frozen=True)
class OptimConfig:
    """AdamW.

    Attributes:
        lr: the peak learning rate.
        beta1: decay of Adam's first moment.
        beta2: decay of its second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled, times the learning rate.
        max_grad_norm: largest global norm of the gradient; 0 does not clip.
    """

    lr: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-6
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        rules = {
            "lr": (self.lr > 0, "positive"),
            "eps": (self.eps > 0, "positive"),
            "weight_decay": (self.weight_decay >= 0, "at least 0"),
            "max_grad_norm": (self.max_grad_norm >= 0, "at least 0, which does not clip"),
            "beta1": (0 <= self.beta1 < 1, "at least 0 and below 1"),
            "beta2": (0 <= self.beta2 < 1, "at least 0 and below 1"),
        }
        for name, (kept, rule) in rules.items():
            if not kept:
                raise ValueError(f"optim.{name} ({getattr(self, name)}) must be {rule}")

    @property
    def muon(self) -> bool:
        """Whether matrices of layers move by Muon."""
        return False


@dataclass(frozen=True)
class PretrainOptimConfig(OptimConfig):
    """AdamW, for all or for what is no matrix of a layer.

    Attributes:
        name: `adamw`, as published; `muon`: matrices of layers move by orthogonal steps (Jordan, 2024), all else by AdamW.
        matrix_lr: the peak learning rate of Muon's matrices, whose steps at a given rate are about as long as AdamW's; null: `lr`.
        momentum: of Muon's matrices.
    """

    name: Literal["adamw", "muon"] = "adamw"
    matrix_lr: float | None = None
    momentum: float = 0.95

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.matrix_lr is not None and self.matrix_lr <= 0:
            raise ValueError(f"optim.matrix_lr ({self.matrix_lr}) must be positive, or null, which is optim.lr")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"optim.momentum ({self.momentum}) must be at least 0 and below 1")

    @property
    def muon(self) -> bool:
        """Whether matrices of layers move by Muon."""
        return self.name == "muon"


@dataclass(frozen=True)
class LayerwiseOptimConfig(OptimConfig):
    """AdamW whose lower layers learn less.

    Attributes:
        layer_decay: the layer m of L counts as layer_decay^(L - m), 1.0 treats all alike. Embeddings and heads count as 1.
        layer_decay_mode: what it multiplies. `lr`: the learning rate, as the paper defines it (XLNet, Table 8). `grad_scale`: the
            clipped gradient, as the published code has it, most of which Adam undoes; there the biases of scores and the segments' vectors,
            which it holds outside of its layers, count as 1.
    """

    layer_decay: float = 1.0
    layer_decay_mode: Literal["lr", "grad_scale"] = "lr"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.layer_decay <= 1:
            raise ValueError(f"optim.layer_decay ({self.layer_decay}) must be above 0 and at most 1, which is no decay")
        if self.layer_decay == 1 and self.layer_decay_mode != "lr":
            raise ValueError(
                f"optim.layer_decay_mode={self.layer_decay_mode} does nothing with optim.layer_decay=1; set optim.layer_decay"
            )


def decays(name: str) -> bool:
    """Whether a parameter decays: all but norms and the biases of layers; the biases of scores do.

    Source: zihangdai/xlnet model_utils.py `_do_use_weight_decay`, whose pattern spares `bias` but not `r_w_bias`.
    """
    return "norm" not in name and re.search(r"(?<!\br_)(?<!\br_[wrs]_)bias$", name) is None


def is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter is a matrix of a layer: what Muon moves."""
    return _layer_of(name) >= 0 and parameter.ndim == 2 and name.endswith(".weight")


class ClipAndSkipMixin(torch.optim.Optimizer):
    """Clips, and makes no update whose gradients are not finite, as ZeRO's optimizers do.

    Without ZeRO nothing in DeepSpeed would: it reads `overflow` and `_global_grad_norm` from here.
    """

    max_grad_norm = 0.0
    _global_grad_norm = 0.0
    overflow = False

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update, or none."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        for parameter in parameters:
            if parameter.grad is None:  # it had no part in the loss, and yet decays, as under ZeRO
                parameter.grad = torch.zeros_like(parameter)
        norm = nn.utils.get_total_norm([p.grad for p in parameters])
        self._global_grad_norm = norm.item()
        self.overflow = not math.isfinite(self._global_grad_norm)
        if self.overflow:
            return
        if self.max_grad_norm:
            nn.utils.clip_grads_with_norm_(parameters, self.max_grad_norm, norm)
        _scale_gradients(self)
        super().step()


class ClipAndSkipAdamW(ClipAndSkipMixin, torch.optim.AdamW):
    """AdamW that clips and skips."""


class ClipAndSkipMuon(ClipAndSkipMixin, Muon):
    """Muon that clips and skips."""


def build_optimizer(model: nn.Module, config: OptimConfig, guarded: bool = False) -> torch.optim.Optimizer:
    """Muon, or torch's AdamW, fused; `guarded` where nobody else clips and looks for what is not finite.

    Its groups have `lr_scale`, which whoever sets a learning rate multiplies it by (see `set_lr`).
    """
    settings: dict[str, Any] = {
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "fused": True,
    }
    groups = _groups(model, config)
    optimizer: torch.optim.Optimizer
    if isinstance(config, PretrainOptimConfig) and config.muon:
        optimizer = (ClipAndSkipMuon if guarded else Muon)(groups, config.momentum, **settings)
    else:
        optimizer = (ClipAndSkipAdamW if guarded else torch.optim.AdamW)(groups, **settings)
    if isinstance(optimizer, ClipAndSkipMixin):
        optimizer.max_grad_norm = config.max_grad_norm
    elif any(group["grad_scale"] != 1 for group in groups):
        # by then DeepSpeed has clipped; a class of one's own it would not take
        optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: _scale_gradients(optimizer))
    return optimizer


def set_lr(optimizer: Any, lr: float) -> None:
    """Set the learning rate of an update, in each group by its scale."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def _groups(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """Parameters apart by whether Muon moves them, whether they decay, and what their layer's rate or gradient is multiplied by."""
    rate, mode, matrix_rate = 1.0, "lr", 1.0
    if isinstance(config, LayerwiseOptimConfig):
        rate, mode = config.layer_decay, config.layer_decay_mode
    if isinstance(config, PretrainOptimConfig) and config.matrix_lr:
        matrix_rate = config.matrix_lr / config.lr
    layers = {name: _layer_of(name) for name, _ in model.named_parameters()}
    top = max(layers.values(), default=-1)
    found: dict[tuple[bool, bool, float], dict[str, nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        counts_as_1 = layers[name] < 0 or (mode == "grad_scale" and _held_for_all_layers(name))
        scale = 1.0 if counts_as_1 else rate ** (top - layers[name])
        matrix = config.muon and is_matrix(name, parameter)
        found.setdefault((matrix, decays(name), scale), {})[name] = parameter
    return [
        {
            "params": list(parameters.values()),
            "weight_decay": config.weight_decay * decayed,
            "lr_scale": (matrix_rate if matrix else 1.0) * (scale if mode == "lr" else 1.0),
            "grad_scale": scale if mode == "grad_scale" else 1.0,
            **({"matrices": {name: parameter.shape for name, parameter in parameters.items()}} if matrix else {}),
        }
        for (matrix, decayed, scale), parameters in sorted(found.items(), key=lambda entry: entry[0], reverse=True)
    ]


def _layer_of(name: str) -> int:
    """The layer of the backbone that a parameter belongs to; -1 if to none."""
    found = re.search(r"(?:^|\.)backbone\.layers\.(\d+)\.", name)
    return int(found[1]) if found else -1


def _held_for_all_layers(name: str) -> bool:
    """Whether the published code has a parameter of a layer in one variable of all layers, which is of none."""
    return re.search(r"\.terms\.\w+\.(r_bias|seg_embed)$", name) is not None


@torch.no_grad()
def _scale_gradients(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        if group["grad_scale"] != 1:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(group["grad_scale"])
