"""Which models that train a step come to the same loss and gradients, so that their speeds may be compared."""

from __future__ import annotations

import traceback
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.contenders import Contender, config_of_contender, make_contenders
from xlpre.training.deepspeed_engine import PRECISIONS

AGREE = 1e-4  # nats
NEAR = 1e-3  # the norm of the difference of a parameter's gradients, over the norm; what rounding makes of fp32 is a hundredth of it
NOTHING = 1e-8  # of the norm of all gradients: a parameter's that is smaller is rounding


def agreeing(names: list[str], c: dict[str, Any]) -> tuple[dict[str, Contender], dict[str, str]]:
    """Contenders whose losses and gradients agree with those of the last, which is asked first; and why others are out."""
    found, failed = make_contenders(names, c), {}  # type: dict[str, Contender], dict[str, str]
    last: tuple[float, dict[str, Tensor]] | None = None
    for name in reversed(names):
        try:
            one = found[name]
            loss = one.loss()
            loss.backward()
            met = loss.item(), one.gradients()
            one.model.zero_grad(set_to_none=True)
            last = last or met
            failed |= {name: reason} if (reason := apart(met, last)) else {}
        except Exception:
            failed[name] = why()
    for name in failed:
        del found[name]
    for name, one in found.items():
        one.compile(config_of_contender(name, c)["compile"])
        one.train(PRECISIONS[c["dtype"]])
    return found, failed


def apart(found: tuple[float, dict[str, Tensor]], expected: tuple[float, dict[str, Tensor]]) -> str:
    """What differs of losses and gradients by parameter; nothing if they agree."""
    if not abs(found[0] - expected[0]) <= AGREE:  # nan neither
        return f"losses do not agree: {found[0]} and {expected[0]}"
    least = NOTHING * torch.nn.utils.get_total_norm(expected[1].values()).item()
    for name in found[1].keys() | expected[1].keys():
        if name not in found[1] or name not in expected[1]:
            return f"gradients do not agree: one has none of {name}"
        off, norm = (found[1][name] - expected[1][name]).norm().item(), expected[1][name].norm().item()
        if not off <= NEAR * norm + least:
            return f"gradients do not agree: those of {name} are {off:.3g} apart, and their norm is {norm:.3g}"
    return ""


def why() -> str:
    """The end of the traceback."""
    return traceback.format_exc(limit=-4)[-3000:]
