"""Attention as the paper writes it: every score, its softmax, the mean of the values. Slow and plain; what all others must equal."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from xlpre.model.attention_mask import AttentionMeta
from xlpre.model.score_terms import ScoreTerms


class Reference:
    """Runs everywhere, in every precision; the softmax is taken in fp32."""

    def prepare(self, geometry: AttentionMeta, like: Tensor) -> tuple[Tensor, Tensor]:
        """Which keys each row sees, and where segments differ, both (B, 1, N, K) bool."""
        return geometry.visible()[:, None], geometry.different()[:, None]

    def attend(self, scores: ScoreTerms, key: Tensor, value: Tensor, geometry: AttentionMeta, dropout: float) -> Tensor:
        """See Backend."""
        visible, different = geometry.prepared
        score = torch.einsum("bnhe,bkhe->bhnk", scores.with_bias(scores.content_bias), key)
        if scores.pos_key is not None:
            score = score + geometry.align(by_distance(scores, geometry))
        if scores.step is not None:
            step = (scores.with_bias(scores.step_bias) * scores.step).sum(-1).transpose(1, 2)
            score = score + step[..., None] * different
        score = score.masked_fill(~visible, torch.finfo(score.dtype).min)
        probability = score.softmax(-1, dtype=torch.float32) * visible.any(
            -1, keepdim=True
        )  # a row that sees nothing gives 0
        return torch.einsum("bhnk,bkhe->bnhe", F.dropout(probability.to(value.dtype), dropout), value)


def by_distance(scores: ScoreTerms, geometry: AttentionMeta) -> Tensor:
    """Position scores (B, H, N, R)."""
    keys = scores.pos_key[geometry.direction]  # type: ignore[index]  # (B, R, H, E)
    found = torch.einsum("bnhe,brhe->bhnr", scores.with_bias(scores.place_bias), keys)
    if scores.pos_offset is None:
        return found
    return found + scores.scale * scores.pos_offset[geometry.direction].transpose(1, 2)[:, :, None]
