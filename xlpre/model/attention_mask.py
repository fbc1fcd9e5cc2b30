"""Attention mask from ranks and positions (docs/design.md).

A rank is the place of a token in the factorization order. The mask is one comparison of two integer vectors: the ranks of the queries and
the ranks of the keys. `AttentionMeta` holds these ranks and the positions of the query rows. It is built once per forward pass
(model/two_stream.py) and shared by all layers.

A query row is one query vector of one sequence, from the content stream or from the query stream. A batch row is one sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


def visible(query_rank: Tensor, key_rank: Tensor) -> Tensor:
    """Return the attention mask: a query sees the keys ranked below it.

    Causal, permuted and bidirectional attention use the same comparison with different ranks.

    Args:
        query_rank: (B, N) int32.
        key_rank: (B, K) int32, memory first.

    Returns:
        (B, N, K) bool, True where the query may attend.

    Source: XLNet, section 2.2. docs/objectives.md derives the ranks.
    """
    return query_rank[:, :, None] > key_rank[:, None, :]


def max_key_distance(attention_span: str, mem_len: int, n_columns: int) -> int | None:
    """Return the largest distance at which a key is visible, or None if there is no limit.

    Args:
        attention_span: `ModelConfig.attention_span`. With `same_length`, every query sees M + 1 keys, itself included
            (Transformer-XL in TensorFlow). With `exclude_self_slot`, every query sees M keys (Transformer-XL in PyTorch).
        mem_len: M of the model.
        n_columns: number of tokens in memory in this forward pass. It replaces M if it is larger.
    """
    excluded = {"same_length": 0, "exclude_self_slot": 1}
    return max(mem_len, n_columns) - excluded[attention_span] if attention_span in excluded else None


@dataclass(frozen=True)
class AttentionMeta:
    """Ranks, segments and positions of N query rows and K = M + T keys, memory first.

    The first `n_content` query rows are the content rows of the window, in order. The rows after them are at arbitrary window positions:
    the rows of the query stream, or the rows that the last layer computes.

    Attributes:
        query_rank: (B, N) int32, rank of each query row.
        key_rank: (B, K) int32, rank of each key. A query row sees the keys with a lower rank.
        row_segments: (B, N) int64, segment of each query row.
        key_segments: (B, K) int64, segment of each key. Memory has segment 0.
        positions: (B, N) int64, window position of each query row.
        n_content: T if the query rows start with the content rows of the window, otherwise 0.
        n_self_visible: number of query rows, counted from the first, that also see the key at their own position. These are the rows of
            the content stream.
        max_distance: largest distance at which a key is visible. None means no limit.
        direction: (B,) int64, 0 for batch rows that are read from left to right, 1 for those that are read from right to left.
        pos_encoding: (2, R, ...) encodings of the R = K + T distances from K down to 1 - T, for each direction (model/positions.py).
    """

    query_rank: Tensor
    key_rank: Tensor
    row_segments: Tensor
    key_segments: Tensor
    positions: Tensor
    n_content: int
    n_self_visible: int
    max_distance: int | None
    direction: Tensor
    pos_encoding: Tensor

    @property
    def n_keys(self) -> int:
        """K, number of keys."""
        return self.key_rank.size(1)

    @property
    def n_distances(self) -> int:
        """R, number of distances."""
        return self.pos_encoding.size(1)

    @property
    def n_tokens(self) -> int:
        """T, number of tokens in the window."""
        return self.n_distances - self.n_keys

    @property
    def self_key(self) -> Tensor:
        """(B, N) int64, index of the key at the position of each query row."""
        return self.positions + (self.n_keys - self.n_tokens)

    def visible(self) -> Tensor:
        """Return the attention mask, (B, N, K) bool."""
        mask = visible(self.query_rank, self.key_rank)
        distance = self.self_key[:, :, None] - torch.arange(self.n_keys, device=mask.device)
        if self.n_self_visible:
            sees_self = torch.arange(self.query_rank.size(1), device=mask.device)[:, None] < self.n_self_visible
            mask = mask | (sees_self & (distance == 0))
        return mask if self.max_distance is None else mask & (distance <= self.max_distance)

    def segments_differ(self) -> Tensor:
        """Return (B, N, K) bool, True where query row and key belong to different segments."""
        return self.row_segments[:, :, None] != self.key_segments[:, None]

    def slice_rows(self, start: int, end: int) -> AttentionMeta:
        """Return the metadata of query rows `start` to `end`."""
        if (start, end) == (0, self.query_rank.size(1)):
            return self
        n_self_visible = min(max(self.n_self_visible - start, 0), end - start)
        return replace(
            self,
            query_rank=self.query_rank[:, start:end],
            row_segments=self.row_segments[:, start:end],
            positions=self.positions[:, start:end],
            n_content=self.n_content if start == 0 and end >= self.n_content else 0,
            n_self_visible=n_self_visible,
        )

    def rel_shift(self, by_distance: Tensor) -> Tensor:
        """Reorder scores by distance, (B, H, N, R), into scores by key, (B, H, N, K)."""
        n_others = by_distance.size(2) - self.n_content
        content, others = by_distance.split([self.n_content, n_others], dim=2)
        by_key = [_rel_shift_in_order(content, self.n_keys)] if self.n_content else []
        if n_others or not by_key:
            index = self._distance_index(self.n_content)
            by_key.append(others.gather(3, index[:, None].expand(-1, others.size(1), -1, -1)))
        return torch.cat(by_key, dim=2) if len(by_key) > 1 else by_key[0]

    def key_encoding(self) -> Tensor:
        """Return (2, K, ...) encodings of the positions of the keys. A position is the distance to the last token of the window."""
        return self.pos_encoding[:, 1 : self.n_keys + 1]

    def take_rows(self, content: Tensor) -> Tensor:
        """Take, for each query row, the content row at its position: (B, T, D) -> (B, N, D)."""
        if self.n_content == self.n_tokens == self.positions.size(1):  # the query rows are the content rows, in order
            return content
        return content.gather(1, self.positions[:, :, None].expand(-1, -1, content.size(2)))

    def _distance_index(self, start: int) -> Tensor:
        """Return the index of the distance between each of the N query rows from `start` on and each key, (B, N - start, K) int64."""
        first = (self.n_tokens - self.positions[:, start:])[:, :, None]
        return first + torch.arange(self.n_keys, device=first.device)


def _rel_shift_in_order(by_distance: Tensor, n_keys: int) -> Tensor:
    """Reorder the scores (B, H, T, R) of all content rows by key, (B, H, T, K). The result is a view.

    The distance of row t and key j is M + t - j. Its score is in column T - t + j of the input.

    Source: Transformer-XL, appendix B.
    """
    rows, heads, length, n_distances = by_distance.shape
    flat = by_distance.reshape(rows, heads, n_distances, length)[:, :, 1:]
    return flat.reshape(rows, heads, length, n_distances - 1)[..., :n_keys]
