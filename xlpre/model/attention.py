"""Relative attention of content and query rows over memory and content (XLNet section 2.3 and 2.4)."""

from __future__ import annotations

from torch import Tensor, nn

from xlpre.model.attention_mask import AttentionMeta
from xlpre.model.config import ModelConfig
from xlpre.model.kernels.backend import backend_named
from xlpre.model.positions import SCHEMES, SharedBiases
from xlpre.model.score_terms import ScoreTerms
from xlpre.model.segments import SegmentTerm


class RelativeAttention(nn.Module):
    """Multi-head attention whose scores are a sum of terms.

    Args:
        config: the model's shape.
        shared: biases of terms (XLNet's r_w_bias, r_r_bias, r_s_bias) that all layers share; None for one of this layer's own.
    """

    def __init__(self, config: ModelConfig, shared: SharedBiases) -> None:
        super().__init__()
        self.n_head, self.d_head = config.n_head, config.head_width
        width = self.n_head * self.d_head
        self.query = nn.Linear(config.d_model, width, bias=False)
        self.key = nn.Linear(config.d_model, width, bias=False)
        self.value = nn.Linear(config.d_model, width, bias=False)
        self.output = nn.Linear(width, config.d_model, bias=False)
        self.terms = nn.ModuleDict(SCHEMES[config.positions].terms(config, shared))
        if config.relative_segments:
            self.terms["segment"] = SegmentTerm(self.n_head, self.d_head, shared["segment"])
        self.backend, self.dropatt = backend_named(config.attention_backend), config.dropatt

    def keys_values(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, (B, M, H, E) each, of hidden states (B, M, D)."""
        states = states.contiguous()  # else each product would copy and keep them
        return self._heads(self.key(states)), self._heads(self.value(states))

    def forward(self, rows: Tensor, key: Tensor, value: Tensor, attn_meta: AttentionMeta) -> Tensor:
        """Attend from N rows to K keys.

        Args:
            rows: (B, N, D).
            key: (B, K, H, E), of memory, then of the content stream.
            value: (B, K, H, E).
            geometry: of these rows.

        Returns:
            (B, N, D).
        """
        # under torch.autocast products are of another type than biases
        query = self._heads(self.query(rows)).to(key.dtype)
        parts = {name: x.to(key.dtype) for term in self.terms.values() for name, x in term(attn_meta).items()}
        scores = ScoreTerms(query, self.d_head**-0.5, **parts)
        dropout = self.dropatt if self.training else 0.0
        return self.output(self.backend.attend(scores, key, value, attn_meta, dropout).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.n_head, self.d_head)
