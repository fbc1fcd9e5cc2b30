"""Next-sentence prediction from the hidden state of <cls>: does segment B follow segment A in the text?

Source: BERT (arXiv:1810.04805), section 3.1: a dense layer, tanh, and two classes. XLNet (arXiv:1906.08237) evaluates it in the last row of
its Table 6 and does not use it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from xlpre.model.config import ModelConfig
from xlpre.model.initialization import initialize_linear
from xlpre.model.lm_head import target_losses


class NextSentence(nn.Module):
    """Classify whether segment B follows segment A, from the hidden state of <cls>.

    Args:
        config: shape of the model.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dense, self.logits_proj = nn.Linear(config.d_model, config.d_model), nn.Linear(config.d_model, 2)
        for linear in (self.dense, self.logits_proj):
            initialize_linear(linear, config)

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        """Compute logits, or losses if labels are given.

        Args:
            hidden: (B, D).
            labels: (B,) int64, 1 if B follows A.

        Returns:
            (B, 2) logits, or (B,) float32 losses in nats.
        """
        logits = self.logits_proj(torch.tanh(self.dense(hidden)))
        return logits if labels is None else target_losses(logits, labels)
