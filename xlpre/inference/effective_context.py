"""Relative effective context length, RECL (Transformer-XL, arXiv:1901.02860, section 4.3 and appendix C).

RECL is the longest context that still helps a model, relative to the best model of a group with a shorter context. Let l_i(c, t) be the
loss of model i on token t, given the c tokens before it, and b(c, t) the lowest of these losses in the group. With a longer context c',
only losses below b count:

    f_i(c, c') = mean over t in T of min(b(c, t), l_i(c', t))
    gain       = 1 - exp(f_i(c, c') - f_i(c, c)),   the relative reduction of perplexity

T holds the fraction r of the tokens on which b(c, t) is largest: those for which a context of c tokens is not enough. The context grows
in steps, and RECL is the first c from which a step gains less than 0.01.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from xlpre.common.errors import InputError

MIN_GAIN = 0.01


@dataclass(frozen=True)
class EffectiveContext:
    """Relative effective context length of one model.

    Attributes:
        length: RECL in tokens.
        is_at_least: True if each step up to the longest context gained enough, so RECL is `length` or more.
        gains: relative reduction of perplexity of each step, from the shortest context to the longest.
    """

    length: int
    is_at_least: bool
    gains: tuple[float, ...]


def effective_contexts(losses: np.ndarray, contexts: Sequence[int], fraction: float) -> list[EffectiveContext]:
    """Compute the RECL of each model of a group.

    Args:
        losses: (M, C, S) losses in nats of M models with C contexts on S tokens.
        contexts: C lengths of the context, increasing.
        fraction: r, fraction of the tokens that count.

    Raises:
        InputError: the fraction is not above 0 and at most 1, there are fewer than two contexts, or they do not increase.
    """
    losses = np.asarray(losses, np.float64)
    if not 0 < fraction <= 1:
        raise InputError(f"fraction={fraction} is invalid: it must be above 0 and at most 1.")
    if len(contexts) < 2 or list(contexts) != sorted({*contexts}) or losses.shape[1] != len(contexts):
        raise InputError(f"contexts={list(contexts)} is invalid: it must have two or more increasing lengths.")
    n_hard = max(1, round(fraction * losses.shape[2]))
    gains = np.empty((len(losses), len(contexts) - 1))
    for step in range(len(contexts) - 1):
        baseline = losses[:, step].min(0)
        hard = np.argsort(-baseline, kind="stable")[:n_hard]
        short, long = (np.minimum(baseline[hard], losses[:, step + k][:, hard]).mean(1) for k in (0, 1))
        gains[:, step] = -np.expm1(long - short)
    results = []
    for of_model in gains:
        too_small = np.flatnonzero(of_model < MIN_GAIN)
        index = int(too_small[0]) if len(too_small) else len(contexts) - 1
        results.append(EffectiveContext(contexts[index], not len(too_small), tuple(of_model.tolist())))
    return results
