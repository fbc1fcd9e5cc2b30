"""Detector of the first non-finite value in a forward and backward pass, and the replay of a micro-batch with it."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from xlpre.batch import Batch
from xlpre.model.language_model import LanguageModel
from xlpre.model.memory import Memory

# modules whose outputs have the reading direction as first dimension, not the batch row
DIRECTION_FIRST = ("pos_encoding", "pos_encoding.dropout", "terms.position.key")


@dataclass(frozen=True)
class NonFiniteSite:
    """First operation with finite inputs and non-finite outputs.

    Attributes:
        description: description of the operation.
        max_input: largest absolute value of the inputs (in backward: of the incoming gradients). None if the inputs contain no
            floating-point numbers.
        max_weight: largest absolute value of the module's own weights. None if it has no weights, or if they are
            not involved.
        rows: indices of the batch rows with non-finite outputs. None if unknown.
    """

    description: str
    max_input: float | None
    max_weight: float | None
    rows: list[int] | None


class NonFiniteDetector:
    """Context manager that watches a model during one forward and backward pass.

    Args:
        model: the model.
        n_rows: rows of the batch, B.

    Attributes:
        forward: first module, in the order of execution, with finite inputs and a non-finite output.
        backward: first module or parameter, in the order of the backward pass, with a finite incoming and a non-finite outgoing gradient.
    """

    def __init__(self, model: nn.Module, n_rows: int) -> None:
        self.forward: NonFiniteSite | None = None
        self._model, self._n_rows = model, n_rows
        self._backward_in_module: NonFiniteSite | None = None
        self._backward_between_modules: NonFiniteSite | None = None
        self._hooks = ExitStack()

    @property
    def backward(self) -> NonFiniteSite | None:
        """The first non-finite gradient, in or between modules; None if all are finite."""
        return self._backward_in_module or self._backward_between_modules

    def __enter__(self) -> NonFiniteDetector:
        self._hooks.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Full backward hook is firing")  # the inputs of an embedding have no gradient
        warnings.filterwarnings("ignore", "For backward hooks to be called")  # a module may return a dict
        for name, module in self._model.named_modules():
            for handle in (
                module.register_forward_hook(partial(self._after_forward, name)),
                module.register_full_backward_pre_hook(partial(self._before_backward, name)),
                module.register_full_backward_hook(partial(self._after_backward, name)),
            ):
                self._hooks.callback(handle.remove)
        for name, parameter in self._model.named_parameters():
            self._hooks.callback(parameter.register_hook(partial(self._on_parameter_gradient, name)).remove)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.close()

    def _after_forward(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        # the hook of a module runs after those of its children, so the innermost module is first
        if self.forward is None and not is_finite(output) and is_finite(inputs):
            description = f"the output of {name}" if name else "the loss, computed from finite outputs"
            weights = list(module.parameters(recurse=False))
            rows = self._nonfinite_rows(name, inputs, output)
            self.forward = NonFiniteSite(description, max_abs(inputs), max_abs(weights), rows)

    def _before_backward(self, name: str, module: nn.Module, incoming: Any) -> None:
        if self._backward_between_modules is None and not is_finite(incoming):
            description = f"the incoming gradient of {name or 'the loss'}"
            rows = self._nonfinite_rows(name, incoming, incoming)
            self._backward_between_modules = NonFiniteSite(description, None, None, rows)

    def _after_backward(self, name: str, module: nn.Module, outgoing: Any, incoming: Any) -> None:
        if self._backward_in_module is None and not is_finite(outgoing) and is_finite(incoming):
            description = f"the outgoing gradient of {name}"
            weights = list(module.parameters(recurse=False))
            rows = self._nonfinite_rows(name, incoming, outgoing)
            self._backward_in_module = NonFiniteSite(description, max_abs(incoming), max_abs(weights), rows)

    def _on_parameter_gradient(self, name: str, gradient: Tensor) -> None:
        if self.backward is None and not is_finite(gradient):
            self._backward_in_module = NonFiniteSite(f"the gradient of {name}", None, None, None)

    def _nonfinite_rows(self, name: str, inputs: Any, outputs: Any) -> list[int] | None:
        """Return the rows with non-finite outputs; None unless inputs and outputs have a batch dimension first."""
        if name.endswith(DIRECTION_FIRST) or not any(self._has_batch_dim(tensor) for tensor in _tensors(inputs)):
            return None
        rows: set[int] = set()
        for tensor in _tensors(outputs):
            if tensor.dim() < 2 or tensor.size(0) != self._n_rows:
                return None
            rows.update((~tensor.isfinite()).flatten(1).any(1).nonzero().flatten().tolist())
        return sorted(rows)

    def _has_batch_dim(self, tensor: Tensor) -> bool:
        is_ids = tensor.dim() == 2 and not tensor.is_floating_point()
        return (tensor.dim() >= 3 or is_ids) and tensor.size(0) == self._n_rows


def is_finite(value: Any) -> bool:
    """Return True if all numbers in `value` are finite: tensors, or collections and dataclasses of them."""
    return all(bool(tensor.isfinite().all()) for tensor in _tensors(value))


def max_abs(value: Any) -> float | None:
    """Return the largest absolute value of the floating-point numbers in `value`; None if there are none."""
    sizes = [tensor.abs().max().item() for tensor in _tensors(value) if tensor.is_floating_point() and tensor.numel()]
    return max(sizes, default=None)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, Memory):
        yield value.hidden.transpose(0, 1)  # rows first, as in other tensors
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))


@dataclass(frozen=True)
class ReplayResult:
    """Finite and non-finite values of one micro-batch.

    Attributes:
        memory_rows: rows whose memory was not finite before the forward pass.
        forward: first module with a non-finite output, see NonFiniteDetector.
        loss: sum of all losses, not divided by the number of micro-batches.
        backward: first non-finite gradient, see NonFiniteDetector. Also None if the loss is not finite, because then there is no
            backward pass.
        grad_norm: global norm of the gradients of all parameters; None without a backward pass.
        nonfinite_parameters: names of the parameters whose gradient is not finite.
        max_gradient: largest absolute value of the finite gradients, and the name of its parameter.
    """

    memory_rows: list[int]
    forward: NonFiniteSite | None
    loss: float
    backward: NonFiniteSite | None
    grad_norm: float | None
    nonfinite_parameters: list[str]
    max_gradient: tuple[float, str] | None

    @property
    def first(self) -> str | None:
        """Description of the first non-finite value; None if all values are finite."""
        if self.memory_rows:
            return f"the memory of {format_rows(self.memory_rows)}"
        if site := self.forward or self.backward:
            return site.description + (f", {format_rows(site.rows)}" if site.rows else "")
        if self.grad_norm is not None and self.grad_norm**2 > torch.finfo(torch.float32).max:
            return f"the square of the global gradient norm {self.grad_norm:.3g}, in fp32"
        return None

    @property
    def rows(self) -> list[int] | None:
        """Batch rows with non-finite values where such values first occur; empty if all are finite, None if unknown."""
        if self.memory_rows:
            return self.memory_rows
        site = self.forward or self.backward
        return site.rows if site else []


def replay(model: LanguageModel, batch: Batch, memory: Memory) -> ReplayResult:
    """Run one micro-batch forward, and backward if its loss is finite.

    `batch` and `memory` must be on the device of `model`, and `memory` in its precision.
    """
    model.zero_grad()
    memory_rows = (~memory.finite_rows()).nonzero().flatten().tolist()
    with NonFiniteDetector(model, batch.input_ids.size(0)) as detector:
        target_loss, _, *auxiliary_losses = model(batch, memory)
        loss = sum(auxiliary_losses, start=target_loss)
        if is_finite(loss):
            loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    sizes = [(size, name) for name, gradient in gradients.items() if (size := max_abs(gradient)) is not None]
    nonfinite = [name for name, gradient in gradients.items() if not is_finite(gradient)]
    norms = [gradient.double().norm() for gradient in gradients.values()]
    return ReplayResult(
        memory_rows=memory_rows,
        forward=detector.forward,
        loss=loss.item(),
        backward=detector.backward,
        grad_norm=torch.stack(norms).norm().item() if norms else None,
        nonfinite_parameters=nonfinite,
        max_gradient=max((entry for entry in sizes if entry[1] not in nonfinite), default=None),
    )


def format_rows(rows: list[int]) -> str:
    """Return "row 1" or "rows 1, 2"."""
    return f"row{'s' * (len(rows) > 1)} {', '.join(map(str, rows))}"
