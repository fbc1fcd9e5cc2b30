"""How the same weight is laid out here and elsewhere, and under which name: pure tables, one entry a weight.

And which models have a place elsewhere at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from xlpre.model.config import ModelConfig


@dataclass(frozen=True)
class Layout:
    """A change of shape that loses nothing.

    Attributes:
        to_ours: from their array to ours.
        to_theirs: back; it may ask for the shape of the model.
    """

    to_ours: Callable[[Tensor], Tensor]
    to_theirs: Callable[[Tensor, ModelConfig], Tensor]


# what may have any value elsewhere, too: sizes, what is said there by its own word, what has no part in the function of given weights
FREE = {
    *("vocab_size", "n_layer", "d_model", "n_head", "d_head", "d_inner", "mem_len", "clamp_len", "norm_eps", "untie_r"),
    *("attention_backend", "dropout", "dropatt", "init_scheme", "init_std", "tie_projections"),
}
SAME = Layout(lambda w: w, lambda w, c: w)
# what several of their layers have of its own, and a file would not hold twice otherwise
COPY = Layout(lambda w: w, lambda w, c: w.clone())
# a dense kernel (in, out) against (out, in)
TRANSPOSED = Layout(lambda w: w.T, lambda w, c: w.T)
# a projection to heads (D, H, E) against (H*E, D)
TO_HEADS = Layout(lambda w: w.flatten(1).T, lambda w, c: w.T.reshape(c.d_model, c.n_head, c.head_width))
# the projection back, (D, H, E) against (D, H*E)
FROM_HEADS = Layout(lambda w: w.flatten(1), lambda w, c: w.reshape(c.d_model, c.n_head, c.head_width))
# the mask embedding (1, 1, D) against (D)
LONE_ROW = Layout(lambda w: w[0, 0], lambda w, c: w[None, None])


@dataclass(frozen=True)
class Weight:
    """One of our weights and where it is in their files.

    Attributes:
        ours: its name in xlpre/model.
        theirs: its name there.
        layout: how it lies.
        row: where theirs stacks all layers in one array, which row of it; else None.
    """

    ours: str
    theirs: str
    layout: Layout = SAME
    row: int | None = None


def to_ours(table: list[Weight], theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our weights from theirs; entries whose array is not there are left out."""
    found = {}
    for entry in table:
        if entry.theirs in theirs:
            array = theirs[entry.theirs]
            found[entry.ours] = entry.layout.to_ours(array if entry.row is None else array[entry.row]).contiguous()
    return found


def to_theirs(table: list[Weight], ours: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Their arrays from our weights."""
    stacked: dict[str, list[Tensor]] = {}
    found: dict[str, Tensor] = {}
    for entry in table:
        array = entry.layout.to_theirs(ours[entry.ours], config).contiguous()
        if entry.row is None:
            found[entry.theirs] = array
        else:
            stacked.setdefault(entry.theirs, []).append(array)  # rows are listed in order
    return found | {name: torch.stack(rows) for name, rows in stacked.items()}


def check_expressible(config: ModelConfig, place: str, only: Mapping[str, Sequence[Any]]) -> None:
    """Raise ValueError, by the name of the key, for a model that is no XLNet as published.

    Args:
        config: the model.
        place: where it has no place then, for the message.
        only: values that a key may have there, if they are others than its default.
    """
    as_published = {key: (value,) for key, value in asdict(type(config)()).items() if key not in FREE}
    allowed = {**as_published, "feed_forward": ("gelu", "relu"), "d_embed": (config.d_model,), **only}
    values = {**asdict(config), "d_head": config.head_width, "d_embed": config.embedding_width}
    for key, known in allowed.items():
        if values[key] not in known:
            raise ValueError(
                f"model.{key}={values[key]} has no place in {place}, where it is {' or '.join(map(str, known))}; "
                "only a folder of ours holds such a model"
            )
