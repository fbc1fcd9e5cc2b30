"""Memory of earlier windows (Transformer-XL, section 3.2), owned by the training loop.

Memory has M positions for each batch row, one for each of the tokens before the window, oldest first.

`Memory` holds hidden states: the inputs of every layer at these positions. Only the reused part of a window (its first `Batch.reuse_len`
tokens) enters memory, and no gradient flows into it.

`KVCache` holds the keys and values of the same positions instead, for evaluation. A window then projects only its own tokens, and distances
are projected once per window size. The results are the same as with `Memory`. In training they would differ, because the cached keys
would come from earlier weights and the projections would get no gradient from memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from xlpre.batch import HIDDEN_RANK
from xlpre.common.errors import InputError, check_minimum
from xlpre.model.config import ModelConfig

MEMORY_RANK = -1  # rank of visible memory, below the rank of every token of the window
# number of window sizes for which a KVCache keeps the score terms; the last window of a text is usually shorter than the others
MAX_WINDOW_SIZES = 4

Projection = Callable[[Tensor], tuple[Tensor, Tensor]]  # hidden states (B, M, D) -> keys and values, (B, M, H, E) each


@dataclass(frozen=True)
class HiddenContext:
    """Hidden states that a layer attends to.

    Attributes:
        memory: (B, M, D) hidden states of memory, without gradient.
        content: (B, T, D) hidden states of the content stream.
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
    """Attention inputs that depend only on the size (K, T) of the window, not on its tokens.

    Attributes:
        pos_encoding: (2, R, ...) encodings of all distances.
        score_terms: for each layer, the result of `RelativeAttention.score_terms`, or None if the layer computes it in its forward pass.
    """

    pos_encoding: Tensor
    score_terms: Sequence[dict[str, Tensor] | None]


class BaseMemory(ABC):
    """Base class of memory with M positions for every layer and batch row.

    Attributes:
        valid: (B,) int64, number of positions, counted from the last, that the batch row may see. The positions before them are hidden.
    """

    valid: Tensor

    @property
    @abstractmethod
    def mem_len(self) -> int:
        """M, number of positions."""

    @abstractmethod
    def check(self, config: ModelConfig, rows: int, like: Tensor) -> None:
        """Check that this memory fits a model of shape `config`, weights with the dtype of `like`, and a batch of `rows` rows.

        Raises:
            InputError: the shape or the dtype of memory does not fit.
        """

    @abstractmethod
    def expand(self, rows: int) -> BaseMemory:
        """Return this memory, which has one batch row, for `rows` batch rows, without copying."""

    @abstractmethod
    def context_for_layer(self, layer: int, content: Tensor, project: Projection) -> LayerContext:
        """Return the hidden states, or keys and values, that a layer attends to: memory, then the content stream.

        Args:
            layer: index of the layer.
            content: (B, T, D) input of the layer for the content stream.
            project: function that computes the keys and values of the layer.
        """

    @abstractmethod
    def updated(self, contexts: Sequence[Any], n_new: int, visible_mem_len: Tensor) -> BaseMemory:
        """Return the memory for the next window.

        It consists of this memory followed by the first `n_new` tokens of the current window, and is cut to the last M positions.

        Args:
            contexts: results of `context_for_layer` for the current window, one per layer.
            n_new: number of tokens to append, `Batch.reuse_len`.
            visible_mem_len: (B,) int64, see Batch.
        """

    def key_rank(self, visible_mem_len: Tensor) -> Tensor:
        """Return the ranks of memory as keys, (B, M) int32: MEMORY_RANK where every query sees it, HIDDEN_RANK where no query does.

        Args:
            visible_mem_len: (B,) int64, see Batch.
        """
        age = torch.arange(self.mem_len, 0, -1, device=self.valid.device)
        is_visible = age <= self._n_visible(visible_mem_len)[:, None]
        return torch.where(is_visible, MEMORY_RANK, HIDDEN_RANK).to(torch.int32)

    def _n_visible(self, visible_mem_len: Tensor) -> Tensor:
        """Return the number of positions, counted from the last, that each batch row sees in this window, (B,) int64."""
        return torch.minimum(self.valid, visible_mem_len)

    def _valid_after(self, n_new: int, visible_mem_len: Tensor) -> Tensor:
        """Return the value of `valid` after `n_new` tokens are appended."""
        return (self._n_visible(visible_mem_len) + n_new).clamp(max=self.mem_len)


