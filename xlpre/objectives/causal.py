"""Causal language modeling: every token is predicted from the tokens before it (Transformer-XL)."""

from __future__ import annotations

import numpy as np

from xlpre.data.rng import RowRng
from xlpre.data.window_layout import Windows
from xlpre.objectives.objective import ModelInputs, ObjectiveConfig


class Causal:
    """Objective where position t sees the tokens up to position t and predicts token t + 1.

    P is T, or the length of the second half of the window if `objective.loss_on` is `second_half`.
    """

    two_streams, sees_ahead = False, False
    description = "Each token is predicted from the tokens before it."

    def __init__(self, config: ObjectiveConfig, starts_word: np.ndarray) -> None:
        self._loss_on = config.loss_on

    def n_targets(self, seq_len: int, reuse_len: int) -> int:
        """Return P, the number of positions with a target."""
        return seq_len - self._first_target(seq_len)

    def build_inputs(self, windows: Windows, rng: RowRng) -> ModelInputs:
        """Build the inputs of plain windows. `rng` is not used."""
        rows, length = windows.ids.shape
        positions = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
        first, next_ids = self._first_target(length), np.append(windows.ids[:, 1:], windows.following[:, None], axis=1)
        return ModelInputs(
            input_ids=windows.ids,
            query_rank=positions + 1,
            key_rank=positions,
            target_positions=positions[:, first:].astype(np.int64),
            targets=next_ids[:, first:],
        )

    def _first_target(self, seq_len: int) -> int:
        """Return the first position with a target."""
        return seq_len // 2 if self._loss_on == "second_half" else 0
