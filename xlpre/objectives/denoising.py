"""Denoising, BERT's objective on this backbone: targets are masked in the input and predicted independently.

Source: BERT (arXiv:1810.04805), section 3.1: 80 % of the targets are replaced by <mask>, 10 % by a random token, and 10 % are unchanged.
XLNet's ablation table calls it "DAE + Transformer-XL".
"""

from __future__ import annotations

import numpy as np

from xlpre.data.rng import RowRng
from xlpre.data.window_layout import Windows
from xlpre.objectives.objective import ModelInputs, ObjectiveConfig
from xlpre.objectives.target_sampling import SpanSampler, positions_of_targets
from xlpre.text import special_tokens


class Denoising:
    """Objective where every token sees all tokens of the window, and targets are masked in the input.

    Exception: the reused part does not see the rest, because the rest is not available when the reused part becomes memory.
    """

    two_streams, sees_ahead = False, True
    description = (
        "Targets are masked in the input; each is predicted from the other tokens, independently of other targets."
    )

    def __init__(self, config: ObjectiveConfig, starts_word: np.ndarray) -> None:
        self._spans = SpanSampler(config, starts_word)
        self._vocab_size = len(starts_word)

    def n_targets(self, seq_len: int, reuse_len: int) -> int:
        """Return P, the number of targets of a row."""
        return sum(self._spans.n_targets_per_part(seq_len, reuse_len))

    def build_inputs(self, windows: Windows, rng: RowRng) -> ModelInputs:
        """Sample targets for each row and mask them. `Permutation` samples the same targets with the same `rng`."""
        positions = positions_of_targets(self._spans.sample_targets(windows, rng))
        targets = np.take_along_axis(windows.ids, positions, axis=1)
        action, token = rng.uniform(positions.shape[1]), rng.uniform(positions.shape[1])
        n_special = special_tokens.N_SPECIAL
        random_token = n_special + (token * (self._vocab_size - n_special)).astype(np.int64)
        masked = np.where(action < 0.8, special_tokens.MASK, np.where(action < 0.9, random_token, targets))
        input_ids = windows.ids.copy()
        np.put_along_axis(input_ids, positions, masked, axis=1)
        in_rest = np.arange(input_ids.shape[1], dtype=np.int32) >= windows.reuse_len
        key_rank = np.tile(in_rest.astype(np.int32), (len(input_ids), 1))
        return ModelInputs(
            input_ids=input_ids,
            query_rank=key_rank + 1,
            key_rank=key_rank,
            target_positions=positions,
            targets=targets,
        )
