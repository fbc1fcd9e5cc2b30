"""Dropout whose random numbers are cheap on a processor: 16 bits an element, four to a draw, instead of a draw for each."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Dropout(nn.Module):
    """Sets a share of elements to 0 while training; the others grow by as much.

    On a processor, where nothing is compiled, the share is a multiple of 2**-16.

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
        if x.device.type != "cpu" or torch.compiler.is_compiling():
            return F.dropout(x, self.share)
        kept = random_bits(x.numel()).float().ge_(threshold(self.share))  # as numbers: torch is slow with booleans here
        return x * kept.mul_(1 / (1 - self.share)).view(x.shape).to(x.dtype)

    def extra_repr(self) -> str:
        """What it prints of itself."""
        return f"share={self.share}"


def random_bits(n: int, generator: torch.Generator | None = None) -> Tensor:
    """(n,) int16, all values equally likely."""
    draws = torch.empty((n + 3) // 4, dtype=torch.int64).random_(-(2**63), None, generator=generator)
    return draws.view(torch.int16)[:n]


def threshold(share: float) -> int:
    """So many of random_bits are below it."""
    return round(share * 2**16) - 2**15
