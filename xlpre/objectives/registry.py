"""Objectives by name."""

from __future__ import annotations

import math

import numpy as np

from xlpre.common.errors import InputError
from xlpre.data.window_layout import DataConfig
from xlpre.objectives.causal import Causal
from xlpre.objectives.denoising import Denoising
from xlpre.objectives.objective import Objective, ObjectiveConfig
from xlpre.objectives.permutation import Permutation
from xlpre.objectives.target_sampling import n_targets_per_part

OBJECTIVES: dict[str, type[Objective]] = {
    "permutation": Permutation,
    "denoising": Denoising,
    "causal": Causal,
}


def build_objective(config: ObjectiveConfig, data: DataConfig, starts_word: np.ndarray) -> Objective:
    """Build the objective `config.name`.

    Args:
        config: objective settings.
        data: layout of the windows.
        starts_word: (V,) bool, True for tokens that start a word.

    Raises:
        InputError: the objective is causal and windows have special tokens, next-sentence prediction is on and windows have no pairs, or
            there are more targets than tokens.
    """
    if config.next_sentence and not data.has_pairs:
        raise InputError(
            f"objective.next_sentence=true is invalid with data.pairs={str(data.pairs).lower()}, data.reuse_len={data.reuse_len} and "
            f"data.seq_len={data.seq_len}: next-sentence prediction needs windows with a segment B. "
            "Either set data.pairs=true with a data.reuse_len below data.seq_len, or set objective.next_sentence=false."
        )
    if config.name == "causal" and data.reuse_len != data.seq_len:
        raise InputError(
            f"data.reuse_len={data.reuse_len} is invalid with objective.name=causal: it must equal data.seq_len={data.seq_len}, "
            f"because causal windows are plain text. Set data.reuse_len={data.seq_len}."
        )
    _, in_rest = n_targets_per_part(data.seq_len, data.reuse_len, config.partial_k)
    rest_len = data.seq_len - data.reuse_len - data.n_symbols
    if config.name != "causal" and in_rest > rest_len:
        least = math.ceil(10 * (data.seq_len - data.reuse_len) / rest_len) / 10
        raise InputError(
            f"objective.partial_k={config.partial_k} is invalid: a window needs {in_rest} targets after its reused part, but has only "
            f"{rest_len} tokens there. Set objective.partial_k={least:.1f} or more, or increase data.seq_len."
        )
    return OBJECTIVES[config.name](config, starts_word)


def resolve_objective(objective: str | None, two_streams: bool) -> str:
    """Return the objective of a model, of which only the number of streams is known.

    Args:
        objective: name of the objective. None: `permutation` if the model has two streams; other models need it.
        two_streams: True if the model has a query stream.

    Raises:
        InputError: there is no such objective with this number of streams.
    """
    fitting = [name for name, known in OBJECTIVES.items() if known.two_streams == two_streams]
    if objective is None and len(fitting) == 1:
        return fitting[0]
    if objective not in fitting:
        raise InputError(
            f"objective={objective!r} is invalid: the model has {'two streams' if two_streams else 'one stream'}. "
            f"Set objective to {' or '.join(map(repr, fitting))}, the one that it was trained with."
        )
    return objective
