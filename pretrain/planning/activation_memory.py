"""How much memory a training step needs for its tensors, found without data (torch's meta device)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pretrain.planning.flops import BatchShape, cluster_shares
from xlpre.batch import Batch
from xlpre.model.config import ModelConfig
from xlpre.model.dropout import Dropout
from xlpre.model.language_model import meta_model
from xlpre.model.memory import initial_memory


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


def activations(
    model: ModelConfig, shape: BatchShape, dtype: torch.dtype, gpu: bool, recomputed: bool = False
) -> Activations:
    """Follow the tensors of a training step through a model without data.

    Args:
        model: its shape.
        shape: of the micro-batch.
        dtype: of weights.
        gpu: as on a GPU: dropout remembers a byte an element, not a seed.
        recomputed: `train.activation_checkpointing`: what is inside layers is not kept, but computed again.
    """
    language_model = meta_model(model, shape.two_streams, shape.next_sentence).to(dtype)
    if gpu:
        _as_on_gpus(language_model)
    if recomputed:
        language_model.backbone.recompute_layers()
    shares = cluster_shares(model, shape)
    for parameter in language_model.parameters():
        parameter.register_post_accumulate_grad_hook(_drop_gradient)  # gradients are counted elsewhere
    with torch.device("meta"):
        batch = _batch(shape)
        memory = initial_memory(model, shape.rows, mem_len=shape.mem_len, device="meta", dtype=dtype)
    given = [*language_model.parameters(), memory.hidden, *vars(batch).values()]
    with Tensors(given, _inside_of(model.attention_backend)) as tensors:
        with _FoundIn(shares):
            hidden, new_memory = language_model.backbone(batch, memory)
        kept = tensors.live - new_memory.hidden.nbytes - new_memory.valid.nbytes
        with _FoundIn(shares[1:]):
            targets, *others = language_model.losses(hidden, batch)
            loss = sum(others, start=targets)
            del hidden, targets, others
        logits = tensors.live - kept - new_memory.hidden.nbytes - new_memory.valid.nbytes
        loss.backward()
    return Activations(kept, logits, tensors.peak - kept - logits)


class Tensors(TorchDispatchMode):
    """Counts the bytes of tensors that come and go, besides those `given`.

    Args:
        given: they are not counted.
        inside: what operators of one's own compute, by their names, so that what comes and goes in them is counted too.
    """

    def __init__(self, given: list[Any], inside: Mapping[str, Callable[..., Any]] | None = None) -> None:
        super().__init__()
        self._known, self._inside = storages_of(given), inside or {}
        self.live = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` and count what it makes."""
        if inside := self._inside.get(func.name()):
            with self:
                return inside(*args)
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if not isinstance(tensor, Tensor) or tensor.is_sparse:  # which is made of others
                continue
            if (key := (storage := tensor.untyped_storage())._cdata) not in self._known:
                self._known.add(key)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._gone, key, storage.nbytes())
        return out

    def _gone(self, key: int, n_bytes: int) -> None:
        self._known.discard(key)
        self.live -= n_bytes


def storages_of(tensors: list[Any]) -> set[int]:
    """Keys of the storages of those that are tensors."""
    return {tensor.untyped_storage()._cdata for tensor in tensors if isinstance(tensor, Tensor)}


class _FoundIn(TorchFunctionMode):
    """What `nonzero` finds where there are no data: in turn, `shares` of the elements."""

    def __init__(self, shares: Iterable[float]) -> None:
        super().__init__()
        self._shares, self._found = iter(shares), 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, or what stands for it."""
        if func is Tensor.nonzero:
            before, self._found = self._found, self._found + next(self._shares)
            n = args[0].numel()
            return args[0].new_zeros(round(self._found * n) - round(before * n), args[0].dim(), dtype=torch.long)
        return func(*args, **(kwargs or {}))


def _inside_of(attention: str) -> Mapping[str, Callable[..., Any]]:
    if attention != "triton":
        return {}
    from xlpre.model.kernels.triton.attention import INSIDE  # which the model has found by now

    return INSIDE


def _as_on_gpus(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, Dropout) and module.share:
            module.forward = partial(_native_dropout, module.share)  # type: ignore[method-assign]


def _native_dropout(p: float, x: Tensor) -> Tensor:
    return torch.native_dropout(x, p, True)[0]


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _batch(shape: BatchShape) -> Batch:
    B, T, P = shape.rows, shape.window, shape.targets
    ids, ranks, places = torch.zeros(B, T).long(), torch.zeros(B, T).int(), torch.zeros(B, P).long()
    of_rows = torch.zeros(B).long()
    return Batch(
        ids, ids, ranks, ranks, places, places, torch.zeros(B, P), of_rows.bool(), of_rows, of_rows, shape.reuse_len
    )
