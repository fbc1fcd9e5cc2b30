"""The protocol of an objective: windows go in, the rows of a batch come out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from xlpre.config.schema_docs import check_choices
from xlpre.data.rng import RowRng
from xlpre.data.window_layout import Windows

HIDDEN = np.iinfo(np.int32).max  # the rank of a key that nothing may see


@dataclass(frozen=True)
class ObjectiveConfig:
    """What to predict.

    Attributes:
        name: `permutation` (XLNet), `denoising` (BERT's, on this backbone), `causal` (Transformer-XL).
        partial_k: K; one token in K is a target.
        perm_size: the factorization order is drawn within chunks of so many tokens; null: a half of the window.
        max_span: targets come in spans of 1 to `max_span` words, a span of n with probability proportional to 1/n.
        span_ends: `whole_words`: a span ends where its last word does. `as_released`: it has as many pieces as words were
            drawn, as the published code does (its author: not intended), so that it may end inside a word.
        next_sentence: `<cls>` also predicts whether segment B follows A, and that loss is added (BERT's; XLNet's Table 6, row 8).
    """

    name: Literal["permutation", "denoising", "causal"] = "permutation"
    partial_k: float = 6.0
    perm_size: int | None = None
    max_span: int = 5
    span_ends: Literal["whole_words", "as_released"] = "whole_words"
    next_sentence: bool = False

    def __post_init__(self) -> None:
        check_choices(self, "objective.")
        if self.partial_k < 1 or self.max_span < 1 or (self.perm_size is not None and self.perm_size < 1):
            raise ValueError(
                f"objective.partial_k ({self.partial_k}), objective.max_span ({self.max_span}) and objective.perm_size "
                f"({self.perm_size}) must be at least 1; max_span=1 predicts single words"
            )
        if self.next_sentence and self.name == "causal":
            raise ValueError(
                "objective.next_sentence asks whether segment B follows A, and objective.name=causal reads plain text, which has none; "
                "take objective.name=permutation or denoising, or leave out objective.next_sentence"
            )


@dataclass(frozen=True)
class Examples:
    """What an objective says of B windows, as numpy; fields as in Batch.

    Attributes:
        input_ids: (B, T) int64.
        query_rank: (B, T) int32.
        key_rank: (B, T) int32.
        target_positions: (B, P) int64, increasing in each row.
        targets: (B, P) int64.
    """

    input_ids: np.ndarray
    query_rank: np.ndarray
    key_rank: np.ndarray
    target_positions: np.ndarray
    targets: np.ndarray


class Objective(Protocol):
    """What turns windows into examples.

    Attributes:
        two_streams: whether predictions are read from the query stream (which sees not the token at its own place), or from
            the content stream.
        sees_ahead: whether a token may see what stands after it; else none does.
        about: what it does, in a sentence for people.
    """

    two_streams: bool
    sees_ahead: bool
    about: str

    def __init__(self, config: ObjectiveConfig, starts_word: np.ndarray) -> None:
        """`starts_word` (V,) bool: the pieces with which words begin."""

    def n_targets(self, window: int, reuse_len: int) -> int:
        """P, of a window of so many tokens of which so many first are reused."""
        ...

    def examples(self, windows: Windows, rng: RowRng) -> Examples:
        """The examples of `windows`; every draw comes from `rng`."""
        ...
