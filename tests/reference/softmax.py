"""Adaptive softmax and embedding, token by token."""

import torch


def embed(embedding, token: int) -> torch.Tensor:
    """Embedding (D,) of a token."""
    for cluster in embedding.clusters:
        if cluster.low <= token < cluster.high:
            row = cluster.table[token - cluster.low]
            return row if cluster.projection is None else cluster.projection @ row
    raise AssertionError(token)


def probability(lm_head, embedding, hidden: torch.Tensor, token: int) -> torch.Tensor:
    """p(token | hidden (D,)): probability of its cluster times its probability in the cluster."""

    def projected(scores):
        return hidden if scores.projection is None else hidden @ scores.projection

    def logits(i):
        scores, (low, high) = lm_head.clusters[i], lm_head.bounds[i]
        first = low if len(embedding.clusters) == 1 else 0  # a single table has all tokens
        return [projected(scores) @ scores.table[first + k] + scores.bias[k] for k in range(high - low)]

    frequent, cluster_logits = logits(0), []
    if len(lm_head.bounds) > 1:
        head = lm_head.clusters[0]
        weights = zip(head.cluster_logits.weight, head.cluster_logits.bias, strict=True)
        cluster_logits = [projected(head) @ w + b for w, b in weights]
    head_probabilities = torch.stack(frequent + cluster_logits).softmax(0)
    for i, (low, high) in enumerate(lm_head.bounds):
        if low <= token < high:
            if i == 0:
                return head_probabilities[token]
            return head_probabilities[len(frequent) + i - 1] * torch.stack(logits(i)).softmax(0)[token - low]
    raise AssertionError(token)
