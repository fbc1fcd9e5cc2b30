"""What a training step costs, counted from the model as it is: parameters, operations of matrix products, activations.

Nothing is computed: parameters and activations are counted on a model without data (torch's meta device). Operations are a formula,
so that a loop can ask for them at every step; a test holds it to what the model executes.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pretrain.config import PretrainConfig
from xlpre.batch import Batch
from xlpre.model.config import ModelConfig
from xlpre.model.feedforward import GATED, gated_width
from xlpre.model.language_model import without_data
from xlpre.model.memory import first_memory
from xlpre.objectives.build import build_objective
from xlpre.objectives.spans import target_shares

# what a parameter is, by the first of these that its name matches
PARTS = {
    "norms": r"norm",
    "biases": r"bias|\.shared\.",
    "segments": r"same_different",
    "positions": r"terms\.position|places",
    "feed-forward": r"feed_forward",
    "attention": r"attention",
    "embedding": r"backbone\.(embedding|mask_embedding)",
    "softmax": r"^output",
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
        visible: share of the scores that an exact implementation cannot leave out.
        shares: of the tokens in each cluster of `model.cutoffs`; () expects the piece of rank r in proportion to 1/r.
    """

    rows: int
    window: int
    mem_len: int
    targets: int
    reuse_len: int
    two_streams: bool = True
    visible: float = 1.0
    shares: tuple[float, ...] = ()


def batch_shape(config: PretrainConfig, rows: int) -> BatchShape:
    """The shape of a micro-batch of `rows` windows of a pretraining."""
    data, M = config.data, config.model.mem_len
    two_streams = build_objective(config.objective, data, np.ones(1, bool)).two_streams  # raises what it cannot read
    T, R, K = data.window, data.reuse_len, config.model.mem_len + data.window
    causal = config.objective.name == "causal"
    # the reused part of a window never sees the rest; a causal model sees a triangle of the window
    visible = (M + (T + 1) / 2) / K if causal else (R * (M + R) + (T - R) * K) / (T * K)
    targets = T if causal else sum(target_shares(T, R, config.objective.partial_k))
    return BatchShape(rows, T, M, targets, R, two_streams, visible)


def parameters(model: ModelConfig, two_streams: bool = True) -> dict[str, int]:
    """Numbers of parameters by part (PARTS); what is shared counts once."""
    found = dict.fromkeys(PARTS, 0)
    for name, parameter in without_data(model, two_streams).named_parameters():
        found[next(part for part, pattern in PARTS.items() if re.search(pattern, name))] += parameter.numel()
    return found


def small_parameters(model: ModelConfig, below: int) -> int:
    """Parameters in tensors of fewer elements than `below`, which ZeRO-3 does not split."""
    sizes = [parameter.numel() for parameter in without_data(model, two_streams=True).parameters()]
    return sum(size for size in sizes if size < below)


def flops_per_step(model: ModelConfig, shape: BatchShape) -> float:
    """Operations that forward and backward of a micro-batch need: what model FLOPs utilisation (MFU) is counted with."""
    return sum(operations(model, shape, "needed").values())


