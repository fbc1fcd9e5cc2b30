"""Cache: keys and values of what was read before, in place of memory's hidden states, where weights do not change: at evaluation.

A window then projects its own tokens and nothing else: no column of memory again, and no distance. The numbers are those of hidden
states. In training they would not be: keys of memory would come from weights of before, and no gradient would reach the projections.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from xlpre.model.attention_mask import afresh
from xlpre.model.backbone import Backbone
from xlpre.model.config import ModelConfig
from xlpre.model.memory import Memory, Past, Projection
from xlpre.model.positions import NoPositionEmbedding


@dataclass(frozen=True, eq=False)
class KeysValues:
    """Keys and values of a layer.

    Attributes:
        key: (B, K, H, E).
        value: (B, K, H, E).
    """

    key: Tensor
    value: Tensor

    def keys_values(self, project: Projection) -> tuple[Tensor, Tensor]:
        """See Attended."""
        return self.key, self.value


@dataclass(frozen=True, eq=False)
class Cache(Past):
    """Keys and values of what each row read before; made by `cached`.

    Attributes:
        layers: of M columns each, oldest first.
        valid: see Past.
        once: see Past; remembers what it made.
    """

    layers: Sequence[KeysValues]
    valid: Tensor
    once: Callable[..., Any]

    @property
    def n_columns(self) -> int:
        """M."""
        return self.layers[0].key.size(1)

    def check(self, config: ModelConfig, rows: int, like: Tensor) -> None:
        """See Past."""
        needed = (rows, self.n_columns, config.n_head, config.head_width)
        found = [tuple(one.key.shape) for one in self.layers]
        if found != [needed] * config.n_layer:
            raise ValueError(
                f"a cache of keys {found[0]} in {len(found)} layers; this model and batch need {needed} in {config.n_layer}; begin with "
                f"cached(first_memory(config, rows={rows}), backbone), and keep to the rows"
            )

    def attended(self, layer: int, content: Tensor, project: Projection) -> KeysValues:
        """See Past."""
        before, (key, value) = self.layers[layer], project(content)
        return KeysValues(torch.cat([before.key, key], dim=1), torch.cat([before.value, value], dim=1))

    def extended(self, attended: Sequence[KeysValues], n_new: int, visible_mem_len: Tensor) -> Cache:
        """See Past. Nothing is copied: columns `n_new` to `n_new` + M of what was attended to."""
        kept = (n_new, self.n_columns)
        layers = [KeysValues(one.key.narrow(1, *kept), one.value.narrow(1, *kept)) for one in attended]
        return Cache(layers, self.valid_after(n_new, visible_mem_len), self.once)


def cached(memory: Memory, backbone: Backbone) -> Past:
    """What reads on as `memory` would, with its keys and values projected once, and keys of distances once for all windows.

    Args:
        memory: to start from.
        backbone: whose weights do not change any more.

    Returns:
        A Cache; `memory` itself where a place is added to hidden states (`model.positions` sinusoidal, learned): in each
        window it is another one, so that no key stays what it was.

    Raises:
        ValueError: the model is in training; a memory that is not of this model, or a cache.
    """
    if not isinstance(memory, Memory) or not isinstance(backbone, Backbone):
        raise ValueError(
            f"a cache is made of a Memory and a Backbone (model.backbone), not of {type(memory).__name__} and {type(backbone).__name__}"
        )
    if backbone.training or torch.is_grad_enabled():
        raise ValueError(
            "keys and values can be kept at evaluation only: call model.eval(), and read under torch.no_grad()"
        )
    memory.check(backbone.config, len(memory.valid), backbone.mask_embedding)
    layers: Any = backbone.layers
    if not all(isinstance(layer.places, NoPositionEmbedding) for layer in layers):
        return memory
    projected = [KeysValues(*layer.keys_values(x)) for layer, x in zip(layers, memory.hidden, strict=True)]
    return Cache(projected, memory.valid, functools.cache(afresh))
