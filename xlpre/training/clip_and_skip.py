"""Gradient clipping, and skipped steps where gradients are not finite, in runs without ZeRO. With ZeRO, DeepSpeed does both.

`Progress` in progress.py counts the skipped steps and ends a run with too many in a row.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from xlpre.training.muon import Muon


class ClipAndSkipMixin(torch.optim.Optimizer):
    """Clips the gradients, and skips an update whose gradients are not finite, as ZeRO optimizers do.

    DeepSpeed does neither without ZeRO. It reads `overflow` and `_global_grad_norm` from the optimizer.
    """

    max_grad_norm: float | None = None
    _global_grad_norm = 0.0
    overflow = False

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Make an update, or skip it."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        for parameter in parameters:
            if parameter.grad is None:  # not part of the loss; it is decayed, as under ZeRO
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
