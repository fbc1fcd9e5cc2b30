"""Muon: orthogonalized updates for the matrices of layers, AdamW for all other parameters.

Muon sets all singular values of the momentum of a matrix to about 1, and uses the result as the update. Directions with small gradients
are then learned as fast as directions with large gradients.

The functions here see the matrices as one flat concatenation. The share of a process is its ZeRO partition: a contiguous part of the
concatenation, of the same size on every process.

Source: K. Jordan, 2024, "Muon: an optimizer for hidden layers in neural networks" (momentum, iteration); Liu et al., 2025,
arXiv:2502.16982 (scale of an update).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from xlpre.training.distributed import rank, world_size

QUINTIC = (3.4445, -4.7750, 2.0315)  # a, b, c of ax + bx^3 + cx^5; five iterations map 0.01..1 into 0.7..1.2
ITERATIONS = 5
UPDATE_RMS = 0.2  # root mean square of an update at a learning rate of 1, about as in AdamW


def orthogonalize(matrices: Tensor, in_bf16: bool = False) -> Tensor:
    """Replace the singular values of each matrix by values of about 1, with the Newton-Schulz iteration. A zero matrix stays zero.

    Args:
        matrices: (N, rows, columns).
        in_bf16: compute the products in bf16.
    """
    a, b, c = QUINTIC
    x = matrices.mT if matrices.size(1) > matrices.size(2) else matrices
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    x = x.bfloat16() if in_bf16 else x
    for _ in range(ITERATIONS):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return (x.mT if matrices.size(1) > matrices.size(2) else x).to(matrices.dtype)


def range_limits(sizes: Sequence[int], share: int, n_processes: int) -> list[int]:
    """Assign each matrix to the process whose share contains the middle of the matrix.

    Args:
        sizes: numbers of elements of the matrices, in the order of their concatenation.
        share: number of elements in the share of a process.
        n_processes: number of processes, N.

    Returns:
        N + 1 offsets `limits` into the concatenation; process p updates the matrices in [limits[p], limits[p + 1]).
    """
    middles = [end - (size + 1) // 2 for size, end in zip(sizes, accumulate(sizes), strict=True)]
    return [
        sum(size for size, middle in zip(sizes, middles, strict=True) if middle < number * share)
        for number in range(n_processes + 1)
    ]


def working_bytes(shapes: Sequence[tuple[int, ...]], n_processes: int, is_flat: bool, in_bf16: bool) -> int:
    """Return the peak memory in bytes that an update needs besides parameters, gradients and moments, on the process that needs most.

    Args:
        shapes: shapes of all matrices.
        n_processes: number of processes that divide the work.
        is_flat: True under ZeRO, where each process holds its share only; False if each process holds all matrices.
        in_bf16: True if the products are computed in bf16.
    """
    sizes, width = [math.prod(shape) for shape in shapes], 2 if in_bf16 else 4
    share = -(-sum(sizes) // n_processes)
    own = share if is_flat else sum(sizes)
    most = 8 * own
    for first, last in pairwise(range_limits(sizes, share, n_processes)):
        peak = 0
        for (rows, columns), n_same_shape in Counter(_shapes_between(first, last, shapes)).items():
            stacked, square = n_same_shape * rows * columns, n_same_shape * min(rows, columns) ** 2
            rounding, iterating = (4 + 4 + 2 * in_bf16) * stacked, 4 * stacked + 2 * width * (stacked + square)
            peak = max(peak, rounding, iterating)
        received = (last - first) * (is_flat and n_processes > 1)
        most = max(most, 4 * (own + received) + peak)
    return most


def sent_bytes(shapes: Sequence[tuple[int, ...]], n_processes: int, is_flat: bool) -> float:
    """Return the number of bytes that a process sends in an update: the maximum over all processes.

    Under ZeRO, only matrices that are split between shares are sent. Each part goes to the process that computes the update, and the
    updated part comes back. Without ZeRO, all updates are broadcast in a ring, where each process passes on (N-1)/N of them.

    Args:
        shapes: shapes of all matrices.
        n_processes: number of processes, N.
        is_flat: True under ZeRO, where each process holds its share only; False if each process holds all matrices.
    """
    sizes = [math.prod(shape) for shape in shapes]
    total = sum(sizes)
    if not is_flat:
        return 4 * total * (n_processes - 1) / n_processes
    share = -(-total // n_processes)
    limits = range_limits(sizes, share, n_processes)
    most = 0
    for number in range(n_processes):
        held = min((number + 1) * share, total) - min(number * share, total)
        computed = limits[number + 1] - limits[number]
        most = max(most, held + computed - 2 * _overlap(share, limits, number, number))
    return 4 * most


class Muon(torch.optim.AdamW):
    """AdamW, with orthogonalized updates for parameter groups that have the key `matrices`, a mapping from names to shapes.

    The parameters of such a group are the matrices; under ZeRO, they are this process's share of the concatenated matrices. Their momentum
    is stored as `exp_avg`, as in AdamW; they have no second moment. The processes divide the work. Under ZeRO, they exchange only the
    matrices that are split between shares.

    Args:
        groups: parameter groups.
        momentum: Nesterov momentum of the matrices.
        bf16_on_cpu: compute the products of the iteration in bf16 on a CPU, too. On a GPU they are always in bf16.
        settings: settings of AdamW, for the other parameters.
    """

    def __init__(self, groups: Any, momentum: float, bf16_on_cpu: bool = False, **settings: Any) -> None:
        super().__init__(groups, **settings)
        self._momentum = momentum
        self.bf16_on_cpu = bf16_on_cpu

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Make an update. Every process must call it."""
        groups = self.param_groups
        for group in groups:
            if "matrices" in group:
                self._update_matrices(group)
        self.param_groups = [group for group in groups if "matrices" not in group]
        super().step()
        self.param_groups = groups

    def _update_matrices(self, group: dict[str, Any]) -> None:
        tensors: list[Tensor] = group["params"]
        own = torch.cat([self._nesterov_gradient(tensor).flatten() for tensor in tensors])
        in_bf16 = own.is_cuda or self.bf16_on_cpu
        _replace_by_updates(own, list(group["matrices"].values()), tensors[0].ndim == 1, in_bf16)
        for tensor, update in zip(tensors, own.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.mul_(1 - group["lr"] * group["weight_decay"])
            tensor.add_(update.view_as(tensor), alpha=-group["lr"])

    def _nesterov_gradient(self, tensor: Tensor) -> Tensor:
        """Update the momentum of a tensor, and return its gradient combined with the momentum."""
        state = self.state[tensor]
        if not state:
            state.update(step=torch.tensor(0.0), exp_avg=torch.zeros_like(tensor))
        gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        state["step"] += 1
        state["exp_avg"].lerp_(gradient, 1 - self._momentum)
        return gradient.lerp(state["exp_avg"], self._momentum)


def _replace_by_updates(own: Tensor, shapes: Sequence[tuple[int, ...]], is_flat: bool, in_bf16: bool) -> None:
    """Replace the gradients of the matrices by their updates, in place.

    Args:
        own: concatenated gradients of all matrices, or this process's share of them; ZeRO pads the share of the last process.
        shapes: shapes of all matrices.
        is_flat: True if `own` is a share.
        in_bf16: see `orthogonalize`.
    """
    sizes, n_processes = [math.prod(shape) for shape in shapes], world_size()
    share = own.numel() if is_flat else -(-sum(sizes) // n_processes)
    limits = range_limits(sizes, share, n_processes)
    first, last = limits[rank()], limits[rank() + 1]
    is_exchanged = is_flat and n_processes > 1
    if is_exchanged:
        sent = [_overlap(share, limits, rank(), other) for other in range(n_processes)]
        received = [_overlap(share, limits, other, rank()) for other in range(n_processes)]
        own = own[: sum(sent)]  # without the padding
        computed = own.new_empty(last - first)
        dist.all_to_all_single(computed, own, received, sent)
    else:
        computed = own[first:last]
    computed_shapes = _shapes_between(first, last, shapes)
    parts = computed.split([math.prod(shape) for shape in computed_shapes])
    matrices = [part.view(shape) for part, shape in zip(parts, computed_shapes, strict=True)]
    for shape in {matrix.shape for matrix in matrices}:
        _replace_same_shape([matrix for matrix in matrices if matrix.shape == shape], in_bf16)
    if is_exchanged:
        dist.all_to_all_single(own, computed, sent, received)
    elif n_processes > 1:
        for number, (start, end) in enumerate(pairwise(limits)):
            if start < end:
                dist.broadcast(own[start:end], src=number)


def _replace_same_shape(matrices: list[Tensor], in_bf16: bool) -> None:
    """Replace matrices of one shape by their updates. The intermediate tensors are freed before the next shape."""
    for matrix, update in zip(matrices, orthogonalize(torch.stack(matrices), in_bf16), strict=True):
        matrix.copy_(update).mul_(UPDATE_RMS * math.sqrt(max(matrix.shape)))


def _shapes_between(first: int, last: int, shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the shapes of the matrices between the offsets `first` and `last` of the concatenation."""
    ends = accumulate(math.prod(shape) for shape in shapes)
    return [shape for shape, end in zip(shapes, ends, strict=True) if first < end <= last]


def _overlap(share: int, limits: Sequence[int], holder: int, computer: int) -> int:
    """Return the number of elements in the share of process `holder` whose update process `computer` computes."""
    return max(0, min((holder + 1) * share, limits[computer + 1]) - max(holder * share, limits[computer]))
