"""From token ids to vectors: one table, or the adaptive embedding (Baevski and Auli 2018, as in Transformer-XL)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from xlpre.model.config import ModelConfig


def build_embedding(config: ModelConfig) -> nn.Module:
    """The embedding that `config` asks for; its starting values are set with the backbone's."""
    if config.plain_embedding:
        return nn.Embedding(config.vocab_size, config.d_model)
    return AdaptiveEmbedding(config)


def cluster_tables(config: ModelConfig) -> nn.ParameterList:
    """A table for each cluster, or a single one where all are equally wide; (rows, width) each, not yet set."""
    clusters = config.clusters
    if config.div_value == 1:
        clusters = [(0, config.vocab_size, config.embedding_width)]
    return nn.ParameterList(nn.Parameter(torch.empty(high - low, width)) for low, high, width in clusters)


class AdaptiveEmbedding(nn.Module):
    """Frequent pieces get wide vectors, rare ones narrow ones; projections bring all to width D."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.width, self.starts = config.d_model, [low for low, _, _ in config.clusters]
        self.tables = cluster_tables(config)
        projected = config.div_value > 1 or config.embedding_width != config.d_model
        self.projections = nn.ParameterList(
            nn.Parameter(torch.empty(config.d_model, table.size(1))) for table in self.tables if projected
        )

    def forward(self, ids: Tensor) -> Tensor:
        """(B, T) -> (B, T, D)."""
        if len(self.tables) == 1:
            vectors = F.embedding(ids, self.tables[0])
            return F.linear(vectors, self.projections[0]) if len(self.projections) else vectors
        found = self.projections[0].new_zeros(*ids.shape, self.width)
        for low, table, projection in zip(self.starts, self.tables, self.projections, strict=True):
            inside = (ids >= low) & (ids < low + len(table))
            found[inside] = F.linear(F.embedding(ids[inside] - low, table), projection)
        return found
