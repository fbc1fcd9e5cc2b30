"""Language-model head: computes a distribution over the vocabulary, or the losses of targets, from hidden states."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from xlpre.model.config import ModelConfig
from xlpre.model.embedding import AdaptiveEmbedding, TokenEmbedding
from xlpre.model.initialization import initialize_linear
from xlpre.model.kernels.cpu.build import is_supported, load_library

MAX_LOGITS = 1 << 27  # logits that are computed at once; 0.5 GB in fp32
NO_TARGET = -(2**62)  # in place of PyTorch's `ignore_index`, -100, which would hide an invalid target


def build_lm_head(config: ModelConfig, embedding: nn.Module) -> nn.Module:
    """Build the head of `config`.

    From hidden states (B, P, D), the head computes scores (B, P, V) whose softmax is the distribution over the vocabulary. If targets
    (B, P) are passed, too, it returns the loss of each target in nats instead, (B, P) float32, at lower cost.
    """
    if isinstance(embedding, AdaptiveEmbedding):
        return AdaptiveSoftmax(config, embedding)
    assert isinstance(embedding, TokenEmbedding)
    return TiedSoftmax(embedding)


def target_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy of each target in nats, float32 with the shape of `targets`."""
    rows = logits.float().flatten(0, -2)
    return F.cross_entropy(rows, targets.flatten(), reduction="none", ignore_index=NO_TARGET).view(targets.shape)


class TiedSoftmax(nn.Module):
    """Logits from the weights of the embedding and a bias per token (zihangdai/xlnet modeling.py `lm_loss`).

    The weight is a parameter of the embedding and of this module, so that ZeRO-3 gathers it when either of them is called.
    """

    def __init__(self, embedding: TokenEmbedding) -> None:
        super().__init__()
        self.weight = embedding.weight
        self.bias = nn.Parameter(torch.zeros(embedding.num_embeddings))

    def forward(self, hidden: Tensor, targets: Tensor | None = None, table: Tensor | None = None) -> Tensor:
        """Compute logits, or losses if targets are given.

        Args:
            hidden: (B, P, D).
            targets: (B, P) int64.
            table: (V, D), used instead of the weight. TokenEmbedding returns it with `with_table=True`.

        Returns:
            (B, P, V) logits or (B, P) losses.
        """
        weight = self.weight if table is None else table
        if targets is None:
            return F.linear(hidden, weight, self.bias)
        rows, row_targets = hidden.flatten(0, -2), targets.flatten()
        if torch.is_grad_enabled():
            return _LinearCrossEntropy.apply(rows, weight, self.bias, row_targets).view(targets.shape)
        n_rows = _rows_at_once(weight)
        losses = [  # a quarter faster, because no gradient is prepared
            target_losses(F.linear(chunk, weight, self.bias), chunk_targets)
            for chunk, chunk_targets in zip(rows.split(n_rows), row_targets.split(n_rows), strict=True)
        ]
        return torch.cat(losses).view(targets.shape)


