"""Denoising, BERT's objective on this backbone: the same targets, hidden in the input, predicted independently.

Source: BERT (arXiv:1810.04805) section 3.1: of the targets 80 % are replaced by <mask>, 10 % by a random piece, 10 % kept. XLNet's
ablation table calls it "DAE + Transformer-XL".
"""

from __future__ import annotations

import numpy as np

from xlpre.data.layout import Window
from xlpre.objectives.objective import Example, ObjectiveConfig
from xlpre.objectives.spans import SpanSampler
from xlpre.text import symbols


class Denoising:
    """Every token sees every token; the reused part does not see the rest, which is not there when it becomes memory."""

    two_streams = False

    def __init__(self, config: ObjectiveConfig, starts_word: np.ndarray) -> None:
        self._spans = SpanSampler(config, starts_word)
        self._vocab_size = len(starts_word)

    def example(self, window: Window, rng: np.random.Generator) -> Example:
        """Draw targets for `window` (the same as permutation would with this `rng`) and hide them."""
        positions = np.flatnonzero(self._spans.targets_of(window, rng))
        targets = window.ids[positions]
        fate = rng.random(len(positions))
        random_piece = rng.integers(len(symbols.PIECES), self._vocab_size, len(positions))
        hidden = np.where(fate < 0.8, symbols.MASK, np.where(fate < 0.9, random_piece, targets))
        input_ids = window.ids.copy()
        input_ids[positions] = hidden
        key_rank = np.where(np.arange(len(input_ids)) < window.reuse_len, 0, 1).astype(np.int32)
        return Example(
            input_ids=input_ids,
            query_rank=key_rank + 1,
            key_rank=key_rank,
            target_positions=positions,
            targets=targets,
        )
