"""Dropout whose random numbers are cheap on a processor: they are counted from one seed, and so need not be kept for the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from xlpre.model.kernels.cpu.build import elementwise, serves


class Dropout(nn.Module):
    """Sets a share of elements to 0 while training; the others grow by as much.

    Args:
        share: from 0 to below 1.
    """

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        """Of any shape and type."""
        if not self.training or self.share == 0:
            return x
        return _Dropout.apply(x, self.share, new_seed()) if serves(x.device, x.dtype) else F.dropout(x, self.share)

    def extra_repr(self) -> str:
        """What it prints of itself."""
        return f"share={self.share}"


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """`model` is in evaluation mode meanwhile, and then in the mode that it was in."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


class _Dropout(torch.autograd.Function):
    """By kernels/cpu.cpp."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: float, seed: int) -> Tensor:
        ctx.share, ctx.seed = share, seed
        return _dropped(x, share, seed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _dropped(grad, ctx.share, ctx.seed), None, None


def _dropped(x: Tensor, share: float, seed: int) -> Tensor:
    return elementwise("dropout", x.contiguous(), seed, threshold(share), 1 / (1 - share))


def new_seed() -> int:
    """Of torch's random numbers, which a checkpoint remembers."""
    return int(torch.randint(2**62, ()))


def threshold(share: float) -> int:
    """So many of 2**32 random numbers are below it."""
    return round(share * 2**32)
