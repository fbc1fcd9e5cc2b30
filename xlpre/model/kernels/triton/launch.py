"""Calls the GPU kernels of attention on the tensors of one layer."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from xlpre.model.kernels.triton import backward, forward
from xlpre.model.kernels.triton.tiles import tile_of

KERNELS = {
    kernel.__name__: kernel
    for kernel in (
        forward.draw,
        forward.score_places,
        forward.attend,
        backward.differentiate_keys,
        backward.differentiate_rows,
        backward.differentiate_place_queries,
        backward.differentiate_place_keys,
    )
}

# torch.compile's code for GPUs has such a bound in 32 bits (torch 2.11), in which a larger one may be 0
SEEDS = 2**31 - 1


def new_seed(device: torch.device) -> Tensor:
    """(1,) int64 of torch's random numbers there, for which nobody waits."""
    return torch.randint(SEEDS, (1,), device=device)


SHARES = 2**16  # dropout takes so many of these


def dropout_level(dropout: float) -> int:
    """How many of SHARES dropout drops."""
    return min(round(dropout * SHARES), SHARES - 1)


class Given(NamedTuple):
    """What attention is made of.

    Attributes:
        query: (B, N, H, E), scaled, as the biases that are added to it.
        r_w_bias: (H, E).
        r_r_bias: (H, E).
        pos_key: (2, R, H, E).
        offsets: (2, R, H).
        step: (B, H, N).
        key: (B, K, H, E).
        value: (B, K, H, E).
        row_facts: of Prepared (kernels/triton.py),
        key_facts: of it,
        direction: of it.
        seed: (1,) int64 of dropout; None without.
        n_distances: R.
        reach: see Geometry.
        dropout: see Backend.
    """

    query: Tensor
    r_w_bias: Tensor | None
    r_r_bias: Tensor | None
    pos_key: Tensor | None
    offsets: Tensor | None
    step: Tensor | None
    key: Tensor
    value: Tensor
    row_facts: Tensor
    key_facts: Tensor
    direction: Tensor
    seed: Tensor | None
    n_distances: int
    reach: int | None
    dropout: float

    @property
    def threshold(self) -> int:
        """So many of SHARES probabilities dropout drops."""
        return dropout_level(self.dropout)

    @property
    def share(self) -> float:
        """Which share of probabilities it keeps."""
        return 1 - self.threshold / SHARES

    @property
    def differentiable(self) -> tuple[Tensor | None, ...]:
        """Those that have a gradient."""
        return self[:8]

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Those and the other tensors."""
        return self[:12]

    @property
    def settings(self) -> tuple[Any, ...]:
        """What is no tensor."""
        return self[12:]

    def contiguous(self) -> Given:
        """In memory as the kernels read it."""
        tensors: list[Any] = [None if x is None else x.contiguous() for x in self.tensors]
        return Given(*tensors, *self.settings)


class Launch:
    """The kernels on a panel of one layer's rows (kernels/triton_panels.py), perhaps of all.

    Args:
        given: what is of these rows.
        first_row: which of all rows is the first of them.
        sums: in which precision gradients of keys and values are wanted.
    """

    def __init__(self, given: Given, first_row: int, sums: torch.dtype) -> None:
        self._given, self._first_row, self._sums = given.contiguous(), first_row, sums
        given = self._given
        # not kept between the passes, as each is as large as the queries
        self._content = given.query if given.r_w_bias is None else given.query + given.r_w_bias
        self._place = given.query if given.r_r_bias is None else given.query + given.r_r_bias
        (B, N, H, _), K = given.query.shape, given.key.size(1)
        self._groups, self._lines = B * H, (B, H, N)
        self._length = {"rows": N, "keys": K, "distances": given.n_distances}
        self._pitches = (given.row_facts.size(2), given.key_facts.size(2))
        self._seen = (N, K, H, *self._pitches, given.reach or 0)
        self._terms = (given.pos_key is not None, given.step is not None, given.reach is not None, given.dropout > 0)
        self._sizes = (N, K, given.n_distances, H, *self._pitches)

    def bias(self) -> Tensor | None:
        """Position scores (B, H, N, K padded), between the first and last key that rows see."""
        given = self._given
        if given.pos_key is None:
            return None
        bias = self._place.new_empty(*self._lines, self._pitches[1])
        read = (self._place, given.pos_key, given.offsets, given.row_facts, given.direction)
        self.call("rows", "score_places", *read, bias, *self._sizes, given.offsets is not None)
        return bias

    def dropped(self) -> Tensor | None:
        """What dropout drops, (B, H, K padded / 32, N padded) int32, a bit a key, between the first and last key that rows see."""
        given = self._given
        if given.seed is None:
            return None
        n_pitch, k_pitch = self._pitches
        dropped = given.row_facts.new_empty(*self._lines[:2], k_pitch // 32, n_pitch)
        drawn = (given.seed, given.row_facts, dropped, self._first_row, given.threshold)
        self.call("rows", "draw", *drawn, self._lines[1], n_pitch, k_pitch)
        return dropped

    def attend(self) -> tuple[Tensor, Tensor]:
        """The output (B, N, H, E), and log2 of the sum of exponentials times the share that dropout keeps, (B, H, N) float32."""
        query = self._given.query
        out, log_total = torch.empty_like(query), query.new_empty(self._lines, dtype=torch.float32)
        read = self._scored(self.bias(), self.dropped())
        self.call("rows", "attend", *read, out, log_total, *self._seen, self._given.share, *self._terms)
        return out, log_total

    def differentiate(self, d_out: Tensor, delta: Tensor, log_total: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of what is Given, None of what is not."""
        bias = self.bias()
        read = (bias, self.dropped(), log_total.contiguous(), d_out.contiguous(), delta.contiguous())
        d_key, d_value = self.differentiate_keys(*read)
        d_query, d_step = self.differentiate_rows(*read)
        d_place, *d_keys = self.differentiate_places(bias)  # in place of the bias there is its gradient now
        biased = ((self._given.r_w_bias, d_query), (self._given.r_r_bias, d_place))
        d_biases = [None if bias is None or x is None else x.sum((0, 1), dtype=torch.float32) for bias, x in biased]
        if d_place is not None:
            d_query += d_place
        return d_query, *d_biases, *d_keys, d_step, d_key, d_value

    def differentiate_keys(self, *read: Tensor | None) -> tuple[Tensor, Tensor]:
        """Gradients of keys and values; `read`: bias, dropped, log_total, d_out, delta."""
        key, value = self._given.key, self._given.value
        gradients = torch.empty_like(key, dtype=self._sums), torch.empty_like(value, dtype=self._sums)
        self.call(
            "keys", "differentiate_keys", *self._scored(*read[:2]), *read[2:], *gradients, *self._seen, *self._terms
        )
        return gradients

    def differentiate_rows(self, *read: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Gradients of content queries and steps, and that of the bias in its place."""
        step = self._given.step
        gradients = torch.empty_like(self._given.query), None if step is None else torch.empty_like(step)
        self.call(
            "rows", "differentiate_rows", *self._scored(*read[:2]), *read[2:], *gradients, *self._seen, *self._terms
        )
        return gradients

    def differentiate_places(self, d_bias: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of place queries, and float32 of place keys and offsets."""
        place, pos_key, offsets = self._place, self._given.pos_key, self._given.offsets
        if pos_key is None:
            return None, None, None
        direction, row_facts = self._given.direction, self._given.row_facts
        d_place = torch.empty_like(place)
        self.call("rows", "differentiate_place_queries", pos_key, row_facts, direction, d_bias, d_place, *self._sizes)
        elementwise = place.new_empty(len(direction), *pos_key.shape[1:], dtype=torch.float32)
        offset_of_each = None if offsets is None else elementwise.new_empty(elementwise.shape[:3])
        written = (place, row_facts, d_bias, elementwise, offset_of_each)
        self.call("distances", "differentiate_place_keys", *written, *self._sizes, offsets is not None)
        # a product, because index_add would add in any order
        member = (direction == torch.arange(2, device=direction.device)[:, None]).float()
        d_place_keys = (member @ elementwise.flatten(1)).view(pos_key.shape)
        if offsets is None or offset_of_each is None:
            return d_place, d_place_keys, None
        return d_place, d_place_keys, (member @ offset_of_each.flatten(1)).view(offsets.shape)

    def call(self, over: str, kernel: str, *given: Any) -> None:
        """Run one kernel: a program for each tile of `rows`, `keys` or `distances`, and each head of each batch row.

        On tensors without data (torch's meta device) there is nothing to do.
        """
        if self._given.query.is_meta:
            return
        E, dtype = self._given.query.size(3), self._given.query.dtype
        tile = tile_of(kernel, E, dtype)
        size = tile.rows if over == "rows" else tile.keys
        grid = (-(-self._length[over] // size), self._groups)
        launched = KERNELS[kernel]
        width = {"E": E} if "E" in launched.arg_names else {}
        launched[grid](*given, **width, ROWS=tile.rows, KEYS=tile.keys, num_warps=tile.warps, num_stages=tile.stages)

    def _scored(self, bias: Tensor | None, dropped: Tensor | None) -> tuple[Tensor | None, ...]:
        """What probabilities are made of, as the kernels take it."""
        given = self._given
        return self._content, given.key, given.value, bias, given.step, given.row_facts, given.key_facts, dropped