@dataclass(frozen=True)
class Memory(BaseMemory):
    """Hidden states of earlier tokens.

    Attributes:
        hidden: (L, B, M, D) inputs of every layer, oldest token first.
        valid: (B,) int64, see BaseMemory.
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
            raise InputError(
                f"Memory.hidden of shape {shape} and {self.hidden.dtype}, with Memory.valid of {len(self.valid)} rows, is invalid: "
                f"this model and a batch of {rows} rows need {expected} and {like.dtype}. "
                f"Start with initial_memory(config, rows={rows}, dtype={like.dtype})."
            )

    def expand(self, rows: int) -> Memory:
        """Return the memory of one row for several, see BaseMemory."""
        return Memory(self.hidden.expand(-1, rows, -1, -1), self.valid.expand(rows))

    def context_for_layer(self, layer: int, content: Tensor, project: Projection) -> HiddenContext:
        """Return hidden states of memory and content, which the layer projects itself."""
        return HiddenContext(self.hidden[layer], content)

    def updated(self, contexts: Sequence[HiddenContext], n_new: int, visible_mem_len: Tensor) -> Memory:
        """Append the layer inputs of the window, see BaseMemory."""
        first = max(n_new - self.mem_len, 0)  # tokens before it would be dropped
        new = torch.stack([context.content[:, first:n_new] for context in contexts])
        return Memory(append_columns(self.hidden, new), self._valid_after(n_new, visible_mem_len))

    def reset_nonfinite_rows(self) -> Memory:
        """Return memory in which every batch row with a non-finite value is reset to zeros that are not visible.

        The other batch rows are unchanged. Without the reset, a non-finite value would spread to every later window of its lane (the text
        that the batch row reads). Values at hidden positions are checked, too: their attention probability is 0, but 0 times inf or nan
        is nan.
        """
        finite = self.finite_rows()
        return Memory(self.hidden.masked_fill(~finite[None, :, None, None], 0), self.valid * finite)

    def finite_rows(self) -> Tensor:
        """Return (B,) bool, True if the values of the batch row are finite in all layers and at all positions."""
        return self.hidden.isfinite().all(3).all(2).all(0)


@dataclass(frozen=True, eq=False)
class KVCache(BaseMemory):
    """Keys and values of earlier tokens, created by `Backbone.to_kv_cache`.

    Attributes:
        layers: keys and values of each layer at the M positions, oldest token first.
        valid: (B,) int64, see BaseMemory.
        window_terms: position encodings and score terms of the last `MAX_WINDOW_SIZES` window sizes, by (K, T). `updated` passes this
            dictionary to the cache that it returns.
    """

    layers: Sequence[KeyValue]
    valid: Tensor
    window_terms: dict[tuple[int, int], WindowTerms] = field(default_factory=dict)

    @property
    def mem_len(self) -> int:
        """M."""
        return self.layers[0].key.size(1)

    def check(self, config: ModelConfig, rows: int, like: Tensor) -> None:
        """Check shapes and dtype of the keys, see BaseMemory."""
        expected, dtype = (rows, self.mem_len, config.n_head, config.head_width), self.layers[0].key.dtype
        shapes = [tuple(layer.key.shape) for layer in self.layers]
        # `torch.cat` converts keys of lower precision, which autocast has written
        is_converted = torch.promote_types(dtype, like.dtype) == like.dtype or torch.is_autocast_enabled(
            like.device.type
        )
        if shapes != [expected] * config.n_layer or not is_converted or len(self.valid) != rows:
            raise InputError(
                f"KVCache with {len(shapes)} layers of keys of shape {shapes[0]} and {dtype}, and KVCache.valid of {len(self.valid)} rows, "
                f"is invalid: this model and a batch of {rows} rows need {config.n_layer} layers of {expected} and {like.dtype}. "
                f"Start with backbone.to_kv_cache(initial_memory(config, rows={rows}, dtype={like.dtype}))."
            )

    def expand(self, rows: int) -> KVCache:
        """Return the cache of one row for several, see BaseMemory."""
        layers = [KeyValue(*(x.expand(rows, -1, -1, -1) for x in (layer.key, layer.value))) for layer in self.layers]
        return KVCache(layers, self.valid.expand(rows), self.window_terms)

    def context_for_layer(self, layer: int, content: Tensor, project: Projection) -> KeyValue:
        """Project the content and append it to the cached keys and values."""
        cached, (key, value) = self.layers[layer], project(content)
        return KeyValue(torch.cat([cached.key, key], dim=1), torch.cat([cached.value, value], dim=1))

    def updated(self, contexts: Sequence[KeyValue], n_new: int, visible_mem_len: Tensor) -> KVCache:
        """Return views of the positions `n_new` to `n_new` + M of the contexts, without copying. See BaseMemory."""
        columns = (n_new, self.mem_len)
        layers = [KeyValue(context.key.narrow(1, *columns), context.value.narrow(1, *columns)) for context in contexts]
        return KVCache(layers, self._valid_after(n_new, visible_mem_len), self.window_terms)


def append_columns(memory: Tensor, new: Tensor) -> Tensor:
    """Append hidden states to memory, keep the last M positions and detach the result.

    Args:
        memory: (L, B, M, D).
        new: (L, B, n, D), with any n.

    Returns:
        (L, B, M, D).

    Source: zihangdai/xlnet modeling.py `_cache_mem`.
    """
    length, n_new = memory.size(2), min(new.size(2), memory.size(2))
    # `narrow` instead of a slice, because [-0:] would keep everything; dropped positions are removed first, to save memory
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
    """Return memory for the first window: zeros, which queries see only if `initial` is `zeros`.

    Args:
        config: shape of the model.
        rows: B.
        mem_len: M. None uses `config.mem_len`. 0 disables memory.
        initial: `empty` or `zeros`, see MemoryConfig.
        device: device of the model.
        dtype: dtype of the model's weights.

    Raises:
        InputError: `mem_len` is negative or `initial` is unknown.
    """
    length = config.mem_len if mem_len is None else mem_len
    check_minimum("mem_len", length, 0, "Set mem_len=0 for no memory.")
    if initial not in ("empty", "zeros"):
        raise InputError(f"initial={initial!r} is invalid: it must be 'empty' or 'zeros'.")
    hidden = torch.zeros(config.n_layer, rows, length, config.d_model, device=device, dtype=dtype)
    return Memory(hidden, torch.full((rows,), length if initial == "zeros" else 0, device=device))
