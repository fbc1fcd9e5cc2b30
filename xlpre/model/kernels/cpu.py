"""Attention on processors, in fp32: block by block of rows, with a backward pass by hand.

A block of rows, of a few heads or batch rows, has scores few enough to stay in the cache from product to softmax to product.
It has only the keys that any of its rows sees: the reused part of a window never sees the rest. Rows in their order need the
distances of their block only, n + k - 1 of them, and get them aligned with their keys as a view (Transformer-XL appendix B).

With scores s = c.key + p.place_keys + step * different, probabilities P = softmax(s), P' after dropout, output o = P' value:

    d value = P'^T do        dP = (do value^T) where kept, times 1/(1 - dropout)        ds = P * (dP - do.o)
    dc = ds key              d key = ds^T c
    dp = ds' place_keys      d place_keys = ds'^T p          ds': ds moved back from keys to distances
    d step = sum of ds where different

because the sum of dP * P over a row's keys is do.o. Probabilities are kept for the backward pass; those that dropout took have
their sign changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xlpre.model.geometry import Geometry
from xlpre.model.terms import Scores

ROWS = 128  # of a block
SCORES = 1 << 19  # of a part: 2 MB


class Block(NamedTuple):
    """Rows that are computed together.

    Attributes:
        first: of its rows,
        last: one after them.
        n_keys: so many first keys are seen by any of them.
        in_order: the rows follow each other in the window, from place `first` on.
    """

    first: int
    last: int
    n_keys: int
    in_order: bool


@dataclass(frozen=True)
class Prepared:
    """Of a step.

    Attributes:
        blocks: of rows.
        hidden: (B, N, K) bool.
        different: (B, N, K) float32, 1 where segments differ.
        blind: (B, N) bool, rows that see nothing; None where all see something.
        columns: (B, N - n_content, K), see Geometry.columns.
        direction: (B,), see Geometry.
        n_tokens: T.
        n_content: rows in order.
    """

    blocks: list[Block]
    hidden: Tensor
    different: Tensor
    blind: Tensor | None
    columns: Tensor
    direction: Tensor
    n_tokens: int
    n_content: int


class Cpu:
    """See the module."""

    def prepare(self, geometry: Geometry, like: Tensor) -> Prepared:
        """Masks and blocks."""
        visible = geometry.visible()
        n_rows, n_content = visible.size(1), geometry.n_content
        blind = ~visible.any(-1)
        begins = [*range(0, n_content, ROWS), *range(n_content, n_rows, ROWS)]
        seen = visible.any(0)  # (N, K)
        numbers = torch.arange(1, visible.size(2) + 1)
        blocks = []
        for first, last in zip(begins, [*begins[1:], n_rows], strict=True):
            n_keys = int((seen[first:last].any(0) * numbers).max())
            blocks.append(Block(first, last, max(n_keys, 1), last <= n_content))
        return Prepared(
            blocks,
            ~visible,
            geometry.different().to(like.dtype),
            blind if blind.any() else None,
            geometry.columns(n_content, n_rows),
            geometry.direction,
            geometry.n_tokens,
            n_content,
        )

    @torch.compiler.disable
    def attend(self, scores: Scores, key: Tensor, value: Tensor, geometry: Geometry, dropout: float) -> Tensor:
        """See Backend."""
        place = (scores.place_bias, scores.place_keys, scores.place_offsets)
        parts = (scores.query, scores.content_bias, *place, scores.step_bias, scores.step, key, value)
        return _Attention.apply(*parts, scores.scale, geometry.prepared, dropout)


class _Attention(torch.autograd.Function):
    """Batch row and head are one dimension G in all that is computed here: (G, N, E)."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        content_bias: Tensor | None,
        place_bias: Tensor | None,
        place_keys: Tensor | None,
        place_offsets: Tensor | None,
        step_bias: Tensor | None,
        step: Tensor | None,
        key: Tensor,
        value: Tensor,
        scale: float,
        prepared: Prepared,
        dropout: float,
    ) -> Tensor:
        B, _, H, _ = query.shape
        scaled = query.transpose(1, 2) * scale  # (B, H, N, E)
        content, place = (_biased(scaled, bias, scale).flatten(0, 1) for bias in (content_bias, place_bias))
        steps = None if step is None else (_biased(scaled, step_bias, scale) @ step[:, :, None]).flatten(0, 1)
        keys, values = (x.transpose(1, 2).flatten(0, 1) for x in (key, value))
        places = None if place_keys is None else _Places(place_keys, place_offsets, scale, prepared)
        out = torch.empty_like(content)
        kept = []
        for part in _parts(B, H, prepared):
            mine, to_keys = content[part.rows], keys[part.seen].transpose(1, 2)
            score = (
                mine @ to_keys
                if places is None
                else torch.baddbmm(places.scores(place[part.rows], part), mine, to_keys)
            )
            of_rows = score.view(-1, part.heads, *score.shape[1:])  # batch rows apart from heads
            if steps is not None:
                score_step = steps[part.rows].view(*of_rows.shape[:3], 1)
                of_rows.addcmul_(score_step, prepared.different[part.mask][:, None])
            of_rows.masked_fill_(prepared.hidden[part.mask][:, None], torch.finfo(score.dtype).min)
            probability = torch.softmax(score, -1, out=score)
            if prepared.blind is not None:
                of_rows.masked_fill_(prepared.blind[part.mask[:2]][:, None, :, None], 0)
            used = probability
            if dropout:
                taken = taken_by_dropout(probability.shape, dropout)
                probability = torch.where(taken, -probability, probability)
                used = probability.relu().mul_(1 / (1 - dropout))
            torch.bmm(used, values[part.seen], out=out[part.rows])
            kept.append(probability)
        given = (step_bias, step, place_keys, place_offsets)
        ctx.save_for_backward(scaled, content, place, keys, values, out, *given, *kept)
        ctx.prepared, ctx.dropout, ctx.scale = prepared, dropout, scale
        ctx.has_content_bias, ctx.has_place_bias = content_bias is not None, place_bias is not None
        return out.view_as(scaled).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scaled, content, place, keys, values, out, step_bias, step, place_keys, place_offsets, *kept = ctx.saved_tensors
        prepared, dropout, scale = ctx.prepared, ctx.dropout, ctx.scale
        B, H = scaled.shape[:2]
        grad = grad.transpose(1, 2).flatten(0, 1)
        total = (grad * out).sum(-1, keepdim=True)
        d_content, d_keys, d_values = torch.empty_like(content), torch.zeros_like(keys), torch.zeros_like(values)
        d_place: Any = None if place_keys is None else torch.empty_like(content)
        d_steps: Any = None if step is None else torch.empty_like(total)
        places = None if place_keys is None else _Places(place_keys, place_offsets, scale, prepared)
        for part, probability in zip(_parts(B, H, prepared), kept, strict=True):
            mine = grad[part.rows]
            d_score = mine @ values[part.seen].transpose(1, 2)
            used = probability
            if dropout:
                used = probability.relu().mul_(1 / (1 - dropout))
                d_score.mul_(1 / (1 - dropout)).masked_fill_(probability.signbit(), 0)
                probability = probability.abs()
            d_values[part.seen] += used.transpose(1, 2) @ mine
            d_score.sub_(total[part.rows]).mul_(probability)
            torch.bmm(d_score, keys[part.seen], out=d_content[part.rows])
            d_keys[part.seen] += d_score.transpose(1, 2) @ content[part.rows]
            if d_steps is not None:
                of_rows = d_score.view(-1, part.heads, *d_score.shape[1:])
                summed = (of_rows * prepared.different[part.mask][:, None]).sum(-1, keepdim=True)
                d_steps[part.rows] = summed.flatten(0, 1)
            if places is not None:
                d_place[part.rows] = places.backward(d_score, place[part.rows], part)
        d_query, d_step, d_step_bias = d_content.clone(), None, None
        if d_place is not None:
            d_query += d_place
        d_query = d_query.view_as(scaled)
        if d_steps is not None:
            d_steps = d_steps.view(*scaled.shape[:3], 1)
            d_query.addcmul_(d_steps, step[:, None])
            of_heads = d_steps.sum((0, 2))  # (H, 1)
            d_step = (scaled * d_steps).sum((0, 2)) + of_heads * step_bias * scale
            d_step_bias = of_heads * step * scale
        return (
            d_query.mul_(scale).transpose(1, 2),
            d_content.view_as(scaled).sum((0, 2)) * scale if ctx.has_content_bias else None,
            d_place.view_as(scaled).sum((0, 2)) * scale if ctx.has_place_bias else None,
            *((None, None) if places is None else places.gradients()),
            d_step_bias,
            d_step,
            *(x.view(B, H, *x.shape[1:]).transpose(1, 2) for x in (d_keys, d_values)),
            None,
            None,
            None,
        )


