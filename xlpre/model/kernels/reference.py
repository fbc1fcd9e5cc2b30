"""Reference attention, as the paper defines it: all scores, their softmax, the weighted mean of the values.

It is slow and simple. All other backends must give the same results.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from xlpre.model.attention_mask import AttentionMeta
from xlpre.model.kernels.base import AttentionBackend
from xlpre.model.score_terms import ScoreTerms


@dataclass(frozen=True, eq=False)
class ReferenceBackend(AttentionBackend):
    """Plain attention on any device and in any dtype. The softmax is computed in fp32 or wider.

    Attributes:
        visible: (B, 1, N, K) bool attention mask.
        segments_differ: (B, 1, N, K) bool, True where query row and key belong to different segments.
    """

    visible: Tensor
    segments_differ: Tensor

    @classmethod
    def prepare(cls, attn_meta: AttentionMeta, dtype: torch.dtype) -> ReferenceBackend:
        """Compute the masks, see AttentionBackend."""
        return cls(attn_meta, attn_meta.visible()[:, None], attn_meta.segments_differ()[:, None])

    def attend(self, terms: ScoreTerms, key: Tensor, value: Tensor, dropout: float) -> Tensor:
        """Compute attention, see AttentionBackend."""
        probability = self.probabilities(terms, key)
        return torch.einsum("bhnk,bkhe->bnhe", F.dropout(probability.to(value.dtype), dropout), value)

    def probabilities(self, terms: ScoreTerms, key: Tensor) -> Tensor:
        """Return the attention probabilities, (B, H, N, K) in fp32 or wider. For the arguments, see `attend`."""
        score = torch.einsum("bnhe,bkhe->bhnk", terms.with_bias(terms.r_w_bias), key)
        if terms.pos_key is not None:
            score = score + self.attn_meta.rel_shift(position_scores(terms, self.attn_meta))
        if terms.segment_diff is not None:
            score = score + segment_scores(terms)[..., None] * self.segments_differ
        score = score.masked_fill(~self.visible, torch.finfo(score.dtype).min)
        sees_any = self.visible.any(-1, keepdim=True)  # a row that sees no key gets zeros
        return score.softmax(-1, dtype=torch.promote_types(score.dtype, torch.float32)) * sees_any


def position_scores(terms: ScoreTerms, attn_meta: AttentionMeta) -> Tensor:
    """Return position scores by distance, (B, H, N, R)."""
    assert terms.pos_key is not None
    pos_key = terms.pos_key[attn_meta.direction]  # (B, R, H, E)
    score = torch.einsum("bnhe,brhe->bhnr", terms.with_bias(terms.r_r_bias), pos_key)
    if terms.pos_offset is None:
        return score
    return score + terms.scale * terms.pos_offset[attn_meta.direction].transpose(1, 2)[:, :, None]


def segment_scores(terms: ScoreTerms) -> Tensor:
    """Return the scores (B, H, N) that are added for keys of another segment."""
    assert terms.segment_diff is not None
    return (terms.with_bias(terms.r_s_bias) * terms.segment_diff).sum(-1).transpose(1, 2)
