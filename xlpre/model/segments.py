"""Relative segments: whether query and key are in the same segment, not which one (XLNet section 2.5)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from xlpre.model.attention_mask import AttentionMeta
from xlpre.model.score_terms import BiasedTerm


class SegmentTerm(BiasedTerm):
    """(q + r_s) . s[same or different].

    Softmax does not notice a constant added to a whole row, so the score of "same" is subtracted from both: what remains is one
    number a row, added where segments differ.
    """

    def __init__(self, n_head: int, d_head: int, r_bias: nn.Parameter | None) -> None:
        super().__init__(n_head, d_head, r_bias)
        self.seg_embed = nn.Parameter(torch.empty(2, n_head, d_head))

    def forward(self, attn_meta: AttentionMeta) -> dict[str, Tensor]:
        """Its bias, and the difference of its two vectors."""
        return {"r_s_bias": self.r_bias, "segment_diff": self.seg_embed[1] - self.seg_embed[0]}