class _Places:
    """Position scores of parts, and their gradients, which add up."""

    def __init__(self, keys: Tensor, offsets: Tensor | None, scale: float, prepared: Prepared) -> None:
        self._prepared, self._scale, self._like = prepared, scale, (keys, offsets)
        heads_first = keys.transpose(1, 2)[prepared.direction]  # (B, H, R, E)
        self._keys = heads_first.flatten(0, 1)
        self._offsets = None if offsets is None else (offsets.transpose(1, 2) * scale)[prepared.direction].flatten(0, 1)
        self._d_keys: Any = None
        self._d_offsets: Any = None

    def scores(self, query: Tensor, part: Part) -> Tensor:
        """(g, n, k) of queries (g, n, E)."""
        where = self._where(part)
        by_distance = query @ self._keys[where].transpose(1, 2)
        if self._offsets is not None:
            by_distance += self._offsets[where][:, None]
        if part.block.in_order:
            return self._aligned(by_distance, part)
        of_rows, columns = self._columns(by_distance, part)
        return of_rows.gather(3, columns).flatten(0, 1)

    def backward(self, d_score: Tensor, query: Tensor, part: Part) -> Tensor:
        """The gradient of queries (g, n, E) from that of their scores (g, n, k)."""
        if self._d_keys is None:
            self._d_keys = torch.zeros_like(self._keys)
            self._d_offsets = None if self._offsets is None else torch.zeros_like(self._offsets)
        where = self._where(part)
        keys = self._keys[where]
        moved = d_score.new_empty(*d_score.shape[:2], keys.size(1))
        if part.block.in_order:
            moved[:, :, : moved.size(1) - 1].zero_()  # the two corners that no key is in
            moved[:, :, part.block.n_keys :].zero_()
            self._aligned(moved, part).copy_(d_score)
        else:
            moved.zero_()
            of_rows, columns = self._columns(moved, part)
            of_rows.scatter_(3, columns, d_score.view(columns.shape))
        self._d_keys[where] += moved.transpose(1, 2) @ query
        if self._d_offsets is not None:
            self._d_offsets[where] += moved.sum(1)
        return moved @ keys

    def gradients(self) -> tuple[Tensor, Tensor | None]:
        """Of keys (2, R, H, E) and offsets (2, R, H)."""
        like_keys, like_offsets = self._like
        d_keys = self._of_directions(self._d_keys, like_keys)
        if like_offsets is None:
            return d_keys, None
        return d_keys, self._of_directions(self._d_offsets, like_offsets) * self._scale

    def _of_directions(self, gradient: Tensor, like: Tensor) -> Tensor:
        direction, heads_first = self._prepared.direction, torch.zeros_like(like).transpose(1, 2)
        return heads_first.index_add(0, direction, gradient.view(len(direction), *heads_first.shape[1:])).transpose(
            1, 2
        )

    def _where(self, part: Part) -> tuple[slice, slice]:
        """The distances that a part needs, by index."""
        if not part.block.in_order:
            return part.group, slice(None)
        first = self._prepared.n_tokens - part.block.last + 1
        return part.group, slice(first, first + part.block.n_keys + part.block.last - part.block.first - 1)

    def _aligned(self, by_distance: Tensor, part: Part) -> Tensor:
        """A view (g, n, k) by key of what is (g, n, W) by distance."""
        group, n, width = by_distance.shape
        return by_distance.as_strided((group, n, part.block.n_keys), (n * width, width - 1, 1), n - 1)

    def _columns(self, by_distance: Tensor, part: Part) -> tuple[Tensor, Tensor]:
        """The same with batch rows apart from heads, (b, h, n, W), and for each key its column in it, (b, h, n, k)."""
        of_rows = by_distance.view(-1, part.heads, *by_distance.shape[1:])
        begin = self._prepared.n_content
        rows = slice(part.block.first - begin, part.block.last - begin)
        columns = self._prepared.columns[part.mask[0], rows, : part.block.n_keys]
        return of_rows, columns[:, None].expand(-1, part.heads, -1, -1)


