"""From hidden states to a distribution over the vocabulary, or to the losses of targets."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from xlpre.model.config import ModelConfig
from xlpre.model.embedding import AdaptiveEmbedding, cluster_tables


def build_output(config: ModelConfig, embedding: nn.Module) -> nn.Module:
    """The output that `config` asks for.

    Called with hidden states (B, P, D) it gives scores (B, P, V) whose softmax is the distribution; called with targets (B, P)
    too, the loss of each in nats, (B, P) float32, at the least cost.
    """
    if isinstance(embedding, AdaptiveEmbedding):
        return AdaptiveSoftmax(config, embedding)
    assert isinstance(embedding, nn.Embedding)
    return TiedSoftmax(embedding)


def target_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Loss of each target in nats, (B, P) float32."""
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), reduction="none").view(targets.shape)


class TiedSoftmax(nn.Module):
    """Logits with the embedding's own weights and a bias per piece (zihangdai/xlnet modeling.py `lm_loss`).

    The weight is a parameter of both modules, so that whatever gathers a module's parameters finds it here too.
    """

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight
        self.bias = nn.Parameter(torch.zeros(embedding.num_embeddings))

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits (B, P, V), or losses (B, P)."""
        logits = F.linear(hidden, self.weight, self.bias)
        return logits if targets is None else target_losses(logits, targets)


class AdaptiveSoftmax(nn.Module):
    """A head of frequent pieces and one entry for each cluster of rare ones, whose own softmax is only computed where needed.

    Source: Grave et al. 2017 (arXiv:1609.04309) with the projections of Transformer-XL. Entry i of the head's tail is cluster i, the
    order of its TensorFlow code.
    """

    def __init__(self, config: ModelConfig, embedding: AdaptiveEmbedding) -> None:
        super().__init__()
        self.clusters = config.clusters
        n_tails = len(self.clusters) - 1
        self.tables = embedding.tables if config.tie_embedding else cluster_tables(config)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        self.cluster_weight = nn.Parameter(torch.empty(n_tails, config.embedding_width))
        self.cluster_bias = nn.Parameter(torch.zeros(n_tails))
        tied = config.tie_projections or [False] * len(self.clusters)
        own = [
            embedding.projections[i % len(embedding.projections)]
            if shared
            else nn.Parameter(torch.empty(config.d_model, width))
            for i, (shared, (_, _, width)) in enumerate(zip(tied, self.clusters, strict=True))
            if len(embedding.projections)
        ]
        self.projections = nn.ParameterList(own)
        inherited = {id(parameter) for parameter in embedding.parameters()}
        for name, parameter in self.named_parameters():
            if id(parameter) not in inherited and "bias" not in name:
                nn.init.normal_(parameter, std=config.init_std)

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        """Log-probabilities (B, P, V), or losses (B, P)."""
        flat = hidden.flatten(0, -2)
        if targets is None:
            return self._log_probabilities(flat).view(*hidden.shape[:-1], -1)
        return self._losses(flat, targets.flatten()).view(targets.shape)

    def _losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        n_head = self.clusters[0][1]
        cluster = sum((targets >= low).long() for low, _, _ in self.clusters[1:])
        entry = torch.where(targets < n_head, targets, n_head + cluster - 1)
        losses = target_losses(self._head(hidden), entry)
        for i, (low, high, _) in enumerate(self.clusters[1:], 1):
            rows = ((targets >= low) & (targets < high)).nonzero().squeeze(1)
            losses = losses.index_add(0, rows, target_losses(self._scores(hidden[rows], i), targets[rows] - low))
        return losses

    def _log_probabilities(self, hidden: Tensor) -> Tensor:
        head = self._head(hidden).float().log_softmax(-1)
        n_head = self.clusters[0][1]
        parts = [head[:, :n_head]]
        for i in range(1, len(self.clusters)):
            parts.append(head[:, n_head + i - 1, None] + self._scores(hidden, i).float().log_softmax(-1))
        return torch.cat(parts, dim=-1)

    def _head(self, hidden: Tensor) -> Tensor:
        """(N, D) -> (N, frequent pieces + clusters)."""
        return torch.cat(
            [self._scores(hidden, 0), self._projected(hidden, 0) @ self.cluster_weight.T + self.cluster_bias], 1
        )

    def _scores(self, hidden: Tensor, cluster: int) -> Tensor:
        """(N, D) -> (N, pieces of the cluster)."""
        low, high, _ = self.clusters[cluster]
        table = self.tables[cluster] if len(self.tables) > 1 else self.tables[0][low:high]
        return F.linear(self._projected(hidden, cluster), table, self.bias[low:high])

    def _projected(self, hidden: Tensor, cluster: int) -> Tensor:
        return hidden @ self.projections[cluster] if len(self.projections) else hidden
