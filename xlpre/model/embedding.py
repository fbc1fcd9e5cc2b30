"""From token ids to vectors: one table, or the adaptive embedding (Baevski and Auli 2018, as in Transformer-XL).

Every parameter belongs to a module that is called: ZeRO-3 gathers what a module owns when it is called, and nothing else.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from xlpre.model.config import ModelConfig


def build_embedding(config: ModelConfig) -> nn.Module:
    """The embedding that `config` asks for; its starting values are set with the backbone's.

    Raises:
        ValueError: no size of the vocabulary.
    """
    if not config.vocab_size:
        raise ValueError(
            "model.vocab_size (0) must be known when a model is built: set it to len(tokenizer), or a store's vocab_size"
        )
    if config.has_plain_embedding:
        return TokenEmbedding(config.vocab_size, config.d_model)
    return AdaptiveEmbedding(config)


def look_up(ids: Tensor, table: Tensor) -> Tensor:
    """The rows (..., D) of a table (V, D) at ids (...).

    Raises:
        ValueError: on a processor, an id that has no row; a GPU would have to be waited for to know, and ends the process.
    """
    try:
        return F.embedding(ids, table)
    except IndexError:
        raise ValueError(
            f"token ids from {int(ids.min())} to {int(ids.max())}, where the model has {len(table)} pieces, 0 to {len(table) - 1}; "
            "encode the text with the model's own vocabulary (ModelFolder.tokenizer)"
        ) from None


class TokenEmbedding(nn.Embedding):
    """One table of vectors."""

    def forward(self, ids: Tensor, with_table: bool = False) -> Any:
        """Look up.

        Args:
            ids: (B, T).
            with_table: return what the softmax that shares the table is to take in its place, too. On a processor that is a view of it,
                with which gradients of vectors are added to the softmax's, which comes first, instead of becoming a table of zeros. A
                GPU would add them in no order, and is spared that: None.

        Returns:
            (B, T, D), and (V, D) or None if asked for.
        """
        if not with_table:
            return look_up(ids, self.weight)
        if torch.is_grad_enabled() and ids.device.type == "cpu" and not torch.compiler.is_compiling():
            return _LookUp.apply(self.weight, ids)
        return look_up(ids, self.weight), None


class _LookUp(torch.autograd.Function):
    """Vectors of ids, and the table: the table's gradient passes through here and takes in that of the vectors."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(ids)
        ctx.set_materialize_grads(False)
        ctx.shape = table.shape
        return look_up(ids, table), table.view_as(table)

    @staticmethod
    def backward(ctx: Any, of_vectors: Tensor | None, of_table: Tensor | None) -> tuple[Tensor | None, None]:
        (ids,) = ctx.saved_tensors
        if of_vectors is not None:
            of_table = of_vectors.new_zeros(ctx.shape) if of_table is None else of_table
            of_table.index_add_(0, ids.flatten(), of_vectors.flatten(0, -2))
        return of_table, None


class ClusterEmbedding(nn.Module):
    """Vectors of a range of pieces, of their own width, projected to width D if that is another."""

    def __init__(self, low: int, high: int, width: int, config: ModelConfig) -> None:
        super().__init__()
        self.low, self.high = low, high
        self.table = nn.Parameter(torch.empty(high - low, width))
        self.projection = nn.Parameter(torch.empty(config.d_model, width)) if config.has_embedding_projection else None

    def forward(self, ids: Tensor) -> Tensor:
        """(N,) ids of the whole vocabulary -> (N, D)."""
        vectors = look_up(ids - self.low, self.table)
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

    def forward(self, ids: Tensor, with_table: bool = False) -> Any:
        """(B, T) -> (B, T, D), and None if asked for a table, see TokenEmbedding: the softmax takes its own."""
        vectors = self._vectors(ids.flatten()).view(*ids.shape, self.width)
        return (vectors, None) if with_table else vectors

    def _vectors(self, ids: Tensor) -> Tensor:
        if len(self.clusters) == 1:
            return cast(Tensor, self.clusters[0](ids))
        of_parts = []
        for cluster in self.parts:
            inside = ((ids >= cluster.low) & (ids < cluster.high)).nonzero().squeeze(1)  # waits for the device
            of_parts.append((inside, cluster(ids[inside])))
        vectors = of_parts[0][1].new_zeros(ids.size(0), self.width)
        for inside, found in of_parts:
            vectors = vectors.index_add(0, inside, found)
        return vectors
