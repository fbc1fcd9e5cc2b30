"""Attention by torch's scaled_dot_product_attention: position, segment and visibility are one bias that is added to its scores."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from xlpre.model.attention_mask import AttentionMeta
from xlpre.model.kernels.reference import by_distance
from xlpre.model.score_terms import ScoreTerms


class Sdpa:
    """Runs everywhere; the bias, (B, H, N, K), is in memory, the probabilities are not where torch has a kernel for that."""

    def prepare(self, geometry: AttentionMeta, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Which keys each row sees, where segments differ (B, 1, N, K) bool, and which rows see any (B, N, 1, 1)."""
        visible = geometry.visible()
        return visible[:, None], geometry.different()[:, None], visible.any(-1)[..., None, None]

    def attend(self, scores: ScoreTerms, key: Tensor, value: Tensor, geometry: AttentionMeta, dropout: float) -> Tensor:
        """See Backend."""
        visible, different, sees = geometry.prepared
        query = scores.with_bias(scores.content_bias)
        bias = query.new_zeros(1).expand(visible.size(0), query.size(2), *visible.shape[2:])
        if scores.pos_key is not None:
            bias = geometry.align(by_distance(scores, geometry))
        if scores.step is not None:
            step = (scores.with_bias(scores.step_bias) * scores.step).sum(-1).transpose(1, 2)
            bias = bias + step[..., None] * different
        bias = bias.masked_fill(~visible, torch.finfo(bias.dtype).min / 2)  # kernels for GPUs multiply it by log2(e)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        seen = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=dropout, scale=1.0)
        return seen.transpose(1, 2) * sees
