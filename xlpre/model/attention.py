"""Relative attention of content and query rows over memory and content (XLNet, sections 2.3 and 2.4)."""

from __future__ import annotations

from torch import Tensor, nn

from xlpre.model.attention_mask import AttentionMeta
from xlpre.model.config import ModelConfig
from xlpre.model.kernels.base import AttentionBackend
from xlpre.model.positions import SCHEMES, SharedBiases
from xlpre.model.score_terms import ScoreTerms
from xlpre.model.segments import SegmentTerm


class RelativeAttention(nn.Module):
    """Multi-head attention whose scores are a sum of terms.

    Args:
        config: shape of the model.
        shared: score biases that all layers share (XLNet's r_w_bias, r_r_bias, r_s_bias), by name of the term. None creates a bias for
            this layer only.
    """

    def __init__(self, config: ModelConfig, shared: SharedBiases) -> None:
        super().__init__()
        self.n_head, self.d_head = config.n_head, config.head_width
        width = self.n_head * self.d_head
        self.query = nn.Linear(config.d_model, width, bias=False)
        self.key = nn.Linear(config.d_model, width, bias=False)
        self.value = nn.Linear(config.d_model, width, bias=False)
        self.output = nn.Linear(width, config.d_model, bias=False)
        self.query_norm, self.key_norm = (
            nn.LayerNorm(self.d_head, eps=config.norm_eps) if config.qk_norm else nn.Identity() for _ in range(2)
        )
        self.terms = nn.ModuleDict(SCHEMES[config.positions].terms(config, shared))
        if config.relative_segments:
            self.terms["segment"] = SegmentTerm(self.n_head, self.d_head, shared["segment"])
        self.dropatt = config.dropatt

    def keys_values(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Project hidden states (B, n, D), of memory or of content, to keys and values, (B, n, H, E) each."""
        hidden = hidden.contiguous()  # otherwise both products would copy it and save the copy for their backward pass
        value = self._split_heads(self.value(hidden))
        # under torch.autocast, the result of a norm has another dtype than that of a product
        return self.key_norm(self._split_heads(self.key(hidden))).to(value.dtype), value

    def score_terms(self, pos_encoding: Tensor, n_keys: int) -> dict[str, Tensor]:
        """Return the fields of `ScoreTerms` that do not depend on the query rows.

        Args:
            pos_encoding: (2, R, ...) encodings of all distances.
            n_keys: K.
        """
        return {name: x for term in self.terms.values() for name, x in term(pos_encoding, n_keys).items()}

    def forward(
        self,
        rows: Tensor,
        key: Tensor,
        value: Tensor,
        backend: AttentionBackend,
        score_terms: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """Attend from N query rows to K keys.

        Args:
            rows: (B, N, D).
            key: (B, K, H, E), memory first.
            value: (B, K, H, E).
            backend: attention backend, prepared for these rows.
            score_terms: result of the method `score_terms`, if it was computed before.

        Returns:
            (B, N, D).
        """
        scores = self.scores(rows, key, backend.attn_meta, score_terms)
        dropout = self.dropatt if self.training else 0.0
        return self.output(backend.attend(scores, key, value, dropout).flatten(2))

    def scores(
        self, rows: Tensor, key: Tensor, attn_meta: AttentionMeta, score_terms: dict[str, Tensor] | None = None
    ) -> ScoreTerms:
        """Return the terms of the scores of N query rows (B, N, D). For the other arguments, see `forward`."""
        if score_terms is None:
            score_terms = self.score_terms(attn_meta.pos_encoding, attn_meta.n_keys)
        # under torch.autocast, the results of products have another dtype than the biases
        query = self.query_norm(self._split_heads(self.query(rows))).to(key.dtype)
        return ScoreTerms(query, self.d_head**-0.5, **{name: x.to(key.dtype) for name, x in score_terms.items()})

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.n_head, self.d_head)
