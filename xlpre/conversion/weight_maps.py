"""Weight maps: names and shapes of the weights in xlpre (native) and in another format (external).

A weight map is a list with one entry per weight. `check_expressible` refuses models that another format cannot represent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from xlpre.common.errors import InputError
from xlpre.model.config import ModelConfig


@dataclass(frozen=True)
class Transform:
    """Lossless change of shape between an external and a native array.

    Attributes:
        to_native: convert an external array.
        to_external: convert a native array; it also receives the model config.
    """

    to_native: Callable[[Tensor], Tensor]
    to_external: Callable[[Tensor, ModelConfig], Tensor]


IDENTITY = Transform(lambda w: w, lambda w, c: w)
# clone, because the external model stores this weight once per layer, and safetensors refuses tensors that share memory
COPY = Transform(lambda w: w, lambda w, c: w.clone())
# dense kernel: (in, out) external, (out, in) native
TRANSPOSED = Transform(lambda w: w.T, lambda w, c: w.T)
# projection to heads: (D, H, E) external, (H*E, D) native
TO_HEADS = Transform(lambda w: w.flatten(1).T, lambda w, c: w.T.reshape(c.d_model, c.n_head, c.head_width))
# projection from heads: (D, H, E) external, (D, H*E) native
FROM_HEADS = Transform(lambda w: w.flatten(1), lambda w, c: w.reshape(c.d_model, c.n_head, c.head_width))
# mask embedding: (1, 1, D) external, (D) native
SINGLE_ROW = Transform(lambda w: w[0, 0], lambda w, c: w[None, None])


@dataclass(frozen=True)
class WeightEntry:
    """One weight in both formats.

    Attributes:
        native: parameter name in xlpre/model.
        external: name in the other format.
        transform: change of shape between the two.
        row: row of the external array that holds this weight, if that array stacks all layers; else None.
    """

    native: str
    external: str
    transform: Transform = IDENTITY
    row: int | None = None


WeightMap = list[WeightEntry]


def to_native(weight_map: WeightMap, external: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert external arrays to native weights. Entries of the map that have no array are skipped."""
    weights = {}
    for entry in weight_map:
        if entry.external in external:
            array = external[entry.external]
            row = array if entry.row is None else array[entry.row]
            weights[entry.native] = entry.transform.to_native(row).contiguous()
    return weights


def to_external(weight_map: WeightMap, native: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Convert native weights to external arrays."""
    stacked: dict[str, list[Tensor]] = {}
    arrays: dict[str, Tensor] = {}
    for entry in weight_map:
        array = entry.transform.to_external(native[entry.native], config).contiguous()
        if entry.row is None:
            arrays[entry.external] = array
        else:
            stacked.setdefault(entry.external, []).append(array)  # entries are in the order of their rows
    return arrays | {name: torch.stack(rows) for name, rows in stacked.items()}


# Settings that need no check: sizes, settings with an equivalent in the other format, and settings that have no effect on
# what trained weights compute.
UNRESTRICTED = {
    *("vocab_size", "n_layer", "d_model", "n_head", "d_head", "d_inner", "mem_len", "clamp_len", "norm_eps", "untie_r"),
    *("attention_backend", "dropout", "dropatt", "init_scheme", "init_std", "tie_projections"),
}


def check_expressible(config: ModelConfig, target: str, allowed: Mapping[str, Sequence[Any]]) -> None:
    """Check that another format can represent a model.

    Args:
        config: model config.
        target: name of the other format, for the message.
        allowed: for some keys, the values that the other format can represent. For all other keys, it can represent only the default of
            `ModelConfig`, except for the keys in `UNRESTRICTED`.

    Raises:
        InputError: a setting that the format cannot represent.
    """
    defaults = {key: (value,) for key, value in asdict(type(config)()).items() if key not in UNRESTRICTED}
    supported = {**defaults, "feed_forward": ("gelu", "relu"), "d_embed": (config.d_model,), **allowed}
    values = {**asdict(config), "d_head": config.head_width, "d_embed": config.embedding_width}
    for key, choices in supported.items():
        if values[key] not in choices:
            raise InputError(
                f"model.{key}={values[key]} is invalid for {target}: it must be {' or '.join(map(str, choices))}. "
                "Export the model as a folder of xlpre (without --hf or --tf)."
            )
