"""Modes: ways to predict the tokens of a text, by the objective of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from xlpre.common.errors import InputError

Modes = Mapping[str, Sequence[str]]  # objective: its modes, the default first

EVAL_MODES: Modes = {  # of xlpre.inference.evaluation
    "permutation": ("objective", "any-order", "pll"),
    "denoising": ("objective", "pll"),
    "causal": ("causal",),
}
SCORE_MODES: Modes = {  # of xlpre.inference.scoring
    "permutation": ("pll", "any-order"),
    "denoising": ("pll",),
    "causal": ("causal",),
}


def resolve_mode(mode: str | None, objective: str, modes: Modes) -> str:
    """Return `mode`, or the default mode of an objective if it is None.

    Args:
        mode: name of a mode.
        objective: objective of the model.
        modes: EVAL_MODES or SCORE_MODES.

    Raises:
        InputError: the mode does not fit the objective.
    """
    fitting = modes[objective]
    if mode is None or mode in fitting:
        return mode or fitting[0]
    remedy = f"Choose {' or '.join(fitting)}."
    if mode == "causal" and "any-order" in fitting:
        others = " or ".join(name for name in fitting if name != "any-order")
        remedy = f"Choose any-order with one order, which is the chain rule from left to right; or {others}."
    raise InputError(f"mode={mode} is invalid for a {objective} model: its modes are {', '.join(fitting)}. {remedy}")
