"""Denoising, BERT's objective on this backbone: the same targets, hidden in the input, predicted independently.

Source: BERT (arXiv:1810.04805) section 3.1: of the targets 80 % are replaced by <mask>, 10 % by a random piece, 10 % kept. XLNet's
ablation table calls it "DAE + Transformer-XL".
"""

from __future__ import annotations

import numpy as np

from xlpre.data.rng import RowRng
from xlpre.data.window_layout import Windows
from xlpre.objectives.objective import Examples, ObjectiveConfig
from xlpre.objectives.target_sampling import SpanSampler, positions_of
from xlpre.text import special_tokens


class Denoising:
    """Every token sees every token; the reused part does not see the rest, which is not there when it becomes memory."""

    two_streams, sees_ahead = False, True
    about = "Targets are hidden in the input; each is predicted from all the rest, none from another."

    def __init__(self, config: ObjectiveConfig, starts_word: np.ndarray) -> None:
        self._spans = SpanSampler(config, starts_word)
        self._vocab_size = len(starts_word)

    def n_targets(self, window: int, reuse_len: int) -> int:
        """As many as spans are drawn for."""
        return sum(self._spans.shares(window, reuse_len))

    def examples(self, windows: Windows, rng: RowRng) -> Examples:
        """Draw targets for each row (the same as permutation would with these `rng`) and hide them."""
        positions = positions_of(self._spans.targets_of(windows, rng))
        targets = np.take_along_axis(windows.ids, positions, axis=1)
        fate, piece = rng.uniform(positions.shape[1]), rng.uniform(positions.shape[1])
        n_symbols = len(special_tokens.SPECIAL_TOKENS)
        random_piece = n_symbols + (piece * (self._vocab_size - n_symbols)).astype(np.int64)
        hidden = np.where(fate < 0.8, special_tokens.MASK, np.where(fate < 0.9, random_piece, targets))
        input_ids = windows.ids.copy()
        np.put_along_axis(input_ids, positions, hidden, axis=1)
        in_rest = np.arange(input_ids.shape[1], dtype=np.int32) >= windows.reuse_len
        key_rank = np.tile(in_rest.astype(np.int32), (len(input_ids), 1))
        return Examples(
            input_ids=input_ids,
            query_rank=key_rank + 1,
            key_rank=key_rank,
            target_positions=positions,
            targets=targets,
        )
