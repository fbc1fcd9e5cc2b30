"""Attention on GPUs: a product that stores position scores under their keys, then a flash kernel; forward and backward.

Scores of a row n against a key j are s = c.key[j] + bias[n, j] + step[n] * different[n, j], where bias[n, j] = p.place_keys[d] for d,
their distance. `score_places` computes bias by distance and stores each number in the column of its key, for rows in their order and
for rows at any place alike, so that the kernels that follow read whole tiles of it. `attend` then goes over tiles of keys, keeps
the largest score m of each row and the sum of 2^(s - m) so far (Dao et al. 2022, FlashAttention), and no probability is ever in memory.

The backward pass has the row's log2 of that sum, L, so that P = 2^(s - L) can be computed again, tile by tile (s in units of log 2). With
o = P' value, P' being P after dropout, and `delta` = sum(do * o), which is the sum of dP * P over a row's keys:

    d value = P'^T do        dP = (do value^T) where kept, times 1/(1 - dropout)        ds = P * (dP - delta)
    d key = ds^T c           dc = ds key           d step = sum of ds where different
    dp = ds' place_keys      d place_keys = ds'^T p          ds': ds moved back from keys to distances

Sums over rows and sums over keys are taken by programs of their own, `differentiate_keys` and `differentiate_rows`: twice the scores, but
nobody adds into another's result, so gradients are the same bits each time. The bias (B, H, N, K) lives only during a layer's forward
pass and again, computed anew, during its backward pass, where ds is stored in its place.

Dropout draws its seed from torch's generator, and 16 bits for each probability by Philox, from seed, head, row and key alone: the backward
pass draws them again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from xlpre.model.geometry import Geometry
from xlpre.model.kernels import triton_kernels
from xlpre.model.terms import Scores
from xlpre.model.visibility import HIDDEN

GRANULE = 128  # rows and keys are padded to a multiple of it; every tile divides it
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Tile(NamedTuple):
    """How a kernel is cut.

    Attributes:
        rows: of a tile,
        keys: of it, or distances.
        warps: of a program.
        stages: tiles that are loaded ahead.
    """

    rows: int
    keys: int
    warps: int
    stages: int


# For heads up to 64, 128 and 256 wide, and for fp32: the largest tiles tried that spill no register on sm_90 in bf16, with and without
# dropout, and take less than the 99 KB of shared memory that the smallest GPUs of compute capability 8 have; heads wider than 128, and
# fp32, whose products run outside tensor cores, spill some bytes (benchmarks/triton_aot.py). One program of 8 warps then fills a
# multiprocessor's registers.
TILES: dict[str, tuple[Tile, ...]] = {
    "score_places": (Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(32, 32, 4, 1), Tile(32, 32, 8, 1)),
    "attend": (Tile(128, 64, 8, 3), Tile(128, 32, 8, 2), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    "differentiate_keys": (Tile(64, 128, 8, 2), Tile(32, 64, 8, 2), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    "differentiate_rows": (Tile(128, 64, 8, 3), Tile(64, 32, 8, 2), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    "differentiate_place_queries": (Tile(128, 64, 8, 3), Tile(64, 64, 4, 3), Tile(32, 32, 4, 1), Tile(32, 32, 8, 1)),
    "differentiate_place_keys": (Tile(64, 128, 8, 3), Tile(64, 64, 4, 3), Tile(32, 32, 4, 1), Tile(32, 32, 8, 1)),
}


def tile_of(kernel: str, width: int, dtype: torch.dtype) -> Tile:
    """The tile of a kernel for heads of `width`."""
    return TILES[kernel][3 if dtype == torch.float32 else (width > 64) + (width > 128)]


@dataclass(frozen=True)
class Prepared:
    """Of a step.

    Attributes:
        row_facts: (B, 6, N padded) int32: rank, column of the key of its own place or -1, column of its place, segment, and the
            first and one after the last key that any row of its granule sees.
        key_facts: (B, 4, K padded) int32: rank, segment, first and one after the last row that sees any key of its granule.
        direction: (B,) int32.
        n_distances: R.
        reach: see Geometry.
    """

    row_facts: Tensor
    key_facts: Tensor
    direction: Tensor
    n_distances: int
    reach: int | None


class Triton:
    """See the module."""

    def prepare(self, geometry: Geometry, like: Tensor) -> Prepared:
        """Ranks, places and segments as integers; nothing of size N x K is kept."""
        N, K = geometry.query_rank.size(1), geometry.n_keys
        column = geometry.positions + (K - geometry.n_tokens)
        own = torch.where(torch.arange(N, device=column.device) < geometry.n_own, column, -1)
        seen = geometry.visible()
        of_rows = (geometry.query_rank, own, column, geometry.row_segments, *_hulls(seen))
        of_keys = (geometry.key_rank, geometry.key_segments, *_hulls(seen.transpose(1, 2)))
        row_facts, key_facts = torch.stack([x.int() for x in of_rows], 1), torch.stack([x.int() for x in of_keys], 1)
        row_facts = torch.cat([row_facts, row_facts[:, :, -1:].expand(-1, -1, -N % GRANULE)], 2)
        key_facts = F.pad(key_facts, (0, -K % GRANULE), value=HIDDEN)
        return Prepared(
            row_facts.contiguous(),
            key_facts.contiguous(),
            geometry.direction.int(),
            geometry.distances.size(1),
            geometry.reach,
        )

    @torch.compiler.disable
    def attend(self, scores: Scores, key: Tensor, value: Tensor, geometry: Geometry, dropout: float) -> Tensor:
        """See Backend."""
        E, dtype = key.size(3), key.dtype
        if E > 256 or dtype not in DTYPES:
            raise ValueError(
                f"model.attention=triton computes heads up to 256 wide in bf16, fp16 and fp32, not {E} in {dtype}; "
                f"set model.attention=sdpa"
            )
        width = max(16, 1 << (E - 1).bit_length())
        place = place_keys = step = offsets = None
        if scores.place_keys is not None:
            place = _padded(scores.with_bias(scores.place_bias), width)
            place_keys = _padded(scores.place_keys, width)
        if scores.place_offsets is not None:
            offsets = scores.place_offsets * scores.scale
        if scores.step is not None:
            step = torch.einsum("bnhe,he->bhn", scores.with_bias(scores.step_bias), scores.step)
        content = _padded(scores.with_bias(scores.content_bias), width)
        keys, values = _padded(key, width), _padded(value, width)
        given = (content, place, place_keys, offsets, step, keys, values)
        return _Attention.apply(*given, geometry.prepared, dropout)[..., :E]


class _Attention(torch.autograd.Function):
    """Of content queries, place queries (B, N, H, E), place keys (2, R, H, E), offsets (2, R, H), steps (B, H, N), keys and values."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        place: Tensor | None,
        place_keys: Tensor | None,
        offsets: Tensor | None,
        step: Tensor | None,
        key: Tensor,
        value: Tensor,
        prepared: Prepared,
        dropout: float,
    ) -> Tensor:
        query, key, value = (x.contiguous() for x in (query, key, value))
        place, place_keys, offsets, step = (
            None if x is None else x.contiguous() for x in (place, place_keys, offsets, step)
        )
        seed = torch.randint(2**62, (1,), device=query.device) if dropout else None
        launch = _Launch(query, key, prepared, dropout, place is not None, step is not None)
        bias = launch.bias(place, place_keys, offsets)
        out = torch.empty_like(query)
        log_total = query.new_empty(launch.lines, dtype=torch.float32)
        launch.over_rows("attend", query, key, value, bias, step, *launch.facts, seed, out, log_total, *launch.rule)
        ctx.save_for_backward(query, place, place_keys, offsets, step, key, value, seed, out, log_total)
        ctx.launch = launch
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        query, place, place_keys, offsets, step, key, value, seed, out, log_total = ctx.saved_tensors
        launch = ctx.launch
        d_out = d_out.contiguous()
        delta = torch.einsum("bnhe,bnhe->bhn", d_out.float(), out.float()).contiguous()
        bias = launch.bias(place, place_keys, offsets)
        given = (query, key, value, bias, step, *launch.facts, seed, log_total, d_out, delta)
        d_query, d_key, d_value = (torch.empty_like(x) for x in (query, key, value))
        d_step = None if step is None else torch.empty_like(step)
        launch.over_keys("differentiate_keys", *given, d_key, d_value, *launch.rule)
        launch.over_rows("differentiate_rows", *given, d_query, d_step, *launch.rule)
        # the bias is that of the scores no more
        d_places = launch.differentiate_places(place, place_keys, offsets, bias)
        return d_query, *d_places, d_step, d_key, d_value, None, None


