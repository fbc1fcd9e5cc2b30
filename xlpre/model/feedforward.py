"""Position-wise feed-forward layer, plain or gated (Shazeer 2020, "GLU Variants Improve Transformer", arXiv:2002.05202)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from xlpre.model.config import ModelConfig
from xlpre.model.dropout import Dropout
from xlpre.model.kernels.cpu.build import elementwise, is_supported

Activation = Callable[[Tensor], Tensor]


def gelu(x: Tensor) -> Tensor:
    """Compute the tanh approximation of GELU (Hendrycks and Gimpel 2016, arXiv:1606.08415) for any shape."""
    return _Gelu.apply(x) if is_supported(x.device, x.dtype) else F.gelu(x, approximate="tanh")


class _Gelu(torch.autograd.Function):
    """GELU computed by kernels/cpu/kernels.cpp.

    The kernel uses x (1 + tanh(w / 2)) / 2 = x / (1 + e^-w), with w = 2 sqrt(2 / pi) (x + 0.044715 x^3).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        return elementwise("gelu", x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return elementwise("gelu_backward", *ctx.saved_tensors, grad.contiguous())


PLAIN: dict[str, Activation] = {"gelu": gelu, "relu": F.relu}
GATED: dict[str, Activation] = {"glu": torch.sigmoid, "reglu": F.relu, "geglu": gelu, "swiglu": F.silu}


def build_feed_forward(config: ModelConfig) -> nn.Module:
    """Build the layer `config.feed_forward`."""
    if config.feed_forward in GATED:
        return GatedFeedForward(config, GATED[config.feed_forward])
    return FeedForward(config, PLAIN[config.feed_forward])


def gated_width(config: ModelConfig) -> int:
    """Return F', the width of a gated layer."""
    return max(2 * config.d_inner // 3, 1)


class FeedForward(nn.Module):
    """Feed-forward layer D -> F -> D, with an activation and dropout in between.

    With the Triton backend, kernels/triton/fused_ops.py computes GELU and dropout in one pass.
    """

    def __init__(self, config: ModelConfig, activation: Activation) -> None:
        super().__init__()
        self.inner = nn.Linear(config.d_model, config.d_inner)
        self.outer = nn.Linear(config.d_inner, config.d_model)
        self.activation = activation
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, fused: bool = False) -> Tensor:
        """(B, N, D) -> (B, N, D). With `fused`, GELU and dropout run as one Triton kernel in training."""
        return self.outer(self._activate(self.inner(x), fused))

    def _activate(self, x: Tensor, fused: bool) -> Tensor:
        has_dropout = self.training and self.dropout.p > 0  # without dropout, torch's GELU is one pass, too
        if fused and has_dropout and self.activation is gelu:
            from xlpre.model.kernels.triton.fused_ops import gelu_dropout

            return gelu_dropout(x, self.dropout.p)
        return self.dropout(self.activation(x))


class GatedFeedForward(nn.Module):
    """Gated layer D -> F' -> D: one projection is multiplied by the activation of another projection.

    With F' = 2F/3, it has as many parameters as a plain layer of width F.
    """

    def __init__(self, config: ModelConfig, activation: Activation) -> None:
        super().__init__()
        width = gated_width(config)
        self.gate = nn.Linear(config.d_model, width)
        self.inner = nn.Linear(config.d_model, width)
        self.outer = nn.Linear(width, config.d_model)
        self.activation = activation
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, fused: bool = False) -> Tensor:
        """(B, N, D) -> (B, N, D). There is no fused kernel, so `fused` has no effect."""
        return self.outer(self.dropout(self.activation(self.gate(x)) * self.inner(x)))
