"""From hidden states to a distribution over the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class TiedSoftmax(nn.Module):
    """Logits with the embedding's own weights and a bias per piece (zihangdai/xlnet modeling.py `lm_loss`).

    The weight is a parameter of both modules, so that whatever gathers a module's parameters finds it here too.
    """

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight
        self.bias = nn.Parameter(torch.zeros(embedding.num_embeddings))

    def forward(self, hidden: Tensor) -> Tensor:
        """(B, P, D) -> (B, P, V)."""
        return F.linear(hidden, self.weight, self.bias)