class _LinearCrossEntropy(torch.autograd.Function):
    """Compute target_losses(F.linear(hidden, weight, bias), targets), and store at most one number per logit for the backward pass.

    Let p be the softmax probabilities and y the one-hot target. The gradient of a row's loss with respect to its logits is p - y, which
    overwrites the logits. The incoming gradient g (one number per row) scales that row. The backward pass multiplies it into the
    tensors of width D, because they are smaller than the logits of width V:

        d hidden = g * ((p - y) weight)        d weight = (p - y)^T (g * hidden)        d bias = (p - y)^T g

    In fp16, p is zero for rare tokens unless it is scaled: p - y is stored in bf16, and multiplied by g, which contains the loss scale,
    before it is rounded to fp16.

    More than MAX_LOGITS logits are computed in chunks of rows. They are not stored, but computed again in the backward pass, so memory does
    not grow with the number of rows times V.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
        n_rows = _rows_at_once(weight)
        losses, d_logits = [], None
        for rows, row_targets in zip(hidden.split(n_rows), targets.split(n_rows), strict=True):
            chunk_losses, d_logits = _losses_and_gradients(rows, weight, bias, row_targets)
            losses.append(chunk_losses)
        if len(losses) > 1:
            d_logits = None
        ctx.n_rows, ctx.autocast_dtype = n_rows, _autocast_dtype(hidden.device.type)
        ctx.save_for_backward(hidden, weight, bias, targets, d_logits)
        return losses[0] if len(losses) == 1 else torch.cat(losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, d_logits = ctx.saved_tensors
        if d_logits is not None:
            return *_input_gradients(d_logits, grad, hidden, weight), None
        d_hidden, d_weight, d_bias = torch.empty_like(hidden), torch.zeros_like(weight), torch.zeros_like(bias)
        for start in range(0, len(hidden), ctx.n_rows):
            rows = slice(start, start + ctx.n_rows)
            with torch.autocast(hidden.device.type, ctx.autocast_dtype) if ctx.autocast_dtype else nullcontext():
                d_logits = _losses_and_gradients(hidden[rows], weight, bias, targets[rows])[1]
            d_hidden[rows], d_weight_of_rows, d_bias_of_rows = _input_gradients(
                d_logits, grad[rows], hidden[rows], weight
            )
            d_weight += d_weight_of_rows
            d_bias += d_bias_of_rows
        return d_hidden, d_weight, d_bias, None


def _rows_at_once(weight: Tensor) -> int:
    """Return the number of rows whose logits are computed at once."""
    return max(MAX_LOGITS // len(weight), 1)


def _input_gradients(d_logits: Tensor, grad: Tensor, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of hidden states (N, D), weight (V, D) and bias (V,).

    Args:
        d_logits: (N, V) gradients of the losses with respect to the logits, see `_losses_and_gradients`.
        grad: (N,) incoming gradients of the losses.
        hidden: (N, D).
        weight: (V, D).
    """
    if hidden.dtype == torch.float16:
        d_logits = (d_logits * grad[:, None]).to(hidden.dtype)
        return d_logits @ weight, d_logits.T @ hidden, d_logits.sum(0)
    grad = grad.to(hidden.dtype)
    by_row = grad[:, None]
    return d_logits @ weight * by_row, d_logits.T @ (hidden * by_row), d_logits.T.mv(grad)


