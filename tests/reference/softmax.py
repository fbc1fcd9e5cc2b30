"""The adaptive softmax and embedding, token by token."""

import torch


def embed(embedding, clusters, token: int) -> torch.Tensor:
    """(D,) vector of a token."""
    for i, (low, high, _) in enumerate(clusters):
        if low <= token < high:
            row = embedding.tables[0][token] if len(embedding.tables) == 1 else embedding.tables[i][token - low]
            if not len(embedding.projections):
                return row
            return embedding.projections[0 if len(embedding.projections) == 1 else i] @ row
    raise AssertionError(token)


def probability(output, clusters, hidden: torch.Tensor, token: int) -> torch.Tensor:
    """p(token | hidden (D,)): of its cluster, times of it in its cluster."""

    def projected(i):
        return hidden @ output.projections[i] if len(output.projections) else hidden

    def logit(i, piece):
        low = clusters[i][0]
        row = output.tables[0][piece] if len(output.tables) == 1 else output.tables[i][piece - low]
        return projected(i) @ row + output.bias[piece]

    frequent = [logit(0, piece) for piece in range(clusters[0][1])]
    entries = [projected(0) @ w + b for w, b in zip(output.cluster_weight, output.cluster_bias, strict=True)]
    head = torch.stack(frequent + entries).softmax(0)
    for i, (low, high, _) in enumerate(clusters):
        if low <= token < high:
            if i == 0:
                return head[token]
            tail = torch.stack([logit(i, piece) for piece in range(low, high)]).softmax(0)
            return head[clusters[0][1] + i - 1] * tail[token - low]
    raise AssertionError(token)
