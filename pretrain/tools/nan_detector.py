"""Where in a forward and a backward pass the first value that is not finite appears."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from xlpre.model.memory import Memory

# modules whose first dimension is the direction, not the row
BY_DIRECTION = ("pos_encoding", "pos_encoding.dropout", "terms.position.key")


@dataclass(frozen=True)
class Place:
    """Where what came in was finite and what came out was not.

    Attributes:
        what: in words.
        largest: absolute value of what came in (inputs, or in the backward pass gradients); None if no numbers came in.
        weight: the largest absolute value of the module's own weights; None if it has none, or they play no part.
        rows: of the batch, where what came out is not finite; None if it does not say.
    """

    what: str
    largest: float | None
    weight: float | None
    rows: list[int] | None


class NonFiniteDetector:
    """Watches a model of B rows while it is entered.

    Attributes:
        forward: the first module, in the order of execution, whose output was not finite while its inputs were.
        backward: the first module or parameter, in the order of the backward pass, whose gradient was not finite while the gradient
            that came in was.
    """

    def __init__(self, model: nn.Module, n_rows: int) -> None:
        self.forward: Place | None = None
        self._model, self._n_rows = model, n_rows
        self._handed: Place | None = None
        self._reached: Place | None = None  # a gradient that went wrong between modules
        self._until_exit = ExitStack()

    @property
    def backward(self) -> Place | None:
        """See the class."""
        return self._handed or self._reached

    def __enter__(self) -> NonFiniteDetector:
        self._until_exit.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Full backward hook is firing")  # an embedding hands no gradient to ids
        for name, module in self._model.named_modules():
            for handle in (
                module.register_forward_hook(partial(self._after_forward, name)),
                module.register_full_backward_pre_hook(partial(self._before_backward, name)),
                module.register_full_backward_hook(partial(self._after_backward, name)),
            ):
                self._until_exit.callback(handle.remove)
        for name, parameter in self._model.named_parameters():
            self._until_exit.callback(parameter.register_hook(partial(self._at_parameter, name)).remove)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._until_exit.close()

    def _after_forward(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        # a module is done after those inside it, so the innermost comes first
        if self.forward is None and not is_finite(output) and is_finite(inputs):
            what = f"the output of {name}" if name else "the loss, of outputs that are finite"
            weights = list(module.parameters(recurse=False))
            self.forward = Place(what, largest(inputs), largest(weights), self._rows(name, inputs, output))

    def _before_backward(self, name: str, module: nn.Module, came: Any) -> None:
        if self._reached is None and not is_finite(came):
            self._reached = Place(
                f"the gradient that comes to {name or 'the loss'}", None, None, self._rows(name, came, came)
            )

    def _after_backward(self, name: str, module: nn.Module, handed: Any, came: Any) -> None:
        if self._handed is None and not is_finite(handed) and is_finite(came):
            weights = list(module.parameters(recurse=False))
            what = f"the gradient that {name} hands back to its inputs"
            self._handed = Place(what, largest(came), largest(weights), self._rows(name, came, handed))

    def _at_parameter(self, name: str, gradient: Tensor) -> None:
        if self.backward is None and not is_finite(gradient):
            self._handed = Place(f"the gradient of {name}", None, None, None)

    def _rows(self, name: str, came: Any, went: Any) -> list[int] | None:
        """Rows where `went` is not finite; None unless one row in is one row out, as lists of single tokens are not."""
        if name.endswith(BY_DIRECTION) or not any(self._has_rows(tensor) for tensor in _tensors(came)):
            return None
        found: set[int] = set()
        for tensor in _tensors(went):
            if tensor.dim() < 2 or tensor.size(0) != self._n_rows:
                return None
            found.update((~tensor.isfinite()).flatten(1).any(1).nonzero().flatten().tolist())
        return sorted(found)

    def _has_rows(self, tensor: Tensor) -> bool:
        ids = tensor.dim() == 2 and not tensor.is_floating_point()
        return (tensor.dim() >= 3 or ids) and tensor.size(0) == self._n_rows


def is_finite(value: Any) -> bool:
    """Whether every number in it is; `value` is tensors, or collections and dataclasses of them."""
    return all(bool(tensor.isfinite().all()) for tensor in _tensors(value))


def largest(value: Any) -> float | None:
    """The largest absolute value among its floating-point numbers; None if there are none."""
    sizes = [tensor.abs().max().item() for tensor in _tensors(value) if tensor.is_floating_point() and tensor.numel()]
    return max(sizes, default=None)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _tensors(inner)
    elif isinstance(value, Memory):
        yield value.hidden.transpose(0, 1)  # rows first, as everywhere else
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))
