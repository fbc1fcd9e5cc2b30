"""Next-sentence prediction: whether segment B follows A in the text, from the hidden state of <cls>.

Source: BERT (arXiv:1810.04805) section 3.1: a dense layer and tanh, then two classes. XLNet (arXiv:1906.08237) tries it in the
last row of its Table 6, and leaves it out.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from xlpre.model.config import ModelConfig
from xlpre.model.initialization import initialize_linear
from xlpre.model.lm_head import target_losses


class NextSentence(nn.Module):
    """The head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dense, self.logits_proj = nn.Linear(config.d_model, config.d_model), nn.Linear(config.d_model, 2)
        for linear in (self.dense, self.logits_proj):
            initialize_linear(linear, config)

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        """Of hidden states (B, D): logits (B, 2), or with `labels` (B,) int64 the loss of each row in nats, (B,) float32."""
        logits = self.logits_proj(torch.tanh(self.dense(hidden)))
        return logits if labels is None else target_losses(logits, labels)
