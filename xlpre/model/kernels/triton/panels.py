"""What is N x K of a layer's attention on a GPU, kept below a fixed number of bytes: rows are worked on in panels, one after another.

A panel is some next rows of every batch row and head, with all keys: the position scores and dropout's bits of one panel are in memory
while it is worked on, and then those of the next. They take PANEL_BYTES at most, or what the GRANULE rows of the smallest panel take, which
grows with K. So attention's memory grows with the window, and no longer with its square, where all rows together would take more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from xlpre.model.kernels.triton.launch import Given
from xlpre.model.kernels.triton.tiles import GRANULE

# XLNet-Large, two streams, a window of 512 with a memory of 384, in 16 bits with dropout: 1.2e9 bytes for 64 batch rows, so one panel
PANEL_BYTES = 5 * 2**28
# where what is Given and has a gradient has its rows; None: it has none, and its gradient is a sum over rows
ROWS = (1, None, None, None, None, 2, None, None)


class Panel(NamedTuple):
    """Some rows.

    Attributes:
        given: what is Given of them.
        first_row: which of all rows is their first.
        sums: in which precision gradients of keys and values are wanted of them.
    """

    given: Given
    first_row: int
    sums: torch.dtype

    @property
    def rows(self) -> slice:
        """Which of all rows."""
        return slice(self.first_row, self.first_row + self.given.query.size(1))


def cuts(n_rows: int, row_bytes: int) -> list[tuple[int, int]]:
    """First and one after the last row of each panel, where a row takes `row_bytes`; all but the last have as many, in whole granules."""
    most = max(PANEL_BYTES // max(row_bytes, 1) // GRANULE, 1) * GRANULE
    if n_rows <= most:
        return [(0, n_rows)]
    n_panels = -(-n_rows // most)
    rows = -(-n_rows // (n_panels * GRANULE)) * GRANULE
    return [(first, min(first + rows, n_rows)) for first in range(0, n_rows, rows)]


def panels(given: Given) -> Iterator[Panel]:
    """All rows; what there is only one of is what is given itself."""
    B, N, H, _ = given.query.shape
    k_pitch = given.key_facts.size(2)
    bias = 0 if given.pos_key is None else k_pitch * given.query.element_size()
    bits = 0 if given.seed is None else k_pitch // 8
    found = cuts(N, B * H * (bias + bits))
    if len(found) == 1:
        yield Panel(given, 0, given.key.dtype)
        return
    given = given.contiguous()
    for first, last in found:
        yield Panel(_part(given, first, last), first, torch.float32)


def together(gradients: Iterable[tuple[Tensor | None, ...]], given: Given) -> list[Tensor]:
    """From `gradients` of each panel those of what is Given, of those tensors that there are; sums are rounded once."""
    found: list[list[Tensor]] = [[] for _ in ROWS]
    for of_panel in gradients:
        for parts, x, dim in zip(found, of_panel, ROWS, strict=True):
            if x is not None and parts and dim is None:
                parts[0] += x
            elif x is not None:
                parts.append(x)
    elementwise = zip(found, given.differentiable, ROWS, strict=True)
    return [joined(parts, dim or 0).to(x.dtype) for parts, x, dim in elementwise if x is not None]


def joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Of all panels, one after the other; a single one as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def _part(given: Given, first: int, last: int) -> Given:
    """Of rows `first` to `last`; those that see keys are counted from the first of them."""
    of_keys, seen_by = given.key_facts.split(2, 1)
    return given._replace(
        query=given.query[:, first:last],
        step=None if given.step is None else given.step[:, :, first:last],
        row_facts=given.row_facts[:, :, first : last if last < given.query.size(1) else None],
        key_facts=torch.cat([of_keys, (seen_by - first).clamp(0, last - first)], 1),
    )
