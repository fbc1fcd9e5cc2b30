"""Checks that contenders compute the same loss and gradients, before their speed is compared.

A contender is one of the models that a benchmark compares; see contenders.py.
"""

from __future__ import annotations

import traceback
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.contenders import Contender, config_of_contender, make_contenders
from xlpre.training.deepspeed_engine import PRECISIONS

LOSS_TOLERANCE = 1e-4  # nats
GRADIENT_TOLERANCE = 1e-3  # relative error of a parameter's gradient; rounding in fp32 causes errors of about 1e-5
NEGLIGIBLE = 1e-8  # relative to the norm of all gradients; differences below this are rounding errors


def agreeing_contenders(names: list[str], config: dict[str, Any]) -> tuple[dict[str, Contender], dict[str, str]]:
    """Build contenders, and compare their losses and gradients with those of the last contender.

    Args:
        names: names of the contenders. The last contender runs first and gives the expected loss and gradients.
        config: benchmark configuration: shape of the model and the batch, device, precision.

    Returns:
        The contenders that agree, by name, compiled and ready to train; and a reason for each contender that fails or does not agree.
    """
    agreeing, failed = make_contenders(names, config), {}  # type: dict[str, Contender], dict[str, str]
    expected: tuple[float, dict[str, Tensor]] | None = None
    for name in reversed(names):
        try:
            contender = agreeing[name]
            loss = contender.loss()
            loss.backward()
            result = loss.item(), contender.gradients()
            contender.model.zero_grad(set_to_none=True)
            expected = expected or result
            if reason := describe_difference(result, expected):
                failed[name] = reason
        except Exception:
            failed[name] = format_exception()
    for name, contender in agreeing.items():
        try:
            if name not in failed:
                contender.compile(config_of_contender(name, config)["compile"])
                contender.train(PRECISIONS[config["dtype"]])
        except Exception:
            failed[name] = format_exception()
    return {name: contender for name, contender in agreeing.items() if name not in failed}, failed


def describe_difference(result: tuple[float, dict[str, Tensor]], expected: tuple[float, dict[str, Tensor]]) -> str:
    """Describe the first difference between two results, each a loss and gradients by parameter name. Empty if the results agree."""
    (loss, gradients), (expected_loss, expected_gradients) = result, expected
    if not abs(loss - expected_loss) <= LOSS_TOLERANCE:  # nan does not agree
        return f"losses do not agree: {loss}, expected {expected_loss}"
    negligible = NEGLIGIBLE * torch.nn.utils.get_total_norm(expected_gradients.values()).item()
    for name in gradients.keys() | expected_gradients.keys():
        if name not in gradients or name not in expected_gradients:
            return f"gradients do not agree: only one model has a gradient of {name}"
        norm = expected_gradients[name].norm().item()
        error = (gradients[name] - expected_gradients[name]).norm().item()
        if not error <= GRADIENT_TOLERANCE * norm + negligible:
            return f"gradients do not agree: those of {name} differ by {error:.3g} (norm of the difference), their norm is {norm:.3g}"
    return ""


def format_exception() -> str:
    """Return the last frames of the traceback of the exception that is being handled, as text."""
    return traceback.format_exc(limit=-4)[-3000:]