def operations(
    model: ModelConfig, shape: BatchShape, counting: Literal["executed", "needed"] = "executed"
) -> dict[str, float]:
    """Floating-point operations of the matrix products of forward and backward, by part; two a multiply-add.

    Args:
        model: its shape.
        shape: of the micro-batch.
        counting: `executed`: what this model does. `needed`: what an exact implementation must do: no score that nothing sees, no
            position score of a distance that a row does not have, position keys once for both directions.
    """
    B, T, M, P, L = shape.rows, shape.window, shape.mem_len, shape.targets, model.n_layer
    D, A, K, R = model.d_model, model.n_head * model.head_width, M + T, M + 2 * T
    all_of_it = counting == "executed"
    seen = 1.0 if all_of_it else shape.visible
    # the last layer computes target rows only
    rows = B * ((L - 1) * (T + P * shape.two_streams) + P)
    # no gradient enters memory itself, but what is learned before its keys and values needs that of their input
    memory_passes = 3 if model.norm != "post" or model.positions == "learned" else 2
    by_distance = model.positions in ("relative", "shaw")
    F_, matrices = (gated_width(model), 3) if model.feed_forward in GATED else (model.d_inner, 2)

    def products(n_rows: float, inner: int, outer: float, passes: int = 3) -> float:
        """Forward, and backward for the weight and for the input: three passes."""
        return 2 * n_rows * inner * outer * passes

    return {
        "queries and attention output": 2 * products(rows, D, A),
        "keys and values": 2 * L * (products(B * T, D, A) + products(B * M, D, A, memory_passes)),
        "position keys": L * products((1 + all_of_it) * R, D, A, passes=2) * (model.positions == "relative"),
        "content scores": products(rows, A, K * seen),
        "position scores": products(rows, A, R if all_of_it else K * seen) * by_distance,
        "attention over values": products(rows, A, K * seen),
        "feed-forward": products(rows, D, F_ * matrices),
        "embedding": _embedding_products(model, shape, products),
        "softmax": _softmax_products(model, shape, products),
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


@dataclass(frozen=True)
class Activations:
    """Bytes of a micro-batch's tensors, besides weights, gradients and memory.

    Attributes:
        kept: what autograd keeps for the backward pass, from embedding to last layer.
        logits: what it keeps of the softmax over the vocabulary.
        working: what stands beside them at the fullest moment of forward and backward.
    """

    kept: int
    logits: int
    working: int

    @property
    def all(self) -> int:
        """At the fullest moment."""
        return self.kept + self.logits + self.working


def activations(model: ModelConfig, shape: BatchShape, dtype: torch.dtype, gpu: bool) -> Activations:
    """Follow the tensors of a training step through a model without data.

    Args:
        model: its shape.
        shape: of the micro-batch.
        dtype: of weights.
        gpu: dropout remembers a byte an element, as on a GPU, not a number, as on a CPU.
    """
    language_model = without_data(model, shape.two_streams).to(dtype)
    shares = cluster_shares(model, shape)
    for parameter in language_model.parameters():
        parameter.register_post_accumulate_grad_hook(_drop_gradient)  # gradients are counted elsewhere
    with torch.device("meta"):
        batch = _batch(shape)
        memory = first_memory(model, shape.rows, mem_len=shape.mem_len, device="meta", dtype=dtype)
    given = [*language_model.parameters(), memory.hidden, *vars(batch).values()]
    with Tensors(given) as tensors:
        of_layers, of_softmax = Kept(given), Kept(given)
        with _WithoutData(shares, gpu), of_layers:
            hidden, _new_memory = language_model.backbone(batch, memory)
        with _WithoutData(shares[1:], gpu), of_softmax:
            losses = language_model.output(hidden, batch.targets)
            loss = (losses * batch.target_weights).sum() / batch.target_weights.sum()
        kept, logits = of_layers.n_bytes, of_softmax.n_bytes_besides(of_layers)
        of_layers.storages.clear()
        of_softmax.storages.clear()
        loss.backward()
    return Activations(kept, logits, tensors.peak - kept - logits)


class Tensors(TorchDispatchMode):
    """Counts the bytes of tensors that come and go, besides those `given`."""

    def __init__(self, given: list[Any]) -> None:
        super().__init__()
        self._known = storages_of(given)
        self.live = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` and count what it makes."""
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and (key := (storage := tensor.untyped_storage())._cdata) not in self._known:
                self._known.add(key)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._gone, key, storage.nbytes())
        return out

    def _gone(self, key: int, n_bytes: int) -> None:
        self._known.discard(key)
        self.live -= n_bytes


class Kept(saved_tensors_hooks):
    """Collects what autograd keeps for backward, besides what was `given`."""

    def __init__(self, given: list[Any]) -> None:
        self._given = storages_of(given)
        self.storages: dict[int, torch.UntypedStorage] = {}
        super().__init__(self._note, lambda tensor: tensor)

    @property
    def n_bytes(self) -> int:
        """Their bytes in all."""
        return sum(storage.nbytes() for storage in self.storages.values())

    def n_bytes_besides(self, other: Kept) -> int:
        """Bytes of what `other` did not collect."""
        return sum(storage.nbytes() for key, storage in self.storages.items() if key not in other.storages)

    def _note(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._given:
            self.storages[storage._cdata] = storage
        return tensor


def storages_of(tensors: list[Any]) -> set[int]:
    """Keys of the storages of those that are tensors."""
    return {tensor.untyped_storage()._cdata for tensor in tensors if isinstance(tensor, Tensor)}


class _WithoutData(TorchFunctionMode):
    """What a model does with data it does not have, and with dropout.

    Args:
        shares: of the elements that each call of `nonzero` finds, in turn.
        gpu: see `activations`.
    """

    def __init__(self, shares: Iterable[float], gpu: bool) -> None:
        super().__init__()
        self._shares, self._gpu, self._found = iter(shares), gpu, 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, or what stands for it."""
        if func is Tensor.nonzero:
            before, self._found = self._found, self._found + next(self._shares)
            n = args[0].numel()
            return args[0].new_zeros(round(self._found * n) - round(before * n), args[0].dim(), dtype=torch.long)
        if func is F.dropout and self._gpu:
            return _gpu_dropout(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _gpu_dropout(x: Tensor, p: float, training: bool, inplace: bool) -> Tensor:
    return torch.native_dropout(x, p, True)[0] if training and p else x


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _batch(shape: BatchShape) -> Batch:
    B, T, P = shape.rows, shape.window, shape.targets
    ids, ranks, places = torch.zeros(B, T).long(), torch.zeros(B, T).int(), torch.zeros(B, P).long()
    of_rows = torch.zeros(B).long()
    return Batch(
        ids, ids, ranks, ranks, places, places, torch.zeros(B, P), of_rows.bool(), of_rows, of_rows, shape.reuse_len
    )
