"""Attention as the paper writes it: every score, its softmax, the mean of the values. Slow and plain; what all others must equal."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from xlpre.model.attention_mask import AttentionMeta
from xlpre.model.score_terms import ScoreTerms


class Reference:
    """Runs everywhere, in every precision; the softmax is taken in fp32."""

    def prepare(self, attn_meta: AttentionMeta, like: Tensor) -> tuple[Tensor, Tensor]:
        """Which keys each row sees, and where segments differ, both (B, 1, N, K) bool."""
        return attn_meta.visible()[:, None], attn_meta.segments_differ()[:, None]

    def attend(self, scores: ScoreTerms, key: Tensor, value: Tensor, attn_meta: AttentionMeta, dropout: float) -> Tensor:
        """See Backend."""
        visible, different = attn_meta.prepared
        score = torch.einsum("bnhe,bkhe->bhnk", scores.with_bias(scores.r_w_bias), key)
        if scores.pos_key is not None:
            score = score + attn_meta.rel_shift(by_distance(scores, attn_meta))
        if scores.segment_diff is not None:
            step = (scores.with_bias(scores.r_s_bias) * scores.segment_diff).sum(-1).transpose(1, 2)
            score = score + step[..., None] * different
        score = score.masked_fill(~visible, torch.finfo(score.dtype).min)
        probability = score.softmax(-1, dtype=torch.float32) * visible.any(
            -1, keepdim=True
        )  # a row that sees nothing gives 0
        return torch.einsum("bhnk,bkhe->bnhe", F.dropout(probability.to(value.dtype), dropout), value)


def by_distance(scores: ScoreTerms, attn_meta: AttentionMeta) -> Tensor:
    """Position scores (B, H, N, R)."""
    keys = scores.pos_key[attn_meta.direction]  # type: ignore[index]  # (B, R, H, E)
    found = torch.einsum("bnhe,brhe->bhnr", scores.with_bias(scores.r_r_bias), keys)
    if scores.pos_offset is None:
        return found
    return found + scores.scale * scores.pos_offset[attn_meta.direction].transpose(1, 2)[:, :, None]
