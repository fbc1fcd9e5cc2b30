"""Causal language modelling: every token from those before it (Transformer-XL)."""

from __future__ import annotations

import numpy as np

from xlpre.data.rng import RowRng
from xlpre.data.window_layout import Windows
from xlpre.objectives.objective import Examples, ObjectiveConfig


class Causal:
    """Position t sees keys up to itself and predicts the token after it; P = T."""

    two_streams, sees_ahead = False, False
    about = "Each token is predicted from those before it."

    def __init__(self, config: ObjectiveConfig, starts_word: np.ndarray) -> None:
        pass  # there is nothing to choose

    def n_targets(self, window: int, reuse_len: int) -> int:
        """All of them."""
        return window

    def examples(self, windows: Windows, rng: RowRng) -> Examples:
        """The examples of plain windows; nothing is drawn."""
        rows, length = windows.ids.shape
        places = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
        return Examples(
            input_ids=windows.ids,
            query_rank=places + 1,
            key_rank=places,
            target_positions=places.astype(np.int64),
            targets=np.concatenate([windows.ids[:, 1:], windows.following[:, None]], axis=1),
        )
