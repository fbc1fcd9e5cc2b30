"""Pooling of the hidden states of a sequence into one vector (zihangdai/xlnet modeling.py `summarize_sequence`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from xlpre.model.config import ModelConfig
from xlpre.model.dropout import Dropout
from xlpre.model.initialization import initialize_linear

Pooling = Literal["last", "first", "mean", "text_mean", "attn"]


class SequenceSummary(nn.Module):
    """Pool a sequence into one vector: the hidden state of its last token (<cls>) or first token, a mean, or learned attention.

    Args:
        config: shape of the model.
        pooling: kind of pooling. `mean` includes padding, as in the original; `text_mean` does not.
        project: apply a dense layer and tanh.
    """

    def __init__(self, config: ModelConfig, pooling: Pooling = "last", project: bool = True) -> None:
        super().__init__()
        self.pooling = pooling
        self.pool = _Attention(config) if pooling == "attn" else POOLS[pooling]
        self.dense = nn.Linear(config.d_model, config.d_model) if project else nn.Identity()
        self.activation = nn.Tanh() if project else nn.Identity()
        self.dropout = Dropout(config.dropout)
        initialize_linear(self.dense, config)

    def positions(self, n_rows: int, length: int, device: torch.device | str = "cpu") -> Tensor:
        """Return the positions whose hidden states are needed, (B, P) int64.

        P is 1 for `last` and `first`, otherwise `length`.
        """
        start, end = {"last": (length - 1, length), "first": (0, 1)}.get(self.pooling, (0, length))
        return torch.arange(start, end, device=device).expand(n_rows, -1)

    def forward(self, hidden: Tensor, padding: Tensor) -> Tensor:
        """Pool hidden states.

        Args:
            hidden: (B, P, D), at `positions`.
            padding: (B, T) bool, True at padding.

        Returns:
            (B, D).
        """
        return self.dropout(self.activation(self.dense(self.pool(hidden, padding))))


def _text_mean(hidden: Tensor, padding: Tensor) -> Tensor:
    weight = (~padding).to(hidden.dtype)[:, :, None]
    return (hidden * weight).sum(1) / weight.sum(1)


class _Attention(nn.Module):
    """Attention of a learned query to all tokens but padding. The output is normalized without a residual connection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_head, width = config.n_head, config.n_head * config.head_width
        self.start = nn.Parameter(torch.empty(config.d_model))
        self.query = nn.Linear(config.d_model, width, bias=False)
        self.key = nn.Linear(config.d_model, width, bias=False)
        self.value = nn.Linear(config.d_model, width, bias=False)
        self.output = nn.Linear(width, config.d_model, bias=False)
        self.norm = nn.LayerNorm(config.d_model, eps=config.norm_eps)
        self.dropatt, self.dropout = config.dropatt, Dropout(config.dropout)
        nn.init.normal_(self.start, std=config.init_std)
        for linear in (self.query, self.key, self.value, self.output):
            initialize_linear(linear, config)

    def forward(self, hidden: Tensor, padding: Tensor) -> Tensor:
        query = self._split_heads(self.query(self.start).expand(len(hidden), 1, -1))
        key, value = self._split_heads(self.key(hidden)), self._split_heads(self.value(hidden))
        p = self.dropatt if self.training else 0.0
        pooled = F.scaled_dot_product_attention(query, key, value, ~padding[:, None, None], dropout_p=p)  # (B, H, 1, E)
        return self.norm(self.dropout(self.output(pooled.transpose(1, 2).flatten(2))))[:, 0]

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.n_head, -1).transpose(1, 2)


POOLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "last": lambda hidden, padding: hidden[:, -1],
    "first": lambda hidden, padding: hidden[:, 0],
    "mean": lambda hidden, padding: hidden.mean(1),
    "text_mean": _text_mean,
}
