"""Dropout. On a CPU, its mask is computed from a seed and never stored.

Each call draws one seed. The backward pass generates the same random numbers again from this seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from xlpre.model.kernels.cpu.build import elementwise, is_supported


class Dropout(nn.Module):
    """Set a fraction of the elements to 0 in training and scale the others by 1 / (1 - p).

    Args:
        p: fraction, from 0 to below 1.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Apply dropout to a tensor of any shape and dtype."""
        if not self.training or self.p == 0:
            return x
        return _Dropout.apply(x, self.p, new_seed()) if is_supported(x.device, x.dtype) else F.dropout(x, self.p)

    def extra_repr(self) -> str:
        """Return the argument for `repr`."""
        return f"p={self.p}"


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Put `model` into evaluation mode within the context and restore its mode afterwards."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


class _Dropout(torch.autograd.Function):
    """Dropout computed by kernels/cpu/kernels.cpp."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, seed: int) -> Tensor:
        ctx.p, ctx.seed = p, seed
        return _apply_dropout(x, p, seed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _apply_dropout(grad, ctx.p, ctx.seed), None, None


def _apply_dropout(x: Tensor, p: float, seed: int) -> Tensor:
    return elementwise("dropout", x.contiguous(), seed, drop_threshold(p), 1 / (1 - p))


def new_seed() -> int:
    """Draw a seed from torch's CPU generator, which `seed_step` seeds at every step."""
    return int(torch.randint(2**62, ()))


def drop_threshold(p: float) -> int:
    """Return the threshold for uniform random 32-bit numbers: an element is dropped if its number is below it."""
    return min(round(p * 2**32), 2**32 - 1)
