"""The backbone: embeddings, memory, L layers; both streams as rows of one pass.

Rows are `[content; query]` (B, T + P, D): queries, attention, feed-forward and norms are computed once over all of them, keys and values
from memory and the content rows only. The last layer computes the rows that are read out and no others.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from xlpre.batch import Batch
from xlpre.model.attention import SharedBiases
from xlpre.model.config import ModelConfig
from xlpre.model.geometry import Geometry
from xlpre.model.initialization import initialize
from xlpre.model.layer import Layer
from xlpre.model.memory import Memory
from xlpre.model.positions import distance_table
from xlpre.model.visibility import content_visible, visible


class Backbone(nn.Module):
    """Transformer-XL with relative positions, memory and relative segments.

    Args:
        config: its shape.
        two_streams: predictions are read from the query stream, which starts from a learned vector instead of the token at its
            place (XLNet section 2.3); else from the content stream.
    """

    def __init__(self, config: ModelConfig, two_streams: bool) -> None:
        super().__init__()
        self.config, self.two_streams = config, two_streams
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.mask_embedding = nn.Parameter(torch.empty(config.d_model))
        self.shared = nn.ParameterDict()
        names = ("content", "position", "segment") if config.relative_segments else ("content", "position")
        if not config.untie_r:
            self.shared.update({name: nn.Parameter(torch.empty(config.n_head, config.head_width)) for name in names})
        biases: SharedBiases = {name: None if config.untie_r else self.shared[name] for name in names}
        self.layers = nn.ModuleList(Layer(config, biases) for _ in range(config.n_layer))
        self.dropout = nn.Dropout(config.dropout)
        initialize(self, config)

    def forward(self, batch: Batch, memory: Memory) -> tuple[Tensor, Memory]:
        """Read a window.

        Args:
            batch: B windows of T tokens with P targets each.
            memory: what each row read before, M columns; their number is free.

        Returns:
            (B, P, D) hidden states at the targets, and memory for the next window, as long as it was.
        """
        length = batch.input_ids.size(1)
        everywhere, targets = self._geometries(batch, memory)
        rows = self.embedding(batch.input_ids)
        if self.two_streams:
            queries = self.mask_embedding.to(rows.dtype).expand(*batch.target_positions.shape, -1)
            rows = torch.cat([rows, queries], dim=1)
        rows = self.dropout(rows)
        entering = []
        for layer, remembered in zip(self.layers, memory.hidden, strict=True):
            content = rows[:, :length]
            entering.append(content[:, : batch.reuse_len])
            if layer is self.layers[-1]:
                rows, geometry = self._target_rows(rows, batch.target_positions, length), targets
            else:
                geometry = everywhere
            rows = layer(rows, content, remembered, geometry)
        return self.dropout(rows), memory.extended(entering, batch.continues)

    def _target_rows(self, rows: Tensor, positions: Tensor, length: int) -> Tensor:
        """The rows that are read out: the query stream, or content rows at the targets."""
        if self.two_streams:
            return rows[:, length:]
        return rows.gather(1, positions[:, :, None].expand(-1, -1, rows.size(2)))

    def _geometries(self, batch: Batch, memory: Memory) -> tuple[Geometry, Geometry]:
        """The geometry of all rows, and of the target rows alone, which is what the last layer computes."""
        length, mem_len, dtype = batch.input_ids.size(1), memory.hidden.size(2), self.embedding.weight.dtype
        key_rank = torch.cat([memory.key_rank(batch.continues), batch.key_rank], dim=1)
        key_segments = F.pad(batch.segment_ids, (mem_len, 0))  # memory counts as segment 0
        table = distance_table(
            mem_len + length, length, self.config.d_model, self.config.clamp_len, device=key_rank.device, dtype=dtype
        )
        shared = {"distances": self.dropout(table), "direction": batch.backward.long()}
        content = content_visible(batch.query_rank, key_rank)
        if self.two_streams:
            target = visible(batch.query_rank.gather(1, batch.target_positions), key_rank)
        else:
            target = content.gather(1, batch.target_positions[:, :, None].expand(-1, -1, content.size(2)))
        differs = batch.segment_ids[:, :, None] != key_segments[:, None]
        target_differs = differs.gather(1, batch.target_positions[:, :, None].expand(-1, -1, differs.size(2)))
        at_targets = Geometry.of(
            target, target_differs, positions=batch.target_positions, n_content=0, dtype=dtype, **shared
        )
        if self.two_streams:
            content, differs = torch.cat([content, target], 1), torch.cat([differs, target_differs], 1)
            positions = batch.target_positions
        else:
            positions = batch.target_positions[:, :0]
        return Geometry.of(content, differs, positions=positions, n_content=length, dtype=dtype, **shared), at_targets
