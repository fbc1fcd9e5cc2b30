"""Interface of the attention backends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from xlpre.model.attention_mask import AttentionMeta
from xlpre.model.score_terms import ScoreTerms


@dataclass(frozen=True, eq=False)
class AttentionBackend(ABC):
    """Relative attention of the query rows of one forward pass.

    `prepare` converts the metadata of the query rows once per forward pass. All layers share the result.

    Attributes:
        attn_meta: metadata of the query rows.
        has_fused_ops: True if add-norm and GELU-dropout also run as fused kernels (kernels/triton/fused_ops.py).
    """

    attn_meta: AttentionMeta
    has_fused_ops: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def prepare(cls, attn_meta: AttentionMeta, dtype: torch.dtype) -> AttentionBackend:
        """Build the backend for the query rows of a forward pass.

        Args:
            attn_meta: metadata of the rows.
            dtype: dtype of queries, keys and values.

        Raises:
            InputError: the backend does not support the device or the dtype.
        """

    @abstractmethod
    def attend(self, terms: ScoreTerms, key: Tensor, value: Tensor, dropout: float) -> Tensor:
        """Average the values with softmax(score) as weights.

        Args:
            terms: terms of the scores.
            key: (B, K, H, E). It need not be contiguous.
            value: (B, K, H, E).
            dropout: probability of zeroing an attention weight. The other weights are scaled by 1 / (1 - dropout).

        Returns:
            (B, N, H, E). A query row that sees no key gets zeros.
        """
