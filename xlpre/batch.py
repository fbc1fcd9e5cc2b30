"""Batch: the input of a model, built by the data loader or by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from xlpre.common.errors import InputError

ALL_MEMORY = torch.iinfo(torch.int32).max  # visible_mem_len of a row that sees all valid memory
HIDDEN_RANK = torch.iinfo(torch.int32).max  # key rank of padding and invalid memory: no query sees these keys

FIELD_SPECS = {
    "input_ids": ("BT", torch.int64),
    "segment_ids": ("BT", torch.int64),
    "query_rank": ("BT", torch.int32),
    "key_rank": ("BT", torch.int32),
    "target_positions": ("BP", torch.int64),
    "targets": ("BP", torch.int64),
    "target_weights": ("BP", torch.float32),
    "backward": ("B", torch.bool),
    "visible_mem_len": ("B", torch.int64),
    "pair_label": ("B", torch.int64),
}


@dataclass(frozen=True)
class Batch:
    """B rows with one window of T tokens each.

    Every objective fills all fields, so the model does not depend on the objective. The constructor checks shapes and dtypes. It does not
    check values, because that would synchronize with the device. If only hidden states are computed, `target_positions` may differ from
    `targets` in length.

    Attributes:
        input_ids: (B, T) int64, input of the content stream.
        segment_ids: (B, T) int64: 0 for A, 1 for B, 2 for <cls>. The model only compares them for equality.
        query_rank: (B, T) int32, rank of each token as a query. A query sees the keys with a lower rank. In the content stream, a token
            also sees itself.
        key_rank: (B, T) int32, rank of each token as a key.
        target_positions: (B, P) int64, positions in the window, strictly increasing in each row.
        targets: (B, P) int64, token ids to predict. They must be valid even where the weight is 0.
        target_weights: (B, P) float32, 0 where a row has fewer than P targets.
        backward: (B,) bool, True if the row is read from right to left.
        visible_mem_len: (B,) int64, number of preceding tokens that the row may see in memory. It is 0 when the lane of the row (the text
            that the row reads, window after window) has just jumped to another position.
        pair_label: (B,) int64, 1 if segment B follows segment A in the text, else 0.
        reuse_len: number of tokens at the start of the window that enter memory. The next window starts after them.

    Raises:
        InputError: a field has the wrong shape or dtype, or `reuse_len` is not between 0 and T.
    """

    input_ids: Tensor
    segment_ids: Tensor
    query_rank: Tensor
    key_rank: Tensor
    target_positions: Tensor
    targets: Tensor
    target_weights: Tensor
    backward: Tensor
    visible_mem_len: Tensor
    pair_label: Tensor
    reuse_len: int

    def __post_init__(self) -> None:
        shape: tuple[int, ...] = getattr(self.input_ids, "shape", ())
        B, T = shape if len(shape) == 2 else (-1, -1)
        shapes = {"BT": (B, T), "B": (B,)}
        for name, (letters, dtype) in FIELD_SPECS.items():
            x = getattr(self, name)
            if not isinstance(x, Tensor) or x.dtype is not dtype or x.shape != shapes.get(letters, (B, *x.shape[1:2])):
                actual = (
                    f"shape {tuple(x.shape)} and {x.dtype}" if isinstance(x, Tensor) else f"type {type(x).__name__}"
                )
                raise InputError(
                    f"Batch.{name} of {actual} is invalid: it must be a tensor ({', '.join(letters)}) of {dtype}, where "
                    "input_ids is (B, T). Convert it."
                )
        if not 0 <= self.reuse_len <= T:
            raise InputError(
                f"Batch.reuse_len={self.reuse_len} is invalid: it must be between 0 and the window length {T}."
            )

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on `device`."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """Return the batch in pinned memory, from which copies to a GPU are asynchronous."""
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        tensors: dict[str, Any] = {name: function(getattr(self, name)) for name in FIELD_SPECS}
        return dataclasses.replace(self, **tensors)


def make_batch(
    input_ids: Tensor,
    query_rank: Tensor,
    key_rank: Tensor,
    target_positions: Tensor,
    *,
    segment_ids: Tensor | None = None,
    targets: Tensor | None = None,
    target_weights: Tensor | None = None,
    backward: Tensor | None = None,
    visible_mem_len: Tensor | None = None,
    pair_label: Tensor | None = None,
    reuse_len: int = 0,
) -> Batch:
    """Build a Batch whose omitted fields have neutral values.

    Defaults: one segment, target ids 0 with weight 1, rows from left to right, no visible memory, pair label 1.

    Args: see Batch.
    """
    zeros = input_ids.new_zeros(len(input_ids))
    return Batch(
        input_ids=input_ids,
        segment_ids=torch.zeros_like(input_ids) if segment_ids is None else segment_ids,
        query_rank=query_rank,
        key_rank=key_rank,
        target_positions=target_positions,
        targets=torch.zeros_like(target_positions) if targets is None else targets,
        target_weights=torch.ones_like(target_positions, dtype=torch.float32)
        if target_weights is None
        else target_weights,
        backward=zeros.bool() if backward is None else backward,
        visible_mem_len=zeros if visible_mem_len is None else visible_mem_len,
        pair_label=zeros + 1 if pair_label is None else pair_label,
        reuse_len=reuse_len,
    )


def causal_batch(
    input_ids: Tensor,
    n_targets: int,
    *,
    targets: Tensor | None = None,
    visible_mem_len: Tensor | None = None,
    reuse_len: int = 0,
) -> Batch:
    """Build a Batch whose tokens see themselves and the tokens before them.

    Args:
        input_ids: (B, T) token ids.
        n_targets: P; the targets are at the last P positions.
        targets: (B, P) token ids. None: only hidden states or logits are needed.
        visible_mem_len: (B,) see Batch. None: no memory is visible.
        reuse_len: see Batch.
    """
    position = torch.arange(input_ids.size(1), dtype=torch.int32, device=input_ids.device).expand_as(input_ids)
    return make_batch(
        input_ids,
        position + 1,
        position,
        position[:, input_ids.size(1) - n_targets :].long(),
        targets=targets,
        visible_mem_len=visible_mem_len,
        reuse_len=reuse_len,
    )
