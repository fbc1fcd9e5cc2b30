"""Attention by torch's scaled_dot_product_attention. Position scores, segment scores and mask are its additive bias."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from xlpre.model.attention_mask import AttentionMeta
from xlpre.model.kernels.base import AttentionBackend
from xlpre.model.kernels.reference import position_scores, segment_scores
from xlpre.model.score_terms import ScoreTerms


@dataclass(frozen=True, eq=False)
class SdpaBackend(AttentionBackend):
    """Attention by torch's operator, on any device.

    The bias (B, H, N, K) is stored in memory. The probabilities are stored, too, unless torch has a fused kernel.

    Attributes:
        visible: (B, 1, N, K) bool attention mask.
        segments_differ: (B, 1, N, K) bool, True where query row and key belong to different segments.
        sees_any: (B, N, 1, 1) bool, True for query rows that see at least one key.
    """

    visible: Tensor
    segments_differ: Tensor
    sees_any: Tensor

    @classmethod
    def prepare(cls, attn_meta: AttentionMeta, dtype: torch.dtype) -> SdpaBackend:
        """Compute the masks, see AttentionBackend."""
        visible = attn_meta.visible()
        sees_any = visible.any(-1)[..., None, None]
        return cls(attn_meta, visible[:, None], attn_meta.segments_differ()[:, None], sees_any)

    def attend(self, terms: ScoreTerms, key: Tensor, value: Tensor, dropout: float) -> Tensor:
        """Compute attention, see AttentionBackend."""
        query = terms.with_bias(terms.r_w_bias)
        bias = query.new_zeros(1).expand(self.visible.size(0), query.size(2), *self.visible.shape[2:])
        if terms.pos_key is not None:
            bias = self.attn_meta.rel_shift(position_scores(terms, self.attn_meta))
        if terms.segment_diff is not None:
            bias = bias + segment_scores(terms)[..., None] * self.segments_differ
        # half of the minimum, because GPU kernels multiply the bias by log2(e), and the minimum would overflow
        bias = bias.masked_fill(~self.visible, torch.finfo(bias.dtype).min / 2)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=dropout, scale=1.0)
        return out.transpose(1, 2) * self.sees_any
