"""What a training step costs, counted from the model as it is: parameters, and operations of matrix products.

Nothing is computed: parameters are counted on a model without data (torch's meta device). Operations are a formula, so that a loop can
ask for them at every step; a test holds it to what the model executes.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from pretrain.config import PretrainConfig
from xlpre.model.config import ModelConfig
from xlpre.model.feedforward import GATED, gated_width
from xlpre.model.language_model import meta_model
from xlpre.objectives.registry import build_objective
from xlpre.training.optimizer import is_matrix

Counting = Literal["executed", "needed"]  # see operations

# what a parameter is, by the first of these that its name matches
PARTS = {
    "norms": r"norm",
    "biases": r"bias",
    "segments": r"seg_embed",
    "positions": r"terms\.position|position_embedding",
    "feed-forward": r"feed_forward",
    "attention": r"attention",
    "embedding": r"backbone\.(word_embedding|mask_embedding)",
    "softmax": r"^lm_head",
    "next sentence": r"^auxiliary_heads\.next_sentence",
}


@dataclass(frozen=True)
class BatchShape:
    """What a micro-batch asks of a model.

    Attributes:
        rows: B.
        window: T.
        mem_len: M.
        targets: P.
        reuse_len: first tokens of the window that enter memory.
        two_streams: whether predictions are read from the query stream.
        next_sentence: whether <cls> is read out, too, for next-sentence prediction.
        visible: share of the scores that an exact implementation cannot leave out.
        shares: of the tokens in each cluster of `model.cutoffs`; () expects the piece of rank r in proportion to 1/r.
    """

    rows: int
    window: int
    mem_len: int
    targets: int
    reuse_len: int
    two_streams: bool = True
    next_sentence: bool = False
    visible: float = field(default=1.0, kw_only=True)
    shares: tuple[float, ...] = field(default=(), kw_only=True)


def batch_shape(config: PretrainConfig, rows: int) -> BatchShape:
    """The shape of a micro-batch of `rows` windows of a pretraining."""
    data, M = config.data, config.model.mem_len
    objective = build_objective(config.objective, data, np.ones(1, bool))  # raises what it cannot read
    T, R, K = data.seq_len, data.reuse_len, config.model.mem_len + data.seq_len
    # the reused part of a window never sees the rest; a causal model sees a triangle of the window
    visible = (R * (M + R) + (T - R) * K) / (T * K) if objective.sees_ahead else (M + (T + 1) / 2) / K
    targets, next_sentence = objective.n_targets(T, R), config.objective.next_sentence
    return BatchShape(rows, T, M, targets, R, objective.two_streams, next_sentence, visible=visible)


def parameters(model: ModelConfig, two_streams: bool = True, next_sentence: bool = False) -> dict[str, int]:
    """Numbers of parameters by part (PARTS); what is shared counts once."""
    found = dict.fromkeys(PARTS, 0)
    for name, parameter in meta_model(model, two_streams, next_sentence).named_parameters():
        found[next(part for part, pattern in PARTS.items() if re.search(pattern, name))] += parameter.numel()
    return found


def tensor_sizes(model: ModelConfig, next_sentence: bool = False) -> list[int]:
    """Elements of each parameter."""
    return [
        parameter.numel() for parameter in meta_model(model, two_streams=True, next_sentence=next_sentence).parameters()
    ]


def matrix_shapes(model: ModelConfig) -> list[tuple[int, ...]]:
    """Those of the matrices of layers, which Muon moves."""
    named = meta_model(model, two_streams=True).named_parameters()
    return [tuple(parameter.shape) for name, parameter in named if is_matrix(name, parameter)]


def flops_per_step(model: ModelConfig, shape: BatchShape) -> float:
    """Operations that forward and backward of a micro-batch need: what model FLOPs utilisation (MFU) is counted with."""
    return sum(operations(model, shape, "needed").values())


def flops_of_reading(model: ModelConfig, shape: BatchShape, counting: Counting = "needed") -> float:
    """Operations of the forward pass alone at evaluation, where keys and values of memory, and keys of distances, are known
    (model/cache.py), of a model whose positions enter by distance.
    """
    parts = operations(model, shape, counting)
    parts["keys and values"] = operations(model, dataclasses.replace(shape, mem_len=0), counting)["keys and values"]
    parts["position keys"] = 0.0
    return sum(parts.values()) / 3


def operations(
    model: ModelConfig,
    shape: BatchShape,
    counting: Counting = "executed",
    recomputed: bool = False,
) -> dict[str, float]:
    """Floating-point operations of the matrix products of forward and backward, by part; two a multiply-add.

    Args:
        model: its shape.
        shape: of the micro-batch.
        counting: `executed`: what this model does. `needed`: what an exact implementation must do: no score that nothing sees, no
            position score of a distance that a row does not have, position keys once for both directions where dropout makes them
            differ.
        recomputed: `train.activation_checkpointing`: layers execute their forward twice, which is not needed.
    """
    B, T, M, P, L = shape.rows, shape.window, shape.mem_len, shape.targets, model.n_layer
    D, A, K, R = model.d_model, model.n_head * model.head_width, M + T, M + 2 * T
    all_of_it = counting == "executed"
    again = int(all_of_it and recomputed)
    seen = 1.0 if all_of_it else shape.visible
    # the last layer computes only rows that are read out
    rows = B * ((L - 1) * (T + P * shape.two_streams) + P + shape.next_sentence)
    # no gradient enters memory itself, but what is learned before its keys and values needs that of their input
    memory_passes = (3 if model.norm != "post" or model.positions == "learned" else 2) + again
    by_distance = model.positions in ("relative", "shaw")
    # sines and cosines of distances from 0 to K make the keys of all
    distances = (1 + all_of_it) * R if model.dropout else K + 1
    F_, matrices = (gated_width(model), 3) if model.feed_forward in GATED else (model.d_inner, 2)

    def products(n_rows: float, inner: int, outer: float, passes: int = 3) -> float:
        """Forward, and backward for the weight and for the input: three passes."""
        return 2 * n_rows * inner * outer * passes

    def of_layer(n_rows: float, inner: int, outer: float) -> float:
        return products(n_rows, inner, outer, 3 + again)

    # recomputing stops where backward needs no more: before the last product, if its output is only added to something
    spared = products(rows, D, F_, passes=1) * (again and model.norm != "post" and not model.dropout)
    return {
        "queries and attention output": 2 * of_layer(rows, D, A),
        "keys and values": 2 * L * (of_layer(B * T, D, A) + products(B * M, D, A, memory_passes)),
        "position keys": L * products(distances, D, A, 2 + again) * (model.positions == "relative"),
        "content scores": of_layer(rows, A, K * seen),
        "position scores": of_layer(rows, A, R if all_of_it else K * seen) * by_distance,
        "attention over values": of_layer(rows, A, K * seen),
        "feed-forward": of_layer(rows, D, F_ * matrices) - spared,
        "embedding": _embedding_products(model, shape, products),
        "softmax": _softmax_products(model, shape, products),
        "next sentence": products(B, D, D + 2) * shape.next_sentence,
    }


def _embedding_products(model: ModelConfig, shape: BatchShape, products: Any) -> float:
    if not model.projects_embedding:
        return 0.0
    n = shape.rows * shape.window
    if model.div_value == 1:
        return products(n, model.embedding_width, model.d_model)
    return sum(
        products(n * share, width, model.d_model)
        for share, (_, _, width) in zip(cluster_shares(model, shape), model.clusters, strict=True)
    )


def _softmax_products(model: ModelConfig, shape: BatchShape, products: Any) -> float:
    n, (head, *tails) = shape.rows * shape.targets, model.clusters
    projected = model.projects_embedding
    total = products(n, head[2], head[1] + len(tails))
    total += products(n, model.d_model, head[2]) * projected
    for share, (low, high, width) in zip(cluster_shares(model, shape)[1:], tails, strict=True):
        total += products(n * share, width, high - low) + products(n * share, model.d_model, width) * projected
    return total


def cluster_shares(model: ModelConfig, shape: BatchShape) -> tuple[float, ...]:
    """The share of tokens in each cluster of pieces: of `shape`, or by Zipf's law."""
    if shape.shares:
        return shape.shares
    mass = np.concatenate([[0.0], np.cumsum(1 / np.arange(1, model.vocab_size + 1))])
    return tuple(float(mass[high] - mass[low]) / float(mass[-1]) for low, high, _ in model.clusters)
