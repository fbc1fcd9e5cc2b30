"""Muon: orthogonalized updates for the matrices of layers, AdamW for all other parameters.

The momentum of a matrix is replaced by the nearest matrix whose singular values are equal. Directions with small gradients are then
learned as fast as those with large ones.

Source: K. Jordan, 2024, "Muon: an optimizer for hidden layers in neural networks" (momentum, iteration); Liu et al., 2025,
arXiv:2502.16982 (scale of an update).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from xlpre.training.distributed import rank, world_size

QUINTIC = (3.4445, -4.7750, 2.0315)  # a, b, c of ax + bx^3 + cx^5; five iterations map 0.01..1 to 0.7..1.2
ITERATIONS = 5
UPDATE_RMS = 0.2  # root mean square of an update at a learning rate of 1: about that of AdamW


def orthogonalize(matrices: Tensor) -> Tensor:
    """Return the nearest matrices whose singular values are all about 1, by the Newton-Schulz iteration. Zeros stay zeros.

    Args:
        matrices: (N, rows, columns). On a GPU the products are computed in bf16.
    """
    a, b, c = QUINTIC
    x = matrices.mT if matrices.size(1) > matrices.size(2) else matrices
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    x = x.to(torch.bfloat16 if x.is_cuda else x.dtype)
    for _ in range(ITERATIONS):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return (x.mT if matrices.size(1) > matrices.size(2) else x).to(matrices.dtype)


def working_bytes(shapes: Sequence[tuple[int, ...]], n_processes: int, is_flat: bool, on_gpu: bool) -> int:
    """Return the peak memory of an update on rank 0, without parameters, gradients and moments.

    Args:
        shapes: shapes of all matrices.
        n_processes: number of processes that share the work.
        is_flat: True under ZeRO, where a process has a flat share of the matrices; False if it has all of them.
        on_gpu: True if products are computed in bf16.
    """
    n, width = sum(math.prod(shape) for shape in shapes), 2 if on_gpu else 4
    own = -(-n // n_processes) if is_flat else n
    peak = 0
    for (rows, columns), n_same_shape in Counter(shapes).items():
        n_local = -(-n_same_shape // n_processes)
        stacked, square = n_local * rows * columns, n_local * min(rows, columns) ** 2
        rounding, iterating = (4 + 4 + 2 * on_gpu) * stacked, 4 * stacked + 2 * width * (stacked + square)
        peak = max(peak, rounding, iterating)
    gathered = own * n_processes * (is_flat and n_processes > 1)
    return max(8 * own, 4 * (own + gathered) + peak)


class Muon(torch.optim.AdamW):
    """AdamW, with orthogonalized updates for groups that have `matrices`: a mapping from names to shapes.

    The parameters of such a group are the matrices, or under ZeRO a flat share of their concatenation, of equal size on all processes.
    Their momentum is stored as `exp_avg`, as in AdamW; they have no second moment. The processes share the work.

    Args:
        groups: parameter groups.
        momentum: Nesterov momentum of the matrices.
        settings: settings of AdamW.
    """

    def __init__(self, groups: Any, momentum: float, **settings: Any) -> None:
        super().__init__(groups, **settings)
        self._momentum = momentum

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
        is_shared = tensors[0].ndim == 1 and world_size() > 1
        full = _all_gather(own) if is_shared else own
        shapes = list(group["matrices"].values())
        sizes = [math.prod(shape) for shape in shapes]
        matrices = full[: sum(sizes)].split(sizes)  # ZeRO pads the last share
        _replace_by_updates([matrix.view(shape) for matrix, shape in zip(matrices, shapes, strict=True)])
        if world_size() > 1:
            dist.all_reduce(full)
        updates = full.view(-1, own.numel())[rank() if is_shared else 0].split([tensor.numel() for tensor in tensors])
        for tensor, update in zip(tensors, updates, strict=True):
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


def _all_gather(share: Tensor) -> Tensor:
    """Return the concatenation of the shares of all processes."""
    full = share.new_empty(world_size() * share.numel())
    dist.all_gather_into_tensor(full, share)
    return full


def _replace_by_updates(matrices: Sequence[Tensor]) -> None:
    """Replace the matrices that this process handles by their updates, and the others by zeros, in place."""
    for shape in {matrix.shape for matrix in matrices}:
        _replace_same_shape([matrix for matrix in matrices if matrix.shape == shape])


def _replace_same_shape(matrices: list[Tensor]) -> None:
    """Do the same for matrices of one shape. Its intermediate tensors are freed before the next shape."""
    local = matrices[rank() :: world_size()]
    stacked = torch.stack(local) if local else matrices[0].new_empty(0, *matrices[0].shape)
    torch._foreach_zero_(matrices)
    for matrix, update in zip(local, orthogonalize(stacked), strict=True):
        matrix.copy_(update).mul_(UPDATE_RMS * math.sqrt(max(matrix.shape)))
