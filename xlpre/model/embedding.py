"""From token ids to vectors: one table, or the adaptive embedding (Baevski and Auli 2018, as in Transformer-XL).

Every parameter belongs to a module that is called: ZeRO-3 gathers what a module owns when it is called, and nothing else.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from xlpre.model.config import ModelConfig


def build_embedding(config: ModelConfig) -> nn.Module:
    """The embedding that `config` asks for; its starting values are set with the backbone's."""
    if config.plain_embedding:
        return TokenEmbedding(config.vocab_size, config.d_model)
    return AdaptiveEmbedding(config)


class TokenEmbedding(nn.Embedding):
    """One table of vectors."""

    def forward(self, ids: Tensor, with_softmax: bool = False) -> Tensor:
        """Look up.

        Args:
            ids: (B, T).
            with_softmax: the losses to come are of the softmax with the same table, which gets its gradient in the same backward pass. On
                a processor gradients of vectors are then added to that one, instead of becoming a table of zeros first. A GPU would add
                them in no order, and is spared that.

        Returns:
            (B, T, D).
        """
        sparse = with_softmax and ids.device.type == "cpu" and not torch.compiler.is_compiling()
        return F.embedding(ids, self.weight, sparse=sparse)


class ClusterEmbedding(nn.Module):
    """Vectors of a range of pieces, of their own width, projected to width D if that is another."""

    def __init__(self, low: int, high: int, width: int, config: ModelConfig) -> None:
        super().__init__()
        self.low, self.high = low, high
        self.table = nn.Parameter(torch.empty(high - low, width))
        self.projection = nn.Parameter(torch.empty(config.d_model, width)) if config.projects_embedding else None

    def forward(self, ids: Tensor) -> Tensor:
        """(N,) ids of the whole vocabulary -> (N, D)."""
        vectors = F.embedding(ids - self.low, self.table)
        return vectors if self.projection is None else F.linear(vectors, self.projection)


class AdaptiveEmbedding(nn.Module):
    """Frequent pieces get wide vectors, rare ones narrow ones. Where all are equally wide they share one table."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.width = config.d_model
        clusters = config.clusters if config.div_value > 1 else [(0, config.vocab_size, config.embedding_width)]
        self.clusters = nn.ModuleList(ClusterEmbedding(*cluster, config) for cluster in clusters)

    @property
    def parts(self) -> list[ClusterEmbedding]:
        """The clusters, one where all are equally wide."""
        return cast(list[ClusterEmbedding], list(self.clusters))

    def forward(self, ids: Tensor, with_softmax: bool = False) -> Tensor:
        """(B, T) -> (B, T, D); see TokenEmbedding. Its tables are small, and their gradients as usual."""
        flat = ids.flatten()
        if len(self.clusters) == 1:
            return self.clusters[0](flat).view(*ids.shape, -1)
        of_parts = []
        for cluster in self.parts:
            inside = ((flat >= cluster.low) & (flat < cluster.high)).nonzero().squeeze(1)  # waits for the device
            of_parts.append((inside, cluster(flat[inside])))
        vectors = of_parts[0][1].new_zeros(flat.size(0), self.width)
        for inside, found in of_parts:
            vectors = vectors.index_add(0, inside, found)
        return vectors.view(*ids.shape, -1)
