"""Causal language modelling: every token from those before it (Transformer-XL)."""

from __future__ import annotations

import numpy as np

from xlpre.data.layout import Window
from xlpre.objectives.objective import Example, ObjectiveConfig


class Causal:
    """Position t sees keys up to itself and predicts the token after it; P = T."""

    two_streams = False

    def __init__(self, config: ObjectiveConfig, starts_word: np.ndarray) -> None:
        pass  # there is nothing to choose

    def example(self, window: Window, rng: np.random.Generator) -> Example:
        """The example of a plain window; nothing is drawn."""
        places = np.arange(len(window.ids), dtype=np.int32)
        return Example(
            input_ids=window.ids,
            query_rank=places + 1,
            key_rank=places,
            target_positions=places.astype(np.int64),
            targets=np.append(window.ids[1:], window.following),
        )
