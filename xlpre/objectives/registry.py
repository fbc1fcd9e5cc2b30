"""Objectives by name."""

from __future__ import annotations

import numpy as np

from xlpre.data.window_layout import DataConfig
from xlpre.objectives.causal import Causal
from xlpre.objectives.denoising import Denoising
from xlpre.objectives.objective import Objective, ObjectiveConfig
from xlpre.objectives.permutation import Permutation
from xlpre.objectives.target_sampling import num_targets

OBJECTIVES: dict[str, type[Objective]] = {
    "permutation": Permutation,
    "denoising": Denoising,
    "causal": Causal,
}


def build_objective(config: ObjectiveConfig, data: DataConfig, starts_word: np.ndarray) -> Objective:
    """The objective that `config` names, for windows laid out by `data`.

    Raises:
        ValueError: a causal model on windows with symbols and pairs; next sentences without pairs; more targets than tokens.
    """
    if config.next_sentence and not data.has_pairs:
        raise ValueError(
            f"objective.next_sentence asks whether segment B follows A: data.pairs ({data.pairs}) must be true and data.reuse_len "
            f"({data.reuse_len}) below data.seq_len ({data.seq_len}), which else is plain text; set them so, or leave out "
            "objective.next_sentence"
        )
    if config.name == "causal" and data.reuse_len != data.seq_len:
        raise ValueError(
            f"objective.name=causal reads plain text: data.reuse_len ({data.reuse_len}) must equal data.seq_len; "
            f"set data.reuse_len={data.seq_len}"
        )
    in_reused, in_rest = num_targets(data.seq_len, data.reuse_len, config.partial_k)
    room = data.seq_len - data.reuse_len - data.n_symbols
    if config.name != "causal" and (in_reused > data.reuse_len or in_rest > room):
        raise ValueError(
            f"objective.partial_k ({config.partial_k}) asks for {in_rest} targets among the {room} tokens after the reused part of a "
            f"window; set objective.partial_k={data.seq_len / room:.1f} or more, or a larger data.seq_len"
        )
    return OBJECTIVES[config.name](config, starts_word)
