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

    def prepare(self, attn_meta: AttentionMeta, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Which keys each row sees, where segments differ (B, 1, N, K) bool, and which rows see any (B, N, 1, 1)."""
        visible = attn_meta.visible()
        return visible[:, None], attn_meta.segments_differ()[:, None], visible.any(-1)[..., None, None]

    def attend(self, scores: ScoreTerms, key: Tensor, value: Tensor, attn_meta: AttentionMeta, dropout: float) -> Tensor:
        """See Backend."""
        visible, different, sees = attn_meta.prepared
        query = scores.with_bias(scores.r_w_bias)
        bias = query.new_zeros(1).expand(visible.size(0), query.size(2), *visible.shape[2:])
        if scores.pos_key is not None:
            bias = attn_meta.rel_shift(by_distance(scores, attn_meta))
        if scores.segment_diff is not None:
            step = (scores.with_bias(scores.r_s_bias) * scores.segment_diff).sum(-1).transpose(1, 2)
            bias = bias + step[..., None] * different
        bias = bias.masked_fill(~visible, torch.finfo(bias.dtype).min / 2)  # kernels for GPUs multiply it by log2(e)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        seen = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=dropout, scale=1.0)
        return seen.transpose(1, 2) * sees
