"""Gradient clipping, and skipping of updates whose gradients are not finite, for runs without ZeRO. With ZeRO, DeepSpeed does both.

`Progress` in progress.py counts the skipped steps, and ends a run that skips too many steps in a row.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from xlpre.training.muon import Muon


class ClipAndSkipMixin(torch.optim.Optimizer):
    """Clips the gradients, and skips an update whose gradients are not finite, as ZeRO optimizers do.

    Without ZeRO, DeepSpeed does neither. It only reads the attributes `overflow` and `_global_grad_norm` of the optimizer.
    """

    max_grad_norm: float | None = None
    _global_grad_norm = 0.0
    overflow = False

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Clip the gradients and make an update, or skip the update if a gradient is not finite."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        for parameter in parameters:
            if parameter.grad is None:  # the loss does not depend on it; weight decay applies, as under ZeRO
                parameter.grad = torch.zeros_like(parameter)
        norm = nn.utils.get_total_norm([p.grad for p in parameters])
        self._global_grad_norm = norm.item()
        self.overflow = not math.isfinite(self._global_grad_norm)
        if self.overflow:
            return
        if self.max_grad_norm is not None:
            nn.utils.clip_grads_with_norm_(parameters, self.max_grad_norm, norm)
        scale_gradients(self)
        super().step()


class ClipAndSkipAdamW(ClipAndSkipMixin, torch.optim.AdamW):
    """AdamW that clips gradients and skips updates."""


class ClipAndSkipMuon(ClipAndSkipMixin, Muon):
    """Muon that clips gradients and skips updates."""


@torch.no_grad()
def scale_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Multiply the gradients of each parameter group by its `grad_scale`."""
    for group in optimizer.param_groups:
        if group["grad_scale"] != 1:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(group["grad_scale"])
