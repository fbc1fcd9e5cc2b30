"""Parameters and FLOPs of a training step.

Parameters are counted on a model without data (torch's meta device). FLOPs of the matrix products come from formulas, which
are fast enough for a training loop; a test compares them with the operations that the model executes.
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
from xlpre.training.optimizer import is_layer_matrix

Counting = Literal["hardware", "model"]  # see flops_by_part

# parts of a model and patterns of parameter names; the first pattern that matches decides
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
    """Sizes of a micro-batch.

    Attributes:
        rows: number of rows, B.
        seq_len: number of window tokens, T.
        mem_len: number of memory columns, M.
        n_targets: number of targets per row, P.
        reuse_len: number of leading tokens of the window that enter memory.
        two_streams: True if the model has a query stream, which makes the predictions.
        next_sentence: True if next-sentence prediction reads <cls>.
        visible_fraction: fraction of the attention scores that are not masked, which an exact implementation must compute. Scores that a
            factorization order hides count as visible, which makes the model FLOPs one to two percent too high.
        cluster_fractions: fraction of the tokens in each vocabulary cluster of `model.cutoffs`. Empty: the fractions follow Zipf's law, in
            which the r-th most frequent piece has a frequency proportional to 1/r.
    """

    rows: int
    seq_len: int
    mem_len: int
    n_targets: int
    reuse_len: int
    two_streams: bool = True
    next_sentence: bool = False
    visible_fraction: float = field(default=1.0, kw_only=True)
    cluster_fractions: tuple[float, ...] = field(default=(), kw_only=True)


def batch_shape(config: PretrainConfig, rows: int) -> BatchShape:
    """Return the sizes of a micro-batch of `rows` windows in a pretraining run."""
    data, M = config.data, config.model.mem_len
    objective = build_objective(config.objective, data, np.ones(1, bool))
    T, R, K = data.seq_len, data.reuse_len, config.model.mem_len + data.seq_len
    # the reused part of a window never attends to the rest; a causal model attends to a triangle of the window
    visible_fraction = (R * (M + R) + (T - R) * K) / (T * K) if objective.sees_ahead else (M + (T + 1) / 2) / K
    return BatchShape(
        rows,
        T,
        M,
        objective.n_targets(T, R),
        R,
        objective.two_streams,
        config.objective.next_sentence,
        visible_fraction=visible_fraction,
    )


def count_parameters(model: ModelConfig, next_sentence: bool = False) -> dict[str, int]:
    """Return the number of parameters of each part in `PARTS`; shared parameters count once."""
    counts = dict.fromkeys(PARTS, 0)
    for name, parameter in meta_model(model, True, next_sentence).named_parameters():
        counts[next(part for part, pattern in PARTS.items() if re.search(pattern, name))] += parameter.numel()
    return counts


def parameter_sizes(model: ModelConfig, next_sentence: bool = False) -> list[int]:
    """Return the number of elements of each parameter."""
    return [
        parameter.numel() for parameter in meta_model(model, two_streams=True, next_sentence=next_sentence).parameters()
    ]


def matrix_shapes(model: ModelConfig) -> list[tuple[int, ...]]:
    """Return the shapes of the matrices that Muon updates."""
    parameters = meta_model(model, two_streams=True).named_parameters()
    return [tuple(parameter.shape) for name, parameter in parameters if is_layer_matrix(name, parameter)]


def flops_per_step(model: ModelConfig, shape: BatchShape) -> float:
    """Return the model FLOPs of forward and backward of a micro-batch, from which model FLOPs utilization (MFU) is computed."""
    return sum(flops_by_part(model, shape, "model").values())


def inference_flops(model: ModelConfig, shape: BatchShape, counting: Counting) -> float:
    """Return the FLOPs of a forward pass at evaluation.

    The keys and values of the memory and the position keys are cached (xlpre/model/memory.py), so they cost nothing. This holds only for
    models that encode positions by distance.
    """
    parts = flops_by_part(model, shape, counting)
    parts["keys and values"] = flops_by_part(model, dataclasses.replace(shape, mem_len=0), counting)["keys and values"]
    parts["position keys"] = 0.0
    return sum(parts.values()) / 3


def flops_by_part(
    model: ModelConfig,
    shape: BatchShape,
    counting: Counting = "hardware",
    activation_checkpointing: bool = False,
) -> dict[str, float]:
    """Return the FLOPs of the matrix products of forward and backward by part; a multiply-add counts as two.

    Args:
        model: model config.
        shape: sizes of the micro-batch.
        counting: `hardware` counts what this implementation computes. `model` counts what an exact implementation must compute. It
            leaves out masked scores, and position scores at distances at which a query has no key. It counts position keys once; this
            model computes them for each reading direction, because each direction has its own dropout.
        activation_checkpointing: True if layers compute their forward pass twice. `model` counts it once.
    """
    B, T, M, P, L = shape.rows, shape.seq_len, shape.mem_len, shape.n_targets, model.n_layer
    D, A, K, R = model.d_model, model.n_head * model.head_width, M + T, M + 2 * T
    is_hardware = counting == "hardware"
    extra_passes = int(is_hardware and activation_checkpointing)
    visible = 1.0 if is_hardware else shape.visible_fraction
    # query rows of all layers; the last layer computes only the rows whose output is used
    rows = B * ((L - 1) * (T + P * shape.two_streams) + P + shape.next_sentence)
    # memory needs no gradient, but parameters that are applied to it before the keys and values (norm, position embedding) do
    memory_passes = (3 if model.norm != "post" or model.positions == "learned" else 2) + extra_passes
    by_distance = model.positions in ("relative", "shaw")
    # without dropout, sines and cosines of the distances 0 to K give the keys of all distances
    distances = (1 + is_hardware) * R if model.dropout else K + 1
    F_, matrices = (gated_width(model), 3) if model.feed_forward in GATED else (model.d_inner, 2)

    def products(n_rows: float, inner: int, outer: float, passes: int = 3) -> float:
        """Return the FLOPs of a matrix product. The three passes are forward, and backward for the weight and for the input."""
        return 2 * n_rows * inner * outer * passes

    def layer_products(n_rows: float, inner: int, outer: float) -> float:
        return products(n_rows, inner, outer, 3 + extra_passes)

    # recomputation stops before the last product if backward does not need its output, which is only added to the residual
    skipped = products(rows, D, F_, passes=1) * (extra_passes and model.norm != "post" and not model.dropout)
    return {
        "queries and attention output": 2 * layer_products(rows, D, A),
        "keys and values": 2 * L * (layer_products(B * T, D, A) + products(B * M, D, A, memory_passes)),
        "position keys": L * products(distances, D, A, 2 + extra_passes) * (model.positions == "relative"),
        "content scores": layer_products(rows, A, K * visible),
        "position scores": layer_products(rows, A, R if is_hardware else K * visible) * by_distance,
        "attention over values": layer_products(rows, A, K * visible),
        "feed-forward": layer_products(rows, D, F_ * matrices) - skipped,
        "embedding": _embedding_products(model, shape, products),
        "softmax": _softmax_products(model, shape, products),
        "next sentence": products(B, D, D + 2) * shape.next_sentence,
    }


def _embedding_products(model: ModelConfig, shape: BatchShape, products: Any) -> float:
    if not model.has_embedding_projection:
        return 0.0
    n = shape.rows * shape.seq_len
    if model.div_value == 1:
        return products(n, model.embedding_width, model.d_model)
    return sum(
        products(n * fraction, width, model.d_model)
        for fraction, (_, _, width) in zip(cluster_fractions(model, shape), model.clusters, strict=True)
    )


def _softmax_products(model: ModelConfig, shape: BatchShape, products: Any) -> float:
    n, (head, *tails) = shape.rows * shape.n_targets, model.clusters
    projected = model.has_embedding_projection
    total = products(n, head[2], head[1] + len(tails))
    total += products(n, model.d_model, head[2]) * projected
    for fraction, (low, high, width) in zip(cluster_fractions(model, shape)[1:], tails, strict=True):
        total += products(n * fraction, width, high - low) + products(n * fraction, model.d_model, width) * projected
    return total


def cluster_fractions(model: ModelConfig, shape: BatchShape) -> tuple[float, ...]:
    """Return the fraction of tokens in each vocabulary cluster, from `shape` or by Zipf's law."""
    if shape.cluster_fractions:
        return shape.cluster_fractions
    clusters = model.clusters
    mass = np.concatenate([[0.0], np.cumsum(1 / np.arange(1, clusters[-1][1] + 1))])
    return tuple(float(mass[high] - mass[low]) / float(mass[-1]) for low, high, _ in clusters)
