"""From hidden states to a distribution over the vocabulary, or to the losses of targets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from xlpre.model.config import ModelConfig
from xlpre.model.embedding import AdaptiveEmbedding, TokenEmbedding
from xlpre.model.initialization import initialize_linear


def build_lm_head(config: ModelConfig, embedding: nn.Module) -> nn.Module:
    """The output that `config` asks for.

    Called with hidden states (B, P, D) it gives scores (B, P, V) whose softmax is the distribution; called with targets (B, P)
    too, the loss of each in nats, (B, P) float32, at the least cost.
    """
    if isinstance(embedding, AdaptiveEmbedding):
        return AdaptiveSoftmax(config, embedding)
    assert isinstance(embedding, TokenEmbedding)
    return TiedSoftmax(embedding)


def target_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Loss of each target in nats, (B, P) float32."""
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), reduction="none").view(targets.shape)


class TiedSoftmax(nn.Module):
    """Logits with the embedding's own weights and a bias per piece (zihangdai/xlnet modeling.py `lm_loss`).

    The weight is a parameter of both modules, so that whatever gathers a module's parameters finds it here too.
    """

    def __init__(self, embedding: TokenEmbedding) -> None:
        super().__init__()
        self.weight = embedding.weight
        self.bias = nn.Parameter(torch.zeros(embedding.num_embeddings))

    def forward(self, hidden: Tensor, targets: Tensor | None = None, table: Tensor | None = None) -> Tensor:
        """Logits (B, P, V), or losses (B, P), with the weight or what the embedding gave for it (TokenEmbedding)."""
        weight = self.weight if table is None else table
        if targets is None:
            return F.linear(hidden, weight, self.bias)
        return _LinearLosses.apply(hidden.flatten(0, -2), weight, self.bias, targets.flatten()).view(targets.shape)


class _LinearLosses(torch.autograd.Function):
    """target_losses(F.linear(hidden, weight, bias), targets), keeping one number for each logit.

    With probabilities p and y = 1 at the target, the gradient of a loss by its logits is p - y. That is what is kept, in place of the
    logits; a loss's own gradient g is a factor of its row, so that it is put to the narrow side of both products:

        d hidden = g * ((p - y) weight)        d weight = (p - y)^T (g * hidden)        d bias = (p - y)^T g
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
        logits, place = F.linear(hidden, weight).float().add_(bias), targets[:, None]
        at_target, most = logits.gather(1, place), logits.amax(1, keepdim=True)
        total = logits.sub_(most).exp_().sum(1, keepdim=True)
        losses = most + total.log() - at_target
        slope = logits.div_(total)
        slope.scatter_(1, place, slope.gather(1, place) - 1)
        ctx.save_for_backward(hidden, weight, slope.to(hidden.dtype))
        return losses.squeeze(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, slope = ctx.saved_tensors
        grad = grad.to(hidden.dtype)
        by_row = grad[:, None]
        return slope @ weight * by_row, slope.T @ (hidden * by_row), slope.T.mv(grad), None


class ClusterScores(nn.Module):
    """Scores of a range of pieces.

    Args:
        low, high: the range.
        table: (rows, width) of `offset` and further pieces; the embedding's own, if it is shared.
        offset: the piece of the table's first row.
        projection: (D, width), or None where the width is D.
        cluster_logits: scores of the clusters, which follow those of the pieces, in the head of the adaptive softmax; else None.
    """

    def __init__(
        self,
        low: int,
        high: int,
        table: nn.Parameter,
        offset: int,
        projection: nn.Parameter | None,
        cluster_logits: nn.Linear | None,
    ) -> None:
        super().__init__()
        self.rows = slice(low - offset, high - offset)
        self.table, self.projection = table, projection
        self.bias = nn.Parameter(torch.zeros(high - low))
        self.cluster_logits = cluster_logits

    def forward(self, hidden: Tensor) -> Tensor:
        """(N, D) -> (N, pieces of the range and cluster_logits)."""
        narrow = hidden if self.projection is None else hidden @ self.projection
        scores = F.linear(narrow, self.table[self.rows], self.bias)
        return scores if self.cluster_logits is None else torch.cat([scores, self.cluster_logits(narrow)], dim=1)


class AdaptiveSoftmax(nn.Module):
    """A head of frequent pieces and one entry for each cluster of rare ones, whose own softmax is only computed where needed.

    Source: Grave et al. 2017 (arXiv:1609.04309) with the projections of Transformer-XL. Entry i of the head's tail is cluster i, the
    order of its TensorFlow code. Without cutoffs it is a softmax over a table of its own or of another width.
    """

    def __init__(self, config: ModelConfig, embedding: AdaptiveEmbedding) -> None:
        super().__init__()
        self.bounds = [(low, high) for low, high, _ in config.clusters]
        tied = config.tie_projections or [False] * len(self.bounds)
        tables = [part.table for part in embedding.parts]
        if not config.tie_embedding:
            tables = [_new(config, *table.shape) for table in tables]
        self.clusters = nn.ModuleList()
        for i, (low, high, width) in enumerate(config.clusters):
            own = i if config.div_value > 1 else 0  # the embedding's cluster; a single one where all are equally wide
            projection = embedding.parts[own].projection
            if projection is not None and not tied[i]:
                projection = _new(config, config.d_model, width)
            cluster_logits = nn.Linear(width, len(self.bounds) - 1) if i == 0 and len(self.bounds) > 1 else None
            if cluster_logits:
                initialize_linear(cluster_logits, config)
            offset = embedding.parts[own].low
            self.clusters.append(ClusterScores(low, high, tables[own], offset, projection, cluster_logits))

    def forward(self, hidden: Tensor, targets: Tensor | None = None, table: None = None) -> Tensor:
        """Log-probabilities (B, P, V), or losses (B, P); always with its own tables."""
        flat = hidden.flatten(0, -2)
        if targets is None:
            return self._log_probabilities(flat).view(*hidden.shape[:-1], self.bounds[-1][1])
        return self._losses(flat, targets.flatten()).view(targets.shape)

    def _losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        n_head = self.bounds[0][1]
        starts = torch.tensor([low for low, _ in self.bounds[1:]], device=targets.device)
        cluster = torch.bucketize(targets, starts, right=True)  # 0 for the head's own pieces
        losses = target_losses(self.clusters[0](hidden), torch.where(cluster == 0, targets, n_head + cluster - 1))
        for i, (low, _) in enumerate(self.bounds[1:], 1):
            rows = (cluster == i).nonzero().squeeze(1)  # waits for the device
            tail = target_losses(self.clusters[i](hidden[rows]), targets[rows] - low)
            losses = losses.index_add(0, rows, tail)
        return losses

    def _log_probabilities(self, hidden: Tensor) -> Tensor:
        head = self.clusters[0](hidden).float().log_softmax(-1)
        n_head = self.bounds[0][1]
        tails = [
            head[:, n_head + i, None] + tail(hidden).float().log_softmax(-1) for i, tail in enumerate(self.clusters[1:])
        ]
        return torch.cat([head[:, :n_head], *tails], dim=-1)


def _new(config: ModelConfig, *shape: int) -> nn.Parameter:
    return nn.Parameter(nn.init.normal_(torch.empty(*shape), std=config.init_std))
