"""CUDA graphs of the forward and the backward pass of training.

A GPU computes a layer of a small model faster than Python launches its kernels, and then waits for Python most of the time. A CUDA graph is
a recorded sequence of kernels that is launched by one call. The passes are recorded at the first batch of each shape and replayed for the
others. Every kernel, its order and its random numbers are the same as without graphs.

A graph reads and writes the same memory at each replay, so inputs are copied into it, and outputs and gradients are copied out of it.
Everything else is outside of the graphs and works as without them: DeepSpeed's hooks on gradients, the reduction between processes, and the
update. But the reduction of gradients starts only after the whole backward pass is launched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from xlpre.batch import FIELD_SPECS, Batch
from xlpre.model.memory import Memory

T = TypeVar("T")
WARMUP_RUNS = 3  # before a recording: kernels are compiled, and libraries reserve memory
N_STATES = 2  # outputs without a gradient: hidden states and valid lengths of memory; the outputs after them are losses


def use_cuda_graphs(model: nn.Module, forward: Callable[..., tuple[Any, ...]] | None = None) -> None:
    """Replay CUDA graphs whenever `model` is called in training. Evaluation is not changed.

    A forward pass must be followed by its backward pass before the next forward pass. The weights must stay where they are in memory: an
    update may only change their values.

    Args:
        model: a LanguageModel on a GPU.
        forward: function to record instead of `model.forward`, for example a compiled one.
    """
    model.forward = GraphedForward(model, forward or model.forward)


class GraphedForward:
    """A forward function that records graphs in training, one pair for each shape of its inputs, and replays them.

    Args:
        model: the model.
        forward: its forward function, see LanguageModel.
    """

    def __init__(self, model: nn.Module, forward: Callable[..., tuple[Any, ...]]) -> None:
        self._model, self._forward = model, forward
        self._passes: dict[tuple[Any, ...], RecordedPasses] = {}

    def __call__(self, batch: Batch, memory: Memory) -> tuple[Any, ...]:
        """Compute losses and memory, see LanguageModel.forward."""
        if not (self._model.training and torch.is_grad_enabled()):
            return self._forward(batch, memory)
        inputs = [*(getattr(batch, name) for name in FIELD_SPECS), memory.hidden, memory.valid]
        key = (batch.reuse_len, *(x.shape for x in inputs))
        if key not in self._passes:
            aliases = ParameterAliases(self._model)
            function = self._function(batch.reuse_len, aliases)
            self._passes[key] = RecordedPasses(function, inputs, aliases.by_parameter)
        hidden, valid, loss, *auxiliary_losses = self._passes[key](inputs)
        return loss, Memory(hidden, valid), *auxiliary_losses

    def _function(self, reuse_len: int, aliases: ParameterAliases) -> Callable[..., list[Tensor]]:
        """Return a function from the tensors of batch and memory to those of memory and the losses, which depend on the aliases."""

        def run(*inputs: Tensor) -> list[Tensor]:
            *fields, hidden, valid = inputs
            tensors: dict[str, Any] = dict(zip(FIELD_SPECS, fields, strict=True))
            batch = Batch(**tensors, reuse_len=reuse_len)
            with aliases.in_place():
                loss, memory, *auxiliary_losses = self._forward(batch, Memory(hidden, valid))
            return [memory.hidden, memory.valid, loss, *auxiliary_losses]

        return run


class ParameterAliases:
    """New parameters with the same memory as those of a model.

    Autograd adds the gradient of a parameter on the stream on which the parameter was first used. DeepSpeed's bf16 optimizer uses all
    parameters on the default stream and keeps their autograd nodes, but the default stream must not wait for a recording. Aliases are
    first used on the stream of the recording.

    Args:
        model: the model.

    Attributes:
        by_parameter: alias of each parameter that requires a gradient.
    """

    def __init__(self, model: nn.Module) -> None:
        self.by_parameter = {p: nn.Parameter(p.detach()) for p in model.parameters() if p.requires_grad}
        self._owners = [
            (module, name, p)
            for module in model.modules()
            for name, p in module.named_parameters(recurse=False, remove_duplicate=False)
            if p in self.by_parameter
        ]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace the parameters of the model by their aliases within the context."""
        for module, name, parameter in self._owners:
            setattr(module, name, self.by_parameter[parameter])
        try:
            yield
        finally:
            for module, name, parameter in self._owners:
                setattr(module, name, parameter)


