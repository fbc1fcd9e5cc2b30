"""Memory: cached hidden states of earlier windows (Transformer-XL section 3.2), owned by the loop, row by row.

Entry i holds inputs of layer i. Only the reused part of a window enters it, and no gradient reaches it. At evaluation a cache of keys
and values may stand in its place (model/cache.py): Past is what both are to the backbone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from xlpre.model.attention_mask import afresh
from xlpre.model.config import ModelConfig
from xlpre.model.visibility import HIDDEN

MEMORY_RANK = -1  # below every token of the window

Projection = Callable[[Tensor], tuple[Tensor, Tensor]]  # from hidden states (B, M, D) to keys and values (B, M, H, E)


@dataclass(frozen=True)
class MemoryConfig:
    """How memory starts.

    Attributes:
        initial: `empty`: nothing can be seen until a window has been read. `zeros`: zeros that are attended to, as in the
            original.
        at_document_end: `carry`: memory goes on into the next document, as in the original. `cut`: a window is shown no memory
            from before the document that its first token is of.
    """

    initial: Literal["empty", "zeros"] = "empty"
    at_document_end: Literal["carry", "cut"] = "carry"


class Attended(Protocol):
    """What the rows of a layer attend to: memory, then content."""

    def keys_values(self, project: Projection) -> tuple[Tensor, Tensor]:
        """Keys and values, (B, K, H, E) each; `project` is how the layer makes them of hidden states."""


@dataclass(frozen=True)
class States:
    """Hidden states to attend to.

    Attributes:
        memory: (B, M, D), no gradient.
        content: (B, T, D).
    """

    memory: Tensor
    content: Tensor

    def keys_values(self, project: Projection) -> tuple[Tensor, Tensor]:
        """See Attended. Memory is projected by itself: a product without the gradient of its input."""
        of_memory, of_content = project(self.memory), project(self.content)
        key, value = (torch.cat(both, dim=1) for both in zip(of_memory, of_content, strict=True))
        return key, value


class Past(ABC):
    """What each row read before, as M columns for every layer.

    Attributes:
        valid: (B,) int64, how many of the last columns belong to the row; the others are not seen.
        once: `once(make, *given)` is `make(*given)`, of the weights and of sizes alone; where weights do not change, it may be
            what was made before.
    """

    valid: Tensor
    once: Callable[..., Any]

    @property
    @abstractmethod
    def n_columns(self) -> int:
        """M."""

    @abstractmethod
    def attended(self, layer: int, content: Tensor, project: Projection) -> Attended:
        """What rows of a layer attend to, in a window whose content stream is `content` (B, T, D)."""

    @abstractmethod
    def extended(self, attended: Sequence[Any], n_new: int, visible_mem_len: Tensor) -> Past:
        """What is past after a window: the first `n_new` places of what its layers attended to are appended, M columns kept."""

    @abstractmethod
    def check(self, config: ModelConfig, rows: int, like: Tensor) -> None:
        """Raise ValueError unless a model of `config`, with weights like `like`, can read on from it with so many rows."""

    def key_rank(self, visible_mem_len: Tensor) -> Tensor:
        """Ranks of the M columns: visible to all, or hidden where empty or older than the row remembers. (B, M) int32."""
        age = torch.arange(self.n_columns, 0, -1, device=self.valid.device)
        seen = age <= self._shown(visible_mem_len)[:, None]
        return torch.where(seen, MEMORY_RANK, HIDDEN).to(torch.int32)

    def valid_after(self, n_new: int, visible_mem_len: Tensor) -> Tensor:
        """`valid` after a window of which `n_new` columns are appended."""
        return (self._shown(visible_mem_len) + n_new).clamp(max=self.n_columns)

    def _shown(self, visible_mem_len: Tensor) -> Tensor:
        """How many of the last columns a window of each row sees, of which it `visible_mem_len` (B,) tokens. (B,) int64."""
        return torch.minimum(self.valid, visible_mem_len)


@dataclass(frozen=True)
class Memory(Past):
    """Hidden states of what each row read before.

    Attributes:
        hidden: (L, B, M, D), oldest column first.
        valid: (B,) int64, how many of the last columns belong to the row; the others are not seen.
    """

    hidden: Tensor
    valid: Tensor
    once = staticmethod(afresh)

    @property
    def n_columns(self) -> int:
        """M."""
        return self.hidden.size(2)

    def attended(self, layer: int, content: Tensor, project: Projection) -> States:
        """See Past."""
        return States(self.hidden[layer], content)

    def extended(self, attended: Sequence[States], n_new: int, visible_mem_len: Tensor) -> Memory:
        """See Past."""
        new = torch.stack([states.content[:, :n_new] for states in attended])
        return Memory(extend_memory(self.hidden, new), self.valid_after(n_new, visible_mem_len))

    def check(self, config: ModelConfig, rows: int, like: Tensor) -> None:
        """See Past."""
        found, needed = tuple(self.hidden.shape), (config.n_layer, rows, self.n_columns, config.d_model)
        mixed = self.hidden.dtype != like.dtype and not torch.is_autocast_enabled(like.device.type)
        if found != needed or mixed or len(self.valid) != rows:
            raise ValueError(
                f"memory of hidden states {found} {self.hidden.dtype} for {len(self.valid)} rows; this model and batch need {needed} "
                f"{like.dtype}; begin with first_memory(config, rows={rows}, dtype={like.dtype}), and keep to the rows"
            )

    def reset_nonfinite_rows(self) -> Memory:
        """Memory whose rows with any value that is not finite are emptied; the others are as they were, bit for bit.

        Such a value would reach every later window of its lane. Columns that are not seen count too: their probability is 0, and
        0 times inf or nan is nan.
        """
        finite = self.finite_rows()
        return Memory(self.hidden.masked_fill(~finite[None, :, None, None], 0), self.valid * finite)

    def finite_rows(self) -> Tensor:
        """(B,) bool, whether every value of a row is finite, in any layer and column."""
        return self.hidden.isfinite().all(3).all(2).all(0)


def extend_memory(memory: Tensor, hidden: Tensor) -> Tensor:
    """Append `hidden` (L, B, R, D) to `memory` (L, B, M, D), keep the last M columns, cut the gradient."""
    length, n_new = memory.size(2), min(hidden.size(2), memory.size(2))
    # narrow, because [-0:] would keep everything; before joining, so that no column that is cut stays in storage
    kept = memory.narrow(2, n_new, length - n_new)
    new = hidden.narrow(2, hidden.size(2) - n_new, n_new)
    return torch.cat([kept, new.to(memory.dtype)], dim=2).detach()


def initial_memory(
    model: ModelConfig,
    rows: int,
    *,
    mem_len: int | None = None,
    initial: str = "empty",
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Memory:
    """The memory before the first window: `mem_len` (default: the model's) columns of zeros, none of them valid if `empty`.

    Args:
        model: whose memory; `config` of a model or a folder.
        rows: B.
        mem_len: M; 0 is no memory.
        initial: `empty` or `zeros`, see MemoryConfig.
        device: of the model.
        dtype: of the model's weights.

    Raises:
        ValueError: a length below 0, another `initial`.
    """
    length = model.mem_len if mem_len is None else mem_len
    if length < 0 or initial not in ("empty", "zeros"):
        raise ValueError(f"mem_len ({length}) must be at least 0, and initial ({initial!r}) 'empty' or 'zeros'")
    hidden = torch.zeros(model.n_layer, rows, length, model.d_model, device=device, dtype=dtype)
    return Memory(hidden, torch.full((rows,), length if initial == "zeros" else 0, device=device))
