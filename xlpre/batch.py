"""Batch: the only contract between data and model."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

SHAPES = {
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
    """B rows of one window each. Every objective fills every field, so nothing downstream asks which one it was.

    Making one of tensors of other shapes or types raises ValueError; numbers are not looked at, which would wait for a device. Who asks
    for hidden states alone may replace `target_positions` by others, of another P.

    Attributes:
        input_ids: (B, T) int64, what the content stream reads.
        segment_ids: (B, T) int64; only equality matters (A 0, B 1, cls 2).
        query_rank: (B, T) int32. Row i sees the keys ranked below it; the content stream also sees itself.
        key_rank: (B, T) int32.
        target_positions: (B, P) int64, places in the window, none twice, in increasing order.
        targets: (B, P) int64, the tokens to predict; also where a weight is 0 one of the vocabulary's.
        target_weights: (B, P) float32; 0 where a row has fewer targets.
        backward: (B,) bool, the row was laid out from right to left.
        remembers: (B,) int64, how many tokens before the window the row's memory may show: 0 where its lane jumped, many where
            it goes on.
        pair_label: (B,) int64, 1 if B follows A in the text.
        reuse_len: how many first tokens of the window enter memory; the rest is read again in the next window.
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
        needed = {"BT": (B, T), "B": (B,)}
        for name, (letters, dtype) in SHAPES.items():
            x = getattr(self, name)
            if not isinstance(x, Tensor) or x.dtype is not dtype or x.shape != needed.get(letters, (B, *x.shape[1:2])):
                found = f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
                raise ValueError(
                    f"Batch.{name} is {found}; it must be a tensor of ({', '.join(letters)}) {dtype}, with (B, T) as of input_ids"
                )
        if not 0 <= self.reuse_len <= T:
            raise ValueError(f"Batch.reuse_len ({self.reuse_len}) counts tokens of a window; it must be from 0 to {T}")

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory, from which copies to a GPU are asynchronous."""
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, change) -> Batch:  # type: ignore[no-untyped-def]
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return Batch(**{name: change(v) if isinstance(v, Tensor) else v for name, v in values.items()})