class RecordedPasses:
    """Graphs of a forward pass and its backward pass for inputs of one shape.

    Args:
        function: function from tensors to N_STATES tensors without a gradient, then scalar losses.
        inputs: example of its inputs.
        parameters: parameters whose gradients the backward pass computes, with the alias of each on which the losses depend. All have
            the same dtype.
    """

    n_replays = 0  # replays of forward passes in this process; all graphs share their memory

    def __init__(
        self,
        function: Callable[..., list[Tensor]],
        inputs: Sequence[Tensor],
        parameters: Mapping[nn.Parameter, nn.Parameter],
    ) -> None:
        self._inputs = [x.clone() for x in inputs]
        device = inputs[0].device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):  # recording draws random numbers
            gradients = warm_up(
                lambda: torch.autograd.grad(
                    function(*self._inputs)[N_STATES:], [*parameters.values()], allow_unused=True
                )
            )
            # the losses do not depend on the others, for example on the vector of the query stream in a model without it
            self._parameters = [p for p, gradient in zip(parameters, gradients, strict=True) if gradient is not None]
            self._aliases = [parameters[p] for p in self._parameters]
            del gradients
            self._forward = Graph(lambda: function(*self._inputs))
            self._d_losses = [torch.ones_like(loss) for loss in self._forward.outputs[N_STATES:]]
            self._backward = Graph(self._flat_gradients)

    def __call__(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the outputs of the function. The backward pass of the losses gives the gradients of the parameters."""
        for recorded, x in zip(self._inputs, inputs, strict=True):
            recorded.copy_(x, non_blocking=True)
        return _Replay.apply(self, *self._parameters)

    def replay_forward(self) -> tuple[Tensor, ...]:
        """Replay the forward pass, and return copies of its outputs."""
        if any(p.data_ptr() != alias.data_ptr() for p, alias in zip(self._parameters, self._aliases, strict=True)):
            raise RuntimeError("a parameter has moved to other memory since the passes were recorded")
        RecordedPasses.n_replays += 1
        self._forward.replay()
        return tuple(x.detach().clone() for x in self._forward.outputs)

    def replay_backward(self, d_losses: Sequence[Tensor | None]) -> list[Tensor]:
        """Replay the backward pass, and return copies of the gradients."""
        for recorded, x in zip(self._d_losses, d_losses, strict=True):
            recorded.zero_() if x is None else recorded.copy_(x)
        self._backward.replay()
        parts = self._backward.outputs[0].clone().split([p.numel() for p in self._parameters])
        return [part.view(p.shape) for part, p in zip(parts, self._parameters, strict=True)]

    def _flat_gradients(self) -> list[Tensor]:
        """Return the gradients as one tensor, because one copy is faster than many."""
        gradients = torch.autograd.grad(self._forward.outputs[N_STATES:], self._aliases, self._d_losses)
        return [torch.cat([gradient.flatten() for gradient in gradients])]


class _Replay(torch.autograd.Function):
    """The recorded passes as a function of the parameters."""

    @staticmethod
    def forward(ctx: Any, passes: RecordedPasses, *parameters: Tensor) -> tuple[Tensor, ...]:
        outputs = passes.replay_forward()
        ctx.passes, ctx.number = passes, RecordedPasses.n_replays
        ctx.set_materialize_grads(False)  # otherwise autograd would fill a gradient of memory with zeros
        ctx.mark_non_differentiable(*outputs[:N_STATES])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.number != RecordedPasses.n_replays:
            raise RuntimeError("another forward pass was replayed before the backward pass of this loss")
        return None, *ctx.passes.replay_backward(d_outputs[N_STATES:])


class Graph:
    """A CUDA graph of the kernels that a function launches.

    Args:
        function: function without arguments. It is called once.

    Attributes:
        outputs: result of the function, which each replay overwrites.
    """

    _pool: Any = None  # memory that all graphs of this process share, because they are not replayed at the same time

    def __init__(self, function: Callable[[], list[Tensor]]) -> None:
        Graph._pool = Graph._pool or torch.cuda.graph_pool_handle()
        self._graph = torch.cuda.CUDAGraph()
        # other threads may allocate pinned memory meanwhile
        options = {"pool": Graph._pool, "stream": recording_stream(), "capture_error_mode": "thread_local"}
        with torch.cuda.graph(self._graph, **options):
            self.outputs = function()

    def replay(self) -> None:
        """Launch the kernels again."""
        self._graph.replay()


@lru_cache
def recording_stream() -> torch.cuda.Stream:
    """Return the stream of all warm-ups and recordings. Autograd nodes that survive a warm-up then fit the recording."""
    return torch.cuda.Stream()


def warm_up(function: Callable[[], T]) -> T:
    """Call a function before it is recorded, on the stream of recordings. Return its last result."""
    stream, current = recording_stream(), torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        for _ in range(WARMUP_RUNS):
            result = function()
    current.wait_stream(stream)
    return result