def _losses_and_gradients(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of each row (N,) in fp32, and its gradient with respect to the logits (N, V).

    The gradients are in the dtype of `hidden`, or in bf16 for fp16.
    """
    logits = F.linear(hidden, weight)
    # the meta device counts as a GPU, so that pretrain/plan.py does not depend on the compiler of this machine
    if is_supported(logits.device, logits.dtype) and not logits.is_meta:
        losses = _fused_cross_entropy_(logits, bias, targets)
    else:
        logits = logits.float().add_(bias)  # frees logits in 16 bits
        losses = _cross_entropy_(logits, targets)
    return losses, logits.to(torch.bfloat16 if hidden.dtype == torch.float16 else hidden.dtype)


def _cross_entropy_(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the losses (N,) of logits (N, V), which are overwritten with their gradients."""
    index = targets[:, None]
    at_target, largest = logits.gather(1, index), logits.amax(1, keepdim=True)
    total = logits.sub_(largest).exp_().sum(1, keepdim=True)
    losses = largest + total.log() - at_target
    logits.div_(total)
    logits.scatter_(1, index, logits.gather(1, index) - 1)
    return losses.squeeze(1)


def _fused_cross_entropy_(logits: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    """Do the same for logits to which `bias` (V,) is added, in one pass by kernels/cpu/kernels.cpp. The losses are in fp32."""
    N, V = logits.shape
    assert logits.is_contiguous() and bias.shape == (V,) and targets.shape == (N,) and targets.dtype == torch.int64
    if ((targets < 0) | (targets >= V)).any():
        raise IndexError(f"targets must be from 0 to {V - 1}")  # the kernel reads and writes by address
    dtype = torch.promote_types(logits.dtype, torch.float32)  # in which the kernel computes
    losses, bias = logits.new_empty(N, dtype=dtype), bias.to(dtype).contiguous()
    threads = torch.get_num_threads()
    load_library().call("cross_entropy", logits.dtype, N, threads, V, bias, targets.contiguous(), logits, losses)
    return losses.float()


def _autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype of torch.autocast, or None if it is disabled."""
    # the meta device has no autocast; torch.compile of torch 2.11 cannot trace torch.amp.is_autocast_available
    is_enabled = device_type != "meta" and torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if is_enabled else None


class ClusterScores(nn.Module):
    """Compute the scores of a range of token ids.

    Args:
        low: first token id.
        high: last token id + 1.
        table: (rows, width) embeddings of consecutive tokens, starting with token `offset`. Shared with the embedding if weights are tied.
        offset: token id of the first row of `table`.
        projection: (D, width). None if the width is D.
        cluster_logits: layer that scores the clusters of rare tokens. Its scores are appended to the scores of the tokens. Only the first
            cluster of the adaptive softmax has this layer. None for other clusters.
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
        """(N, D) -> (N, number of tokens and clusters)."""
        projected = hidden if self.projection is None else hidden @ self.projection
        scores = F.linear(projected, self.table[self.rows], self.bias)
        return scores if self.cluster_logits is None else torch.cat([scores, self.cluster_logits(projected)], dim=1)


class AdaptiveSoftmax(nn.Module):
    """Softmax over frequent tokens and one entry per cluster of rare tokens.

    To compute losses, the softmax over the tokens of a cluster is evaluated only for the targets in this cluster. Many targets are
    computed in chunks, and again in the backward pass, so memory does not grow with their number. All processes of ZeRO-3 must make the
    same calls of each module, so a chunk calls every cluster once, even if none of its targets belongs to it.

    The order of clusters is that of Transformer-XL's TensorFlow code. Without cutoffs, this class is a plain softmax, used for a table that
    is not tied to the embedding or that has another width than the model.

    Source: Grave et al. 2017 (arXiv:1609.04309), with the projections of Transformer-XL.
    """

    def __init__(self, config: ModelConfig, embedding: AdaptiveEmbedding) -> None:
        super().__init__()
        self.bounds = [(low, high) for low, high, _ in config.clusters]
        tie_projections = config.tie_projections or [False] * len(self.bounds)
        tables = [part.table for part in embedding.parts]
        if not config.tie_embedding:
            tables = [_new_parameter(config, *table.shape) for table in tables]
        self.clusters = nn.ModuleList()
        for i, (low, high, width) in enumerate(config.clusters):
            part = i if config.div_value > 1 else 0  # index among the clusters of the embedding
            projection = embedding.parts[part].projection
            if projection is not None and not tie_projections[i]:
                projection = _new_parameter(config, config.d_model, width)
            cluster_logits = nn.Linear(width, len(self.bounds) - 1) if i == 0 and len(self.bounds) > 1 else None
            if cluster_logits:
                initialize_linear(cluster_logits, config)
            offset = embedding.parts[part].low
            self.clusters.append(ClusterScores(low, high, tables[part], offset, projection, cluster_logits))

    def forward(self, hidden: Tensor, targets: Tensor | None = None, table: None = None) -> Tensor:
        """Compute log-probabilities (B, P, V), or losses (B, P) if targets are given. `table` is not used."""
        flat = hidden.flatten(0, -2)
        if targets is None:
            return self._log_probabilities(flat).view(*hidden.shape[:-1], self.bounds[-1][1])
        # the rare tokens take about as many logits as the frequent ones
        n_rows = max(MAX_LOGITS // (2 * self.bounds[0][1]), 1)
        recomputes = len(flat) > n_rows and torch.is_grad_enabled()
        run = partial(checkpoint, self._losses, use_reentrant=False) if recomputes else self._losses
        chunks = zip(flat.split(n_rows), targets.flatten().split(n_rows), strict=True)
        return torch.cat([run(*chunk) for chunk in chunks]).view(targets.shape)

    def _losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        n_head_tokens = self.bounds[0][1]
        starts = torch.tensor([low for low, _ in self.bounds[1:]], device=targets.device)
        cluster = torch.bucketize(targets, starts, right=True)  # 0 for the tokens of the head
        head_targets = torch.where(cluster == 0, targets, n_head_tokens + cluster - 1)
        losses = target_losses(self.clusters[0](hidden), head_targets)
        for i, (low, _) in enumerate(self.bounds[1:], 1):
            rows = (cluster == i).nonzero().squeeze(1)  # synchronizes with the device
            tail = target_losses(self.clusters[i](hidden[rows]), targets[rows] - low)
            losses = losses.index_add(0, rows, tail)
        return losses

    def _log_probabilities(self, hidden: Tensor) -> Tensor:
        head = self.clusters[0](hidden).float().log_softmax(-1)
        n_head_tokens = self.bounds[0][1]
        tails = [
            head[:, n_head_tokens + i, None] + tail(hidden).float().log_softmax(-1)
            for i, tail in enumerate(self.clusters[1:])
        ]
        return torch.cat([head[:, :n_head_tokens], *tails], dim=-1)


def _new_parameter(config: ModelConfig, *shape: int) -> nn.Parameter:
    return nn.Parameter(nn.init.normal_(torch.empty(*shape), std=config.init_std))
