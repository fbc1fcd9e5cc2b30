"""From hidden states to a distribution over the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class TiedSoftmax(nn.Module):
    """Logits with the embedding's own weights and a bias per piece (zihangdai/xlnet modeling.py `lm_loss`)."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(vocab_size))

    def forward(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        """(B, P, D) and (V, D) -> (B, P, V)."""
        return F.linear(hidden, embedding, self.bias)
