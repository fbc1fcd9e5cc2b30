"""Memory of the activations of a training step, measured on a model without data (torch's meta device)."""

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

from pretrain.planning.flops import BatchShape, cluster_fractions
from xlpre.batch import Batch, make_batch
from xlpre.model.config import ModelConfig
from xlpre.model.dropout import Dropout
from xlpre.model.language_model import meta_model
from xlpre.model.memory import initial_memory


@dataclass(frozen=True)
class ActivationMemory:
    """Bytes of the tensors of a micro-batch, without weights, gradients and recurrent memory.

    Attributes:
        saved: tensors that autograd saves for backward, from the embedding to the last layer.
        logits: tensors that autograd saves in the softmax over the vocabulary.
        workspace: all other tensors that are allocated at the peak of forward and backward.
    """

    saved: int
    logits: int
    workspace: int

    @property
    def peak(self) -> int:
        """Peak of forward and backward."""
        return self.saved + self.logits + self.workspace


def activation_memory(
    model: ModelConfig, shape: BatchShape, dtype: torch.dtype, gpu: bool, activation_checkpointing: bool = False
) -> ActivationMemory:
    """Run a training step on a meta-device model, which holds no data, and track its tensors.

    Args:
        model: model config.
        shape: sizes of the micro-batch.
        dtype: type of the weights.
        gpu: True for dropout as on a GPU, which saves a byte per element instead of a seed.
        activation_checkpointing: True if tensors inside layers are recomputed instead of saved.
    """
    language_model = meta_model(model, shape.two_streams, shape.next_sentence).to(dtype)
    if gpu:
        _use_gpu_dropout(language_model)
    if activation_checkpointing:
        language_model.backbone.enable_activation_checkpointing()
    fractions = cluster_fractions(model, shape)
    for parameter in language_model.parameters():
        parameter.register_post_accumulate_grad_hook(_drop_gradient)  # gradients are part of zero_memory
    with torch.device("meta"):
        batch = _batch(shape)
        memory = initial_memory(model, shape.rows, mem_len=shape.mem_len, device="meta", dtype=dtype)
    inputs = [*language_model.parameters(), memory.hidden, *vars(batch).values()]
    with TensorTracker(inputs, _kernel_bodies(model.attention_backend)) as tracker:
        with _NonzeroStub(fractions):
            hidden, new_memory = language_model.backbone(batch, memory)
        saved = tracker.live - new_memory.hidden.nbytes - new_memory.valid.nbytes
        with _NonzeroStub(fractions[1:]):
            target_loss, *auxiliary_losses = language_model.losses(hidden, batch)
            loss = sum(auxiliary_losses, start=target_loss)
            del hidden, target_loss, auxiliary_losses
        logits = tracker.live - saved - new_memory.hidden.nbytes - new_memory.valid.nbytes
        loss.backward()
    return ActivationMemory(saved, logits, tracker.peak - saved - logits)


class TensorTracker(TorchDispatchMode):
    """Count the bytes of the tensors that are allocated and freed.

    Args:
        excluded: tensors that are not counted.
        kernel_bodies: Python functions by the names of the custom operators that they implement. They run instead of the operators, so
            that temporary tensors are counted, too.

    Attributes:
        live: bytes of the tensors alive now.
        peak: largest value of `live`.
    """

    def __init__(self, excluded: list[Any], kernel_bodies: Mapping[str, Callable[..., Any]] | None = None) -> None:
        super().__init__()
        self._known, self._kernel_bodies = storage_keys(excluded), kernel_bodies or {}
        self.live = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` and count the tensors that it allocates."""
        if body := self._kernel_bodies.get(func.name()):
            with self:
                return body(*args)
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if not isinstance(tensor, Tensor) or tensor.is_sparse:  # a sparse tensor consists of other tensors
                continue
            if (key := (storage := tensor.untyped_storage())._cdata) not in self._known:
                self._known.add(key)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._free, key, storage.nbytes())
        return out

    def _free(self, key: int, n_bytes: int) -> None:
        self._known.discard(key)
        self.live -= n_bytes


def storage_keys(values: list[Any]) -> set[int]:
    """Return the keys of the storages of all tensors in `values`."""
    return {tensor.untyped_storage()._cdata for tensor in values if isinstance(tensor, Tensor)}


class _NonzeroStub(TorchFunctionMode):
    """Replace `nonzero`, which has no result on the meta device. Each call selects the next value of `fractions` of the elements."""

    def __init__(self, fractions: Iterable[float]) -> None:
        super().__init__()
        self._fractions, self._sum = iter(fractions), 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`. For `nonzero`, return zeros of the expected shape instead."""
        if func is Tensor.nonzero:
            before, self._sum = self._sum, self._sum + next(self._fractions)
            n = args[0].numel()
            return args[0].new_zeros(round(self._sum * n) - round(before * n), args[0].dim(), dtype=torch.long)
        return func(*args, **(kwargs or {}))


def _kernel_bodies(attention_backend: str) -> Mapping[str, Callable[..., Any]]:
    if attention_backend != "triton":
        return {}
    from xlpre.model.kernels.triton.attention import IMPLEMENTATIONS  # only if triton is installed

    return IMPLEMENTATIONS


def _use_gpu_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, Dropout) and module.p:
            module.forward = partial(_native_dropout, module.p)  # type: ignore[method-assign]


def _native_dropout(p: float, x: Tensor) -> Tensor:
    return torch.native_dropout(x, p, True)[0]


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _batch(shape: BatchShape) -> Batch:
    B, T, P = shape.rows, shape.seq_len, shape.n_targets
    ids, ranks, positions = torch.zeros(B, T).long(), torch.zeros(B, T).int(), torch.zeros(B, P).long()
    return make_batch(ids, ranks, ranks, positions, reuse_len=shape.reuse_len)
