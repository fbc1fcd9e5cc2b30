"""AdamW, with XLNet's choice of what decays."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class OptimConfig:
    """AdamW.

    Attributes:
        lr: the peak learning rate.
        beta1: decay of Adam's first moment.
        beta2: decay of its second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled, times the learning rate.
        clip: largest global norm of the gradient; 0 does not clip.
    """

    lr: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-6
    weight_decay: float = 0.01
    clip: float = 1.0

    def __post_init__(self) -> None:
        if (
            min(self.lr, self.eps) <= 0
            or min(self.weight_decay, self.clip) < 0
            or not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1)
        ):
            raise ValueError(
                f"optim: lr ({self.lr}) and eps ({self.eps}) must be positive, weight_decay ({self.weight_decay}) and clip ({self.clip}) "
                f"at least 0, beta1 ({self.beta1}) and beta2 ({self.beta2}) at least 0 and below 1"
            )


def decays(name: str) -> bool:
    """Whether a parameter decays: all but norms and the biases of layers; the biases of scores do.

    Source: zihangdai/xlnet model_utils.py `_do_use_weight_decay`, whose pattern spares `bias` but not `r_w_bias`.
    """
    return "norm" not in name and re.search(r"(?<!\br_)(?<!\br_[wrs]_)bias$", name) is None


class GuardedAdamW(torch.optim.AdamW):
    """AdamW that clips, and makes no update whose gradients are not finite, as ZeRO's optimizers do.

    Without ZeRO nothing in DeepSpeed would: it reads `overflow` and `_global_grad_norm` from here.

    Args:
        groups: of parameters.
        clip: largest global norm of the gradient; 0 does not clip.
        settings: AdamW's.
    """

    def __init__(self, groups: Any, clip: float, **settings: Any) -> None:
        super().__init__(groups, **settings)
        self._clip, self._global_grad_norm, self.overflow = clip, 0.0, False

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update, or none."""
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in parameters])
        self._global_grad_norm = norm.item()
        self.overflow = not math.isfinite(self._global_grad_norm)
        if self.overflow:
            return
        if self._clip:
            nn.utils.clip_grads_with_norm_(parameters, self._clip, norm)
        super().step()


def build_optimizer(model: nn.Module, config: OptimConfig, guarded: bool = False) -> torch.optim.Optimizer:
    """Torch's AdamW in two groups, fused; `guarded` where nobody else clips and looks for what is not finite."""
    groups = [
        {
            "params": [p for name, p in model.named_parameters() if decays(name) is decayed],
            "weight_decay": config.weight_decay * decayed,
        }
        for decayed in (True, False)
    ]
    settings: dict[str, Any] = {
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "fused": True,
    }
    return GuardedAdamW(groups, config.clip, **settings) if guarded else torch.optim.AdamW(groups, **settings)
