"""Two-stream attention (XLNet, section 2.3): one pass computes both streams, as the rows of one tensor.

    content rows   T, one per token. They start from the token embedding and see themselves.
    query rows     P, one per target. They start from a learned vector and do not see the token at their own position.

Every layer computes the N = T + P rows `[content; query]`. Keys and values come from memory and the content rows only. The last layer
computes only the rows whose hidden states are used: the targets, and <cls> for next-sentence prediction.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from xlpre.batch import Batch
from xlpre.model.attention_mask import AttentionMeta


@dataclass(frozen=True)
class _Rows:
    """Ranks, segments and window positions of N content or query rows, (B, N) each."""

    ranks: Tensor
    segments: Tensor
    positions: Tensor


def build_rows(content: Tensor, mask_embedding: Tensor, batch: Batch) -> Tensor:
    """Append a query row for each target to the content rows.

    Args:
        content: (B, T, D) token embeddings.
        mask_embedding: (D,) initial state of every query row.
        batch: B windows with P targets each.

    Returns:
        (B, T + P, D).
    """
    queries = mask_embedding.to(content.dtype).expand(*batch.target_positions.shape, -1)
    return torch.cat([content, queries], dim=1)


def select_output_rows(rows: Tensor, output: AttentionMeta, two_streams: bool, n_cls: int) -> Tensor:
    """Select the rows that the last layer computes.

    Args:
        rows: (B, T + P, D) rows of both streams, or (B, T, D) content rows.
        output: metadata of the selected rows.
        two_streams: True if `rows` includes the query stream.
        n_cls: number of content rows at the end of the window (1 for <cls>, or 0) that are selected before the rows of the targets.

    Returns:
        (B, n_cls + P, D).
    """
    return rows[:, output.n_tokens - n_cls :] if two_streams else output.take_rows(rows)


def build_attention_meta(
    batch: Batch, memory_rank: Tensor, pos_encoding: Tensor, max_distance: int | None, two_streams: bool, n_cls: int
) -> tuple[AttentionMeta, AttentionMeta]:
    """Build the metadata of all rows, and the metadata of the rows that the last layer computes.

    If the last layer computes every content row, both results are the same object.

    Args:
        batch: B windows.
        memory_rank: (B, M) ranks of memory as keys.
        pos_encoding: (2, R, ...) encodings of distances.
        max_distance: largest distance at which a key is visible. None means no limit.
        two_streams: predict targets from the query stream. If False, predict them from the content rows at the target positions.
        n_cls: see `select_output_rows`.

    Returns:
        Metadata for N = T + P query rows (T with one stream), and for the rows of `select_output_rows`, both with K keys.
    """
    length, n_targets = batch.query_rank.size(1), batch.target_positions.size(1)
    key_rank = torch.cat([memory_rank, batch.key_rank], dim=1)
    key_segments = F.pad(batch.segment_ids, (memory_rank.size(1), 0))
    direction = batch.backward.long()

    def meta(rows: _Rows, n_content: int, n_self_visible: int) -> AttentionMeta:
        return AttentionMeta(
            query_rank=rows.ranks,
            key_rank=key_rank,
            row_segments=rows.segments,
            key_segments=key_segments,
            positions=rows.positions,
            n_content=n_content,
            n_self_visible=n_self_visible,
            max_distance=max_distance,
            direction=direction,
            pos_encoding=pos_encoding,
        )

    content, both = _content_rows(batch), _rows_of_both_streams(batch)
    all_rows = meta(both if two_streams else content, length, length)
    if n_targets == length and not (two_streams or n_cls):
        return all_rows, all_rows
    start = length - n_cls
    read = _Rows(both.ranks[:, start:], both.segments[:, start:], both.positions[:, start:])
    return all_rows, meta(read, 0, n_cls if two_streams else n_cls + n_targets)


def _content_rows(batch: Batch) -> _Rows:
    positions = torch.arange(batch.query_rank.size(1), device=batch.query_rank.device).expand_as(batch.query_rank)
    return _Rows(batch.query_rank, batch.segment_ids, positions)


def _rows_of_both_streams(batch: Batch) -> _Rows:
    """Return the content rows, then a query row at each target position."""
    content, targets = _content_rows(batch), batch.target_positions
    return _Rows(
        torch.cat([content.ranks, content.ranks.gather(1, targets)], dim=1),
        torch.cat([content.segments, content.segments.gather(1, targets)], dim=1),
        torch.cat([content.positions, targets], dim=1),
    )
