"""Relative segment encoding: same segment or different segment (XLNet, section 2.5)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from xlpre.model.score_terms import BiasedTerm


class SegmentTerm(BiasedTerm):
    """(q + r_s) . s[same or different].

    Softmax ignores a constant that is added to all scores of a query. So the score of "same" is subtracted from all of them. Keys in the
    segment of the query then get 0, and keys in another segment get the difference of both scores.
    """

    def __init__(self, n_head: int, d_head: int, r_bias: nn.Parameter | None) -> None:
        super().__init__(n_head, d_head, r_bias)
        self.seg_embed = nn.Parameter(torch.empty(2, n_head, d_head))  # same, different

    def forward(self, pos_encoding: Tensor, n_keys: int) -> dict[str, Tensor]:
        """Return the bias and the difference of the two segment embeddings."""
        return {"r_s_bias": self.r_bias, "segment_diff": self.seg_embed[1] - self.seg_embed[0]}
