"""The position-wise feed-forward layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from xlpre.model.config import ModelConfig

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": partial(F.gelu, approximate="tanh"), "relu": F.relu}


class FeedForward(nn.Module):
    """D -> F -> D with an activation between."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.inner = nn.Linear(config.d_model, config.d_inner)
        self.outer = nn.Linear(config.d_inner, config.d_model)
        self.activation = ACTIVATIONS[config.feed_forward]
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, D) -> (B, N, D)."""
        return self.dropout(self.outer(self.dropout(self.activation(self.inner(x)))))
