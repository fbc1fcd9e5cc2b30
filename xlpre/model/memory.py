"""Memory of earlier windows (Transformer-XL, section 3.2), owned by the training loop.

`Memory` holds hidden states: the inputs of every layer for the last M tokens of each row. Only the reused part of a window enters it, and
no gradient flows into it.

`KVCache` holds the keys and values of the same columns, for evaluation. A window then projects only its own tokens, and distances are
projected once for all windows. The results are the same. In training they would not be: the cached keys would come from earlier weights,
and the projections would get no gradient from memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from xlpre.batch import HIDDEN_RANK
from xlpre.model.config import ModelConfig

MEMORY_RANK = -1  # below every token of the window
MAX_WINDOW_SIZES = (
    4  # sizes for which a KVCache keeps the score terms; the last window of a text has another size than the others
)

Projection = Callable[[Tensor], tuple[Tensor, Tensor]]  # hidden states (B, M, D) -> keys and values, (B, M, H, E) each


@dataclass(frozen=True)
class HiddenContext:
    """Hidden states that a layer attends to.

    Attributes:
        memory: (B, M, D), no gradient.
        content: (B, T, D).
    """

    memory: Tensor
    content: Tensor


@dataclass(frozen=True)
class KeyValue:
    """Keys and values that a layer attends to.

    Attributes:
        key: (B, K, H, E).
        value: (B, K, H, E).
    """

    key: Tensor
    value: Tensor


LayerContext = HiddenContext | KeyValue


@dataclass(frozen=True)
class WindowTerms:
    """Attention inputs that do not depend on the tokens of the window, only on its size (K, T).

    Attributes:
        pos_encoding: (2, R, ...) encodings of all distances.
        score_terms: for each layer, the result of `RelativeAttention.score_terms`. None if the layer computes it.
    """

    pos_encoding: Tensor
    score_terms: Sequence[dict[str, Tensor] | None]


class BaseMemory(ABC):
    """M columns of earlier tokens for every layer and row.

    Attributes:
        valid: (B,) int64, number of final columns that belong to the row. The others are hidden.
    """

    valid: Tensor

    @property
    @abstractmethod
    def mem_len(self) -> int:
        """M."""

    @abstractmethod
    def check(self, config: ModelConfig, rows: int, like: Tensor) -> None:
        """Check that a model of shape `config`, whose weights have the dtype of `like`, can read `rows` rows with this memory.

        Raises:
            ValueError: shape or dtype does not fit.
        """

    @abstractmethod
    def context_for_layer(self, layer: int, content: Tensor, project: Projection) -> LayerContext:
        """Return the context of a layer: memory, then the content stream.

        Args:
            layer: index of the layer.
            content: (B, T, D) content rows that enter the layer.
            project: computes the layer's keys and values.
        """

    @abstractmethod
    def updated(self, contexts: Sequence[Any], n_new: int, visible_mem_len: Tensor) -> BaseMemory:
        """Append the first `n_new` tokens of the window and keep the last M columns.

        Args:
            contexts: results of `context_for_layer`, one per layer.
            n_new: `Batch.reuse_len`.
            visible_mem_len: (B,) int64, see Batch.
        """

    def key_rank(self, visible_mem_len: Tensor) -> Tensor:
        """Return the ranks of the M columns, (B, M) int32: visible to all rows, or hidden.

        Args:
            visible_mem_len: (B,) int64, see Batch.
        """
        age = torch.arange(self.mem_len, 0, -1, device=self.valid.device)
        is_visible = age <= self._n_visible(visible_mem_len)[:, None]
        return torch.where(is_visible, MEMORY_RANK, HIDDEN_RANK).to(torch.int32)

    def _n_visible(self, visible_mem_len: Tensor) -> Tensor:
        """(B,) int64, number of final columns that each row of the window sees."""
        return torch.minimum(self.valid, visible_mem_len)

    def _valid_after(self, n_new: int, visible_mem_len: Tensor) -> Tensor:
        """`valid` after `n_new` columns are appended."""
        return (self._n_visible(visible_mem_len) + n_new).clamp(max=self.mem_len)


@dataclass(frozen=True)
class Memory(BaseMemory):
    """Hidden states of earlier tokens.

    Attributes:
        hidden: (L, B, M, D) inputs of every layer, oldest column first.
        valid: (B,) int64, number of final columns that belong to the row. The others are hidden.
    """

    hidden: Tensor
    valid: Tensor

    @property
    def mem_len(self) -> int:
        """M."""
        return self.hidden.size(2)

    def check(self, config: ModelConfig, rows: int, like: Tensor) -> None:
        """Check shape and dtype of the hidden states, see BaseMemory."""
        shape, expected = tuple(self.hidden.shape), (config.n_layer, rows, self.mem_len, config.d_model)
        wrong_dtype = self.hidden.dtype != like.dtype and not torch.is_autocast_enabled(like.device.type)
        if shape != expected or wrong_dtype or len(self.valid) != rows:
            raise ValueError(
                f"Memory.hidden of shape {shape} and {self.hidden.dtype} for {len(self.valid)} rows is invalid: this model and batch need "
                f"{expected} and {like.dtype}. Start with initial_memory(config, rows={rows}, dtype={like.dtype})."
            )

    def context_for_layer(self, layer: int, content: Tensor, project: Projection) -> HiddenContext:
        """Return hidden states of memory and content, which the layer projects itself."""
        return HiddenContext(self.hidden[layer], content)

    def updated(self, contexts: Sequence[HiddenContext], n_new: int, visible_mem_len: Tensor) -> Memory:
        """Append the layer inputs of the window, see BaseMemory."""
        new = torch.stack([context.content[:, :n_new] for context in contexts])
        return Memory(append_columns(self.hidden, new), self._valid_after(n_new, visible_mem_len))

    def reset_nonfinite_rows(self) -> Memory:
        """Return memory in which every row with a non-finite value is emptied. Other rows are unchanged.

        A non-finite value would reach every later window of its lane. Hidden columns count too: their attention probability is 0,
        and 0 times inf or nan is nan.
        """
        finite = self.finite_rows()
        return Memory(self.hidden.masked_fill(~finite[None, :, None, None], 0), self.valid * finite)

    def finite_rows(self) -> Tensor:
        """Return (B,) bool, True if every value of the row is finite in all layers and columns."""
        return self.hidden.isfinite().all(3).all(2).all(0)


@dataclass(frozen=True, eq=False)
class KVCache(BaseMemory):
    """Keys and values of earlier tokens, created by `Backbone.to_kv_cache`.

    Attributes:
        layers: keys and values of each layer, M columns each, oldest first.
        valid: (B,) int64, number of final columns that belong to the row. The others are hidden.
        window_terms: projected positions and other score terms of the last `MAX_WINDOW_SIZES` window sizes, by (K, T). A cache shares
            them with the caches that `updated` returns.
    """

    layers: Sequence[KeyValue]
    valid: Tensor
    window_terms: dict[tuple[int, int], WindowTerms] = field(default_factory=dict)

    @property
    def mem_len(self) -> int:
        """M."""
        return self.layers[0].key.size(1)

    def check(self, config: ModelConfig, rows: int, like: Tensor) -> None:
        """Check the shapes of the keys, see BaseMemory."""
        expected = (rows, self.mem_len, config.n_head, config.head_width)
        shapes = [tuple(layer.key.shape) for layer in self.layers]
        if shapes != [expected] * config.n_layer:
            raise ValueError(
                f"KVCache with keys of shape {shapes[0]} in {len(shapes)} layers is invalid: this model and batch need {expected} in "
                f"{config.n_layer} layers. Start with backbone.to_kv_cache(initial_memory(config, rows={rows}))."
            )

    def context_for_layer(self, layer: int, content: Tensor, project: Projection) -> KeyValue:
        """Project the content and append it to the cached keys and values."""
        cached, (key, value) = self.layers[layer], project(content)
        return KeyValue(torch.cat([cached.key, key], dim=1), torch.cat([cached.value, value], dim=1))

    def updated(self, contexts: Sequence[KeyValue], n_new: int, visible_mem_len: Tensor) -> KVCache:
        """Keep the last M columns of the contexts, see BaseMemory. They are views: nothing is copied."""
        columns = (n_new, self.mem_len)
        layers = [KeyValue(context.key.narrow(1, *columns), context.value.narrow(1, *columns)) for context in contexts]
        return KVCache(layers, self._valid_after(n_new, visible_mem_len), self.window_terms)


def append_columns(memory: Tensor, new: Tensor) -> Tensor:
    """Append columns to memory, keep the last M and detach the result.

    Args:
        memory: (L, B, M, D).
        new: (L, B, R, D).

    Returns:
        (L, B, M, D).

    Source: zihangdai/xlnet modeling.py `_cache_mem`.
    """
    length, n_new = memory.size(2), min(new.size(2), memory.size(2))
    # narrow, because [-0:] would keep everything; before concatenation, so that dropped columns do not stay in storage
    old = memory.narrow(2, n_new, length - n_new)
    new = new.narrow(2, new.size(2) - n_new, n_new)
    return torch.cat([old, new.to(memory.dtype)], dim=2).detach()


def initial_memory(
    config: ModelConfig,
    rows: int,
    *,
    mem_len: int | None = None,
    initial: str = "empty",
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Memory:
    """Return memory for the first window: zeros, not visible if `initial` is `empty`.

    Args:
        config: shape of the model.
        rows: B.
        mem_len: M. None takes `config.mem_len`, 0 disables memory.
        initial: `empty` or `zeros`, see MemoryConfig.
        device: device of the model.
        dtype: dtype of the model's weights.

    Raises:
        ValueError: negative `mem_len` or unknown `initial`.
    """
    length = config.mem_len if mem_len is None else mem_len
    if length < 0:
        raise ValueError(f"mem_len={length} is invalid: it must be at least 0. Set mem_len=0 for no memory.")
    if initial not in ("empty", "zeros"):
        raise ValueError(f"initial={initial!r} is invalid: it must be 'empty' or 'zeros'.")
    hidden = torch.zeros(config.n_layer, rows, length, config.d_model, device=device, dtype=dtype)
    return Memory(hidden, torch.full((rows,), length if initial == "zeros" else 0, device=device))
