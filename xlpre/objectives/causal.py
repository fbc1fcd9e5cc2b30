"""Causal language modeling: every token is predicted from the tokens before it (Transformer-XL)."""

from __future__ import annotations

import numpy as np

from xlpre.data.rng import RowRng
from xlpre.data.window_layout import Windows
from xlpre.objectives.objective import ModelInputs, ObjectiveConfig


class Causal:
    """Objective where position t sees the tokens up to position t and predicts token t + 1, so P = T."""

    two_streams, sees_ahead = False, False
    description = "Each token is predicted from the tokens before it."

    def __init__(self, config: ObjectiveConfig, starts_word: np.ndarray) -> None:
        pass  # no settings

    def n_targets(self, seq_len: int, reuse_len: int) -> int:
        """Return `seq_len`: every token is a target."""
        return seq_len

    def build_inputs(self, windows: Windows, rng: RowRng) -> ModelInputs:
        """Build the inputs of plain windows. `rng` is not used."""
        rows, length = windows.ids.shape
        positions = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
        return ModelInputs(
            input_ids=windows.ids,
            query_rank=positions + 1,
            key_rank=positions,
            target_positions=positions.astype(np.int64),
            targets=np.concatenate([windows.ids[:, 1:], windows.following[:, None]], axis=1),
        )
