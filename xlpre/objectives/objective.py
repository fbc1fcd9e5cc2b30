"""Interface of an objective, which turns windows of text into the inputs of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from xlpre.common.errors import InputError, check_minimum
from xlpre.config.schema_docs import check_choices
from xlpre.data.rng import RowRng
from xlpre.data.window_layout import Windows


@dataclass(frozen=True)
class ObjectiveConfig:
    """Pretraining objective and its targets.

    Attributes:
        name: `permutation` (XLNet), `denoising` (BERT's objective on this backbone), `causal` (Transformer-XL).
        partial_k: K, one token in K is a target.
        perm_size: number of tokens in a chunk, within which the factorization order is drawn. null: the reused part
            of the window is one chunk, and the rest another.
        max_span: targets come in spans of 1 to `max_span` words. A span of n words has probability proportional to 1/n.
        span_ends: where a span ends. `whole_words`: a span ends where its last word ends. `as_released`: a span of n words
            is n tokens long, as in the published code, so it may end inside a word.
        left_to_right: share of the windows of a permutation model that are predicted in reading direction instead of in a random order.
            Each token sees only the tokens before it, as with `causal`. Backward rows are read from right to left. Evaluation uses
            random orders.
        independent: share of the windows of a permutation model whose targets do not see each other, as with `denoising`.
        loss_on: positions of a causal window whose loss is minimized. `all`: every position. `second_half`: positions after the
            middle of the window, which have at least half a window of context ("half" in Transformer-XL's Table 6). Evaluation
            uses every position.
        next_sentence: add the loss of next-sentence prediction from `<cls>` (BERT; XLNet's Table 6, row 8).
    """

    name: Literal["permutation", "denoising", "causal"] = "permutation"
    partial_k: float = 6.0
    perm_size: int | None = None
    max_span: int = 5
    span_ends: Literal["whole_words", "as_released"] = "whole_words"
    left_to_right: float = 0.0
    independent: float = 0.0
    loss_on: Literal["all", "second_half"] = "all"
    next_sentence: bool = False

    def __post_init__(self) -> None:
        check_choices(self, "objective.")
        for name in ("partial_k", "max_span", "perm_size"):
            hint = "Set objective.max_span=1 to predict single words." if name == "max_span" else ""
            check_minimum(f"objective.{name}", getattr(self, name), 1, hint)
        for name in ("left_to_right", "independent"):
            if not 0 <= (share := getattr(self, name)) <= 1:
                raise InputError(f"objective.{name}={share} is invalid: it must be between 0 and 1.")
            if share and self.name != "permutation":
                raise InputError(
                    f"objective.{name}={share} is invalid with objective.name={self.name}: it changes factorization orders. "
                    f"Set objective.{name}=0, or objective.name=permutation."
                )
        if self.left_to_right + self.independent > 1:
            raise InputError(
                f"objective.independent={self.independent} is invalid with objective.left_to_right={self.left_to_right}: "
                "their sum must be at most 1. Lower one of them."
            )
        if self.loss_on != "all" and self.name != "causal":
            raise InputError(
                f"objective.loss_on={self.loss_on} is invalid with objective.name={self.name}: it selects positions of causal windows. "
                "Set objective.loss_on=all, or objective.name=causal."
            )
        if self.next_sentence and self.name == "causal":
            raise InputError(
                "objective.next_sentence=true is invalid with objective.name=causal: plain text has no segment B. "
                "Set objective.name=permutation or denoising, or objective.next_sentence=false."
            )


@dataclass(frozen=True)
class ModelInputs:
    """Output of an objective for B windows, as numpy arrays. The fields are explained at Batch, which has the same ones.

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
    """Objective: turns windows into model inputs.

    Attributes:
        two_streams: True if targets are predicted from the query stream, which does not see the token at its own position. False: they
            are predicted from the content stream.
        sees_ahead: True if a token may see later tokens of the window.
        description: one sentence that explains the objective to the user.
    """

    two_streams: bool
    sees_ahead: bool
    description: str

    def __init__(self, config: ObjectiveConfig, starts_word: np.ndarray) -> None:
        """Create the objective.

        Args:
            config: settings.
            starts_word: (V,) bool, True for tokens that start a word.
        """

    def n_targets(self, seq_len: int, reuse_len: int) -> int:
        """Return P, the number of targets of a row, for windows of `seq_len` tokens whose reused part has `reuse_len` tokens."""
        ...

    def build_inputs(self, windows: Windows, rng: RowRng) -> ModelInputs:
        """Build the inputs of `windows`. All random numbers come from `rng`."""
        ...