class Part(NamedTuple):
    """A piece of work.

    Attributes:
        block: its rows.
        group: which batch rows and heads: g = b * H + h.
        heads: how many heads of each batch row.
        rows: group and rows, as an index.
        seen: group and keys, as an index.
        mask: batch rows, rows and keys, as an index.
    """

    block: Block
    group: slice
    heads: int
    rows: tuple[slice, slice]
    seen: tuple[slice, slice]
    mask: tuple[slice, slice, slice]


def _parts(n_batch: int, n_heads: int, prepared: Prepared) -> Iterator[Part]:
    """All heads of several batch rows at a time, or some heads of one, so that there are no more than SCORES scores."""
    for block in prepared.blocks:
        rows, seen = slice(block.first, block.last), slice(block.n_keys)
        n_groups = max(1, SCORES // ((block.last - block.first) * block.n_keys))
        if n_groups >= n_heads:
            step = n_groups // n_heads
            pieces = [
                (slice(b, b + step), slice(b * n_heads, min(b + step, n_batch) * n_heads))
                for b in range(0, n_batch, step)
            ]
            heads = n_heads
        else:
            heads = max(h for h in range(1, n_groups + 1) if n_heads % h == 0)
            begins = range(0, n_batch * n_heads, heads)
            pieces = [(slice(g // n_heads, g // n_heads + 1), slice(g, g + heads)) for g in begins]
        for batch, group in pieces:
            yield Part(block, group, heads, (group, rows), (group, seen), (batch, rows, seen))


def _biased(scaled: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """Scaled queries (B, H, N, E) with a bias (H, E), which is not scaled yet."""
    return (scaled if bias is None else scaled + (bias * scale)[:, None]).contiguous()


def taken_by_dropout(shape: torch.Size, dropout: float) -> Tensor:
    """Where dropout takes, bool: 16 random bits an element, four to a draw, which is what costs."""
    n = shape.numel()
    bits = torch.empty((n + 3) // 4, dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
    return (bits[:n] < round(dropout * 2**16) - 2**15).view(shape)
