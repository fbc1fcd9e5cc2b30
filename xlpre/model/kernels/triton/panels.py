"""Panels of query rows, which bound the memory of attention on a GPU.

A panel is a range of query rows, for all batch rows, heads and keys. Panels are computed one after another, and only the position
scores and the dropout mask of the current panel are in memory. These take at most PANEL_BYTES, or as much as a panel of TILE_MULTIPLE rows
if that is more. So the memory of attention grows linearly with the window.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from xlpre.model.kernels.triton.launch import KernelArgs
from xlpre.model.kernels.triton.tiles import TILE_MULTIPLE

# XLNet-Large in 16 bits with two streams, a window of 512, memory of 384 and dropout needs 1.2e9 bytes for 64 batch rows,
# which fit into one panel
PANEL_BYTES = 5 * 2**28
# dimension of the query rows, for inputs that have one; the gradients of the other inputs are sums over query rows
ROW_DIM = {"query": 1, "segment_score": 2}


@contextmanager
def smallest_panels() -> Iterator[None]:
    """Use panels of TILE_MULTIPLE rows within the context, so that few rows make several panels."""
    global PANEL_BYTES
    usual, PANEL_BYTES = PANEL_BYTES, 0
    try:
        yield
    finally:
        PANEL_BYTES = usual


class Panel(NamedTuple):
    """A range of query rows.

    Attributes:
        args: arguments of the attention operator, restricted to these rows.
        first_row: index of the first row of the panel among all query rows.
        sum_dtype: dtype of the gradients of keys and values.
    """

    args: KernelArgs
    first_row: int
    sum_dtype: torch.dtype

    @property
    def rows(self) -> slice:
        """Range of the panel among all query rows."""
        return slice(self.first_row, self.first_row + self.args.query.size(1))


def split_rows(n_rows: int, row_bytes: int) -> list[tuple[int, int]]:
    """Divide query rows into panels of equal length. The last panel may be shorter.

    Args:
        n_rows: number of rows.
        row_bytes: bytes that each row needs in memory.

    Returns:
        Start and end of each panel. Starts are multiples of TILE_MULTIPLE.
    """
    max_rows = max(PANEL_BYTES // max(row_bytes, 1) // TILE_MULTIPLE, 1) * TILE_MULTIPLE
    if n_rows <= max_rows:
        return [(0, n_rows)]
    n_panels = -(-n_rows // max_rows)
    panel_rows = -(-n_rows // (n_panels * TILE_MULTIPLE)) * TILE_MULTIPLE
    return [(start, min(start + panel_rows, n_rows)) for start in range(0, n_rows, panel_rows)]


def split_panels(args: KernelArgs) -> Iterator[Panel]:
    """Yield the panels of all rows. A single panel holds `args` itself."""
    B, N, H, _ = args.query.shape
    k_pitch = args.key_info.size(2)
    bias_bytes = 0 if args.pos_key is None else k_pitch * args.query.element_size()
    mask_bytes = 0 if args.seed is None else k_pitch // 8
    ranges = split_rows(N, B * H * (bias_bytes + mask_bytes))
    if len(ranges) == 1:
        yield Panel(args, 0, args.key.dtype)
        return
    args = args.contiguous()
    for start, end in ranges:
        yield Panel(_slice_rows(args, start, end), start, torch.float32)


def merge_gradients(panel_gradients: Iterable[dict[str, Tensor]], args: KernelArgs) -> list[Tensor]:
    """Merge the gradients of all panels. Gradients that are sums over query rows are added in fp32 and rounded at the end.

    Args:
        panel_gradients: gradients of each panel, by name.
        args: arguments of all rows.

    Returns:
        Gradients in the order of `KernelArgs.differentiable`.
    """
    parts: dict[str, list[Tensor]] = {}
    for gradients in panel_gradients:
        for name, x in gradients.items():
            if name in parts and name not in ROW_DIM:
                parts[name][0] += x
            else:
                parts.setdefault(name, []).append(x)
    return [concat(parts[name], ROW_DIM.get(name, 0)).to(x.dtype) for name, x in args.differentiable.items()]


def concat(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenate the parts of all panels. A single part is returned without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def _slice_rows(args: KernelArgs, start: int, end: int) -> KernelArgs:
    """Return the arguments of rows `start` to `end`. The ranges of rows in its `key_info` count from `start`."""
    key_info, row_range = args.key_info.split(2, 1)
    return args._replace(
        query=args.query[:, start:end],
        segment_score=None if args.segment_score is None else args.segment_score[:, :, start:end],
        row_info=args.row_info[:, :, start : end if end < args.query.size(1) else None],
        key_info=torch.cat([key_info, (row_range - start).clamp(0, end - start)], 1),
    )
