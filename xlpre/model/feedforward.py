"""The position-wise feed-forward layer, plain or gated (Shazeer 2020, "GLU Variants Improve Transformer", arXiv:2002.05202)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from xlpre.model.config import ModelConfig
from xlpre.model.dropout import Dropout

Activation = Callable[[Tensor], Tensor]
gelu_of_torch: Activation = partial(F.gelu, approximate="tanh")


def gelu(x: Tensor) -> Tensor:
    """The tanh approximation of GELU (Hendrycks and Gimpel 2016, arXiv:1606.08415), of any shape."""
    by_hand = x.device.type in ("cpu", "meta") and x.dtype == torch.float32 and not torch.compiler.is_compiling()
    return _Gelu.apply(x) if by_hand else gelu_of_torch(x)


class _Gelu(torch.autograd.Function):
    """x s with s = sigmoid(w), w = 2 sqrt(2 / pi) (x + 0.044715 x^3), which is x (1 + tanh(w / 2)) / 2.

    torch's sigmoid takes a third of its tanh's time on a processor. The slope is made with the output, where it is asked for, and
    kept in place of x:

        s + s (1 - s) x dw/dx        x dw/dx = 3 (w - 2 / 3 * 2 sqrt(2 / pi) x)

    PIECE elements at a time, so that what is between stays in the cache.
    """

    PIECE = 1 << 16
    LINEAR = 2 * math.sqrt(2 / math.pi)
    CUBIC = 0.044715 * LINEAR

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        y, linear, learns = torch.empty_like(x), x.new_tensor(_Gelu.LINEAR), ctx.needs_input_grad[0]
        slope = torch.empty_like(x) if learns else y
        for x_, y_, slope_ in zip(*(whole.view(-1).split(_Gelu.PIECE) for whole in (x, y, slope)), strict=True):
            w = torch.addcmul(linear, x_, x_, value=_Gelu.CUBIC).mul_(x_)
            s = w.sigmoid()
            torch.mul(x_, s, out=y_)
            if not learns:
                continue
            w.add_(x_, alpha=-2 / 3 * _Gelu.LINEAR)
            torch.ops.aten.sigmoid_backward.grad_input(w, s, grad_input=w)
            torch.add(s, w, alpha=3, out=slope_)
        if learns:
            ctx.save_for_backward(slope)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0]


PLAIN: dict[str, Activation] = {"gelu": gelu, "relu": F.relu}
GATED: dict[str, Activation] = {"glu": torch.sigmoid, "reglu": F.relu, "geglu": gelu, "swiglu": F.silu}


def build_feed_forward(config: ModelConfig) -> nn.Module:
    """The feed-forward layer that `config` names."""
    if config.feed_forward in GATED:
        return GatedFeedForward(config, GATED[config.feed_forward])
    return FeedForward(config, PLAIN[config.feed_forward])


def gated_width(config: ModelConfig) -> int:
    """F' of a gated layer."""
    return max(2 * config.d_inner // 3, 1)


class FeedForward(nn.Module):
    """D -> F -> D with an activation between."""

    def __init__(self, config: ModelConfig, activation: Activation) -> None:
        super().__init__()
        self.inner = nn.Linear(config.d_model, config.d_inner)
        self.outer = nn.Linear(config.d_inner, config.d_model)
        self.activation = activation
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, D) -> (B, N, D)."""
        return self.dropout(self.outer(self.dropout(self.activation(self.inner(x)))))


class GatedFeedForward(nn.Module):
    """D -> F' -> D, where one projection gates another; F' is 2F/3, so that its three matrices weigh as much as two of width F."""

    def __init__(self, config: ModelConfig, activation: Activation) -> None:
        super().__init__()
        width = gated_width(config)
        self.gate = nn.Linear(config.d_model, width)
        self.inner = nn.Linear(config.d_model, width)
        self.outer = nn.Linear(width, config.d_model)
        self.activation = activation
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, D) -> (B, N, D)."""
        return self.dropout(self.outer(self.dropout(self.activation(self.gate(x)) * self.inner(x))))