class _Launch:
    """Calls kernels on the tensors of one layer."""

    def __init__(
        self, query: Tensor, key: Tensor, prepared: Prepared, dropout: float, places: bool, segments: bool
    ) -> None:
        B, N, H, E = query.shape
        self._prepared, self._groups, self._like = prepared, B * H, (E, query.dtype)
        self._length = {"rows": N, "keys": key.size(1), "distances": prepared.n_distances}
        self.facts = (prepared.row_facts, prepared.key_facts)
        self._pitches = (prepared.row_facts.size(2), prepared.key_facts.size(2))
        self.lines = (B, H, N)
        threshold = round(dropout * 2**16)  # of 16 random bits
        reach = prepared.reach
        self.rule = (
            *(N, key.size(1), H),
            *self._pitches,
            *(reach or 0, threshold, 2**16 / max(2**16 - threshold, 1)),
            *(places, segments, reach is not None, dropout > 0),
        )
        self._sizes = (N, key.size(1), prepared.n_distances, H, *self._pitches)

    def bias(self, place: Tensor | None, place_keys: Tensor | None, offsets: Tensor | None) -> Tensor | None:
        """Position scores (B, H, N, K padded), between the first and last key that rows see."""
        if place is None:
            return None
        bias = place.new_empty(*self.lines, self._pitches[1])
        given = (place, place_keys, offsets, self._prepared.row_facts, self._prepared.direction, bias)
        self.over_rows("score_places", *given, *self._sizes, offsets is not None)
        return bias

    def differentiate_places(
        self, place: Tensor | None, place_keys: Tensor | None, offsets: Tensor | None, d_bias: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of place queries, place keys and offsets."""
        if place is None or place_keys is None:
            return None, None, None
        direction, row_facts = self._prepared.direction, self._prepared.row_facts
        d_place = torch.empty_like(place)
        given = (place_keys, row_facts, direction, d_bias, d_place)
        self.over_rows("differentiate_place_queries", *given, *self._sizes)
        of_each = place.new_empty(len(direction), *place_keys.shape[1:], dtype=torch.float32)
        offset_of_each = None if offsets is None else of_each.new_empty(of_each.shape[:3])
        written = (place, row_facts, d_bias, of_each, offset_of_each)
        self._call("distances", "differentiate_place_keys", *written, *self._sizes, offsets is not None)
        # a product, because index_add would add in any order
        member = (direction == torch.arange(2, device=direction.device)[:, None]).float()
        d_place_keys = (member @ of_each.flatten(1)).view(place_keys.shape).to(place_keys.dtype)
        if offsets is None or offset_of_each is None:
            return d_place, d_place_keys, None
        return d_place, d_place_keys, (member @ offset_of_each.flatten(1)).view(offsets.shape).to(offsets.dtype)

    def over_rows(self, kernel: str, *given: Any) -> None:
        """A program for each tile of rows."""
        self._call("rows", kernel, *given)

    def over_keys(self, kernel: str, *given: Any) -> None:
        """A program for each tile of keys."""
        self._call("keys", kernel, *given)

    def _call(self, over: str, kernel: str, *given: Any) -> None:
        E, dtype = self._like
        tile = tile_of(kernel, E, dtype)
        size = tile.rows if over == "rows" else tile.keys
        grid = (-(-self._length[over] // size), self._groups)
        launched = getattr(triton_kernels, kernel)[grid]
        launched(*given, E, tile.rows, tile.keys, num_warps=tile.warps, num_stages=tile.stages)


def _hulls(seen: Tensor) -> tuple[Tensor, Tensor]:
    """For each of L rows the first and one after the last of X keys that its granule sees, (B, L); (B, L, X) bool given."""
    B, L, X = seen.shape
    together = F.pad(seen, (0, 0, 0, -L % GRANULE)).view(B, -1, GRANULE, X).any(2)
    number = torch.arange(X, device=seen.device)
    last = torch.where(together, number + 1, 0).amax(-1)
    first = torch.where(together, number, X).amin(-1).minimum(last)
    return first.repeat_interleave(GRANULE, 1)[:, :L], last.repeat_interleave(GRANULE, 1)[:, :L]


def _padded(x: Tensor, width: int) -> Tensor:
    """To heads of `width`, with zeros."""
    return F.pad(x, (0, width - x.size(-1))) if width > x.size(-1) else x
