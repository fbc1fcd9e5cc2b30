"""Word embedding: one table, or the adaptive embedding (Baevski and Auli 2018, as in Transformer-XL).

Every parameter belongs to a module whose `forward` is called, because this call makes ZeRO-3 gather the parameters of the module.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from xlpre.common.errors import InputError
from xlpre.model.config import ModelConfig


def build_embedding(config: ModelConfig) -> nn.Module:
    """Build the embedding of `config`. The backbone initializes its parameters.

    Raises:
        InputError: the vocabulary size is not set.
    """
    if config.vocab_size is None:
        raise InputError(
            "model.vocab_size=null is invalid: a model needs the size of its vocabulary. "
            "Set it to len(tokenizer) or the store's vocab_size."
        )
    if config.has_plain_embedding:
        return TokenEmbedding(config.vocab_size, config.d_model)
    return AdaptiveEmbedding(config)


def look_up(ids: Tensor, table: Tensor) -> Tensor:
    """Return the rows of a table.

    Args:
        ids: (...) int64.
        table: (V, D).

    Returns:
        (..., D).

    Raises:
        InputError: an id is outside the table (on a CPU). On a GPU, ids are not checked, because that would synchronize with the device;
            such an id aborts the process.
    """
    try:
        return F.embedding(ids, table)
    except IndexError:
        raise InputError(
            f"token ids from {int(ids.min())} to {int(ids.max())} are invalid: the model has {len(table)} tokens, 0 to {len(table) - 1}. "
            "Encode the text with the tokenizer of the model (ModelFolder.tokenizer)."
        ) from None


class TokenEmbedding(nn.Embedding):
    """Embedding with a single table for all tokens."""

    def forward(self, ids: Tensor, with_table: bool = False) -> Any:
        """Look up embeddings.

        Args:
            ids: (B, T).
            with_table: also return the table, for a softmax that shares it. On a CPU, this table is a view. Its gradient from the softmax
                is computed first, and the gradient of the embeddings is added to it in place, which saves a second table. On a GPU,
                None is returned instead, because the order of these additions would vary.

        Returns:
            (B, T, D); with `with_table` also (V, D) or None.
        """
        if not with_table:
            return look_up(ids, self.weight)
        if torch.is_grad_enabled() and ids.device.type == "cpu" and not torch.compiler.is_compiling():
            return _LookUpWithTable.apply(self.weight, ids)
        return look_up(ids, self.weight), None


class _LookUpWithTable(torch.autograd.Function):
    """Return embeddings and the table. The backward pass adds the gradient of the embeddings to the gradient of the table in place."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(ids)
        ctx.set_materialize_grads(False)
        ctx.shape = table.shape
        return look_up(ids, table), table.view_as(table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_embeddings: Tensor | None, d_table: Tensor | None) -> tuple[Tensor | None, None]:
        (ids,) = ctx.saved_tensors
        if d_embeddings is not None:
            d_table = d_embeddings.new_zeros(ctx.shape) if d_table is None else d_table
            d_table.index_add_(0, ids.flatten(), d_embeddings.flatten(0, -2))
        return d_table, None


class ClusterEmbedding(nn.Module):
    """Embeddings of a range of token ids, projected to the model width D if `config.has_embedding_projection`.

    Args:
        low: first token id.
        high: last token id + 1.
        width: width of the embeddings before the projection.
        config: shape of the model.
    """

    def __init__(self, low: int, high: int, width: int, config: ModelConfig) -> None:
        super().__init__()
        self.low, self.high = low, high
        self.table = nn.Parameter(torch.empty(high - low, width))
        has_projection = config.has_embedding_projection
        self.projection = nn.Parameter(torch.empty(config.d_model, width)) if has_projection else None

    def forward(self, ids: Tensor) -> Tensor:
        """Look up (N,) token ids between `low` and `high`: (N, D)."""
        embeddings = look_up(ids - self.low, self.table)
        return embeddings if self.projection is None else F.linear(embeddings, self.projection)


class AdaptiveEmbedding(nn.Module):
    """Embedding with wide vectors for frequent tokens and narrow vectors for rare tokens. Clusters of equal width share one table."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.width = config.d_model
        clusters = config.clusters
        if config.div_value == 1:  # one table
            clusters = [(0, clusters[-1][1], config.embedding_width)]
        self.clusters = nn.ModuleList(ClusterEmbedding(*cluster, config) for cluster in clusters)

    @property
    def parts(self) -> list[ClusterEmbedding]:
        """The clusters, or one part for all tokens if every cluster has the same width."""
        return cast(list[ClusterEmbedding], list(self.clusters))

    def forward(self, ids: Tensor, with_table: bool = False) -> Any:
        """Return the (B, T, D) embeddings of (B, T) ids. With `with_table`, also None, because the softmax has its own tables."""
        embeddings = self._look_up(ids.flatten()).view(*ids.shape, self.width)
        return (embeddings, None) if with_table else embeddings

    def _look_up(self, ids: Tensor) -> Tensor:
        if len(self.clusters) == 1:
            return cast(Tensor, self.clusters[0](ids))
        by_cluster = []
        for cluster in self.parts:
            index = ((ids >= cluster.low) & (ids < cluster.high)).nonzero().squeeze(1)  # synchronizes with the device
            by_cluster.append((index, cluster(ids[index])))
        # a compiled graph cannot depend on the counts
        if not torch.compiler.is_compiling() and sum(index.numel() for index, _ in by_cluster) < ids.numel():
            raise InputError(f"the token ids are invalid: they must be at least 0 and below {self.parts[-1].high}.")
        embeddings = by_cluster[0][1].new_zeros(ids.size(0), self.width)
        for index, values in by_cluster:
            embeddings = embeddings.index_add(0, index, values)
        return embeddings
