"""Geometry: what attention must know about places, computed once a step and shared by all layers.

Rows are queries: first the T content rows, if any, in their order, then rows at any places of the window (the query stream,
or the rows that are read out).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from xlpre.batch import Batch
from xlpre.model.visibility import visible


def afresh(make: Callable[..., Any], *given: Any) -> Any:
    """What `make` makes of what is given."""
    return make(*given)


@dataclass(frozen=True)
class AttentionMeta:
    """N queries against K = M + T keys, memory first.

    Attributes:
        query_rank: (B, N) int32,
        key_rank: (B, K) int32: a row sees the keys ranked below it.
        row_segments: (B, N) int64,
        key_segments: (B, K) int64; memory is segment 0.
        positions: (B, N) int64, places of the rows in the window.
        n_content: T, or 0: so many first rows are those of the window in their order.
        n_own: so many first rows also see the key of their own place; those of the content stream.
        reach: keys farther back are not seen; None: no such limit.
        direction: (B,) int64, 0 forward, 1 backward.
        distances: (2, R, ...) what the position scheme makes of each distance (model/positions.py), for both directions,
            from K down to 1 - T; R = K + T.
        once: see Past (model/memory.py): how terms make something of distances.
        prepared: what the attention's backend makes of all this (model/kernels).
    """

    query_rank: Tensor
    key_rank: Tensor
    row_segments: Tensor
    key_segments: Tensor
    positions: Tensor
    n_content: int
    n_own: int
    reach: int | None
    direction: Tensor
    distances: Tensor
    once: Callable[..., Any] = afresh
    prepared: Any = None

    @property
    def n_keys(self) -> int:
        """K."""
        return self.key_rank.size(1)

    @property
    def n_tokens(self) -> int:
        """T."""
        return self.distances.size(1) - self.n_keys

    def visible(self) -> Tensor:
        """Which keys each row sees, (B, N, K) bool."""
        seen = visible(self.query_rank, self.key_rank)
        keys = torch.arange(self.n_keys, device=seen.device)
        back = self.own_key[:, :, None] - keys  # how far
        if self.n_own:
            own = torch.arange(self.query_rank.size(1), device=seen.device)[:, None] < self.n_own
            seen = seen | (own & (back == 0))
        return seen if self.reach is None else seen & (back <= self.reach)

    @property
    def own_key(self) -> Tensor:
        """Which of the keys stands at the place of each row, (B, N)."""
        return self.positions + (self.n_keys - self.n_tokens)

    def some_rows(self, first: int, last: int) -> AttentionMeta:
        """Of rows `first` to `last` alone, for what asks about ranks, places and segments."""
        if (first, last) == (0, self.query_rank.size(1)):
            return self
        ranks, segments, positions = (x[:, first:last] for x in (self.query_rank, self.row_segments, self.positions))
        n_content, n_own = (min(max(n - first, 0), last - first) for n in (self.n_content, self.n_own))
        return replace(
            self, query_rank=ranks, row_segments=segments, positions=positions, n_content=n_content, n_own=n_own
        )

    def different(self) -> Tensor:
        """Where the segments of row and key differ, (B, N, K) bool."""
        return self.row_segments[:, :, None] != self.key_segments[:, None]

    def columns(self, first: int, last: int) -> Tensor:
        """For rows `first` to `last`, the index of each key's distance among the R, (B, last - first, K) int64."""
        start = (self.n_tokens - self.positions[:, first:last])[:, :, None]
        return start + torch.arange(self.n_keys, device=start.device)

    def align(self, by_distance: Tensor) -> Tensor:
        """From scores by distance (B, H, N, R) to scores by key (B, H, N, K)."""
        content, others = by_distance.split([self.n_content, by_distance.size(2) - self.n_content], dim=2)
        aligned = [_shift(content, self.n_keys)] if self.n_content else []
        if others.size(2):
            columns = self.columns(self.n_content, by_distance.size(2))
            aligned.append(others.gather(3, columns[:, None].expand(-1, others.size(1), -1, -1)))
        return torch.cat(aligned, dim=2) if len(aligned) > 1 else aligned[0]

    def places(self) -> Tensor:
        """(2, K, ...) codes of the keys' places, which are distances to the window's last token."""
        return self.distances[:, 1 : self.n_keys + 1]

    def of_rows(self, of_content: Tensor) -> Tensor:
        """(B, N, D) from (B, T, D): what stands at the place of each row."""
        return of_content.gather(1, self.positions[:, :, None].expand(-1, -1, of_content.size(2)))


def build_attention_meta(
    batch: Batch, memory_rank: Tensor, distances: Tensor, reach: int | None, two_streams: bool, n_cls: int
) -> tuple[AttentionMeta, AttentionMeta]:
    """The geometry of all rows, content and query stream, and of the rows that are read out, which the last layer computes: the same
    one where all content rows are.

    Args:
        batch: of B windows.
        memory_rank: (B, M) ranks of the memory's columns.
        distances: codes of distances.
        reach: how far back is seen.
        two_streams: the query stream is read out; else content rows at the targets.
        n_cls: so many last content rows are read out before them.
    """
    ranks, segments, targets = batch.query_rank, batch.segment_ids, batch.target_positions
    in_order = torch.arange(ranks.size(1), device=ranks.device).expand_as(ranks)
    shared: dict[str, Any] = {
        "key_rank": torch.cat([memory_rank, batch.key_rank], dim=1),
        "key_segments": F.pad(segments, (memory_rank.size(1), 0)),
        "reach": reach,
        "direction": batch.backward.long(),
        "distances": distances,
    }
    length, n_targets = ranks.size(1), targets.size(1)
    content, at_targets = (ranks, segments, in_order), (ranks.gather(1, targets), segments.gather(1, targets), targets)
    both = [torch.cat(rows, dim=1) for rows in zip(content, at_targets, strict=True)]
    ranks, segments, places = both if two_streams else content
    everywhere = AttentionMeta(ranks, row_segments=segments, positions=places, n_content=length, n_own=length, **shared)
    if n_targets == length and not (two_streams or n_cls):
        return everywhere, everywhere
    ranks, segments, places = (rows[:, length - n_cls :] for rows in both)
    n_own = n_cls if two_streams else n_cls + n_targets
    read_out = AttentionMeta(ranks, row_segments=segments, positions=places, n_content=0, n_own=n_own, **shared)
    return everywhere, read_out


def _shift(by_distance: Tensor, n_keys: int) -> Tensor:
    """Row t at column j gets distance M + t - j, which stands in column T - t + j: a view, nothing is moved.

    Source: Transformer-XL appendix B.
    """
    rows, heads, length, n_distances = by_distance.shape
    flat = by_distance.reshape(rows, heads, n_distances, length)[:, :, 1:]
    return flat.reshape(rows, heads, length, n_distances - 1)[..., :n_keys]
