"""Muon: the matrices of the layers move by orthogonal steps, everything else by AdamW.

A matrix's momentum gives way to the nearest matrix whose singular values are all alike, so that directions with small gradients are
learned as fast as those with large ones. Source: K. Jordan, 2024, "Muon: an optimizer for hidden layers in neural networks" (momentum,
iteration); Liu et al., 2025, arXiv:2502.16982 (how long a step is).
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

QUINTIC = (3.4445, -4.7750, 2.0315)  # x to ax + bx^3 + cx^5: five times over, 0.01 to 1 becomes 0.7 to 1.2
ROUNDS = 5
STEP = 0.2  # root mean square of the elements of a step at a learning rate of 1: about that of AdamW


def orthogonalized(matrices: Tensor) -> Tensor:
    """The nearest matrices whose singular values are all about 1, by Newton and Schulz's iteration; zeros stay zeros.

    Args:
        matrices: (N, rows, columns), whose products are in bf16 on a GPU.
    """
    a, b, c = QUINTIC
    x = matrices.mT if matrices.size(1) > matrices.size(2) else matrices
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    x = x.to(torch.bfloat16 if x.is_cuda else x.dtype)
    for _ in range(ROUNDS):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return (x.mT if matrices.size(1) > matrices.size(2) else x).to(matrices.dtype)


def working_bytes(shapes: Sequence[tuple[int, ...]], processes: int, flat: bool, gpu: bool) -> int:
    """What an update takes besides parameters, gradients and moments at its fullest moment, on the first process.

    Args:
        shapes: of all matrices.
        processes: that share the work.
        flat: whether each has a flat share of the matrices, as under ZeRO, or all of them.
        gpu: where products are in bf16.
    """
    n, width = sum(math.prod(shape) for shape in shapes), 2 if gpu else 4
    own = -(-n // processes) if flat else n
    made = 0
    for (rows, columns), n_alike in Counter(shapes).items():
        mine = -(-n_alike // processes)
        stacked, square = mine * rows * columns, mine * min(rows, columns) ** 2
        rounding, iterating = (4 + 4 + 2 * gpu) * stacked, 4 * stacked + 2 * width * (stacked + square)
        made = max(made, rounding, iterating)
    gathered = own * processes * (flat and processes > 1)
    return max(8 * own, 4 * (own + gathered) + made)


class Muon(torch.optim.AdamW):
    """AdamW, but for groups with `matrices`, names and shapes of those that take orthogonal steps.

    The parameters of such a group are the matrices, or, under ZeRO, a flat share of all of them one after another, as long on every
    process. Their momentum is `exp_avg`, element by element, as AdamW's; they have no second moment. Processes share the work.

    Args:
        groups: of parameters.
        momentum: of the matrices (Nesterov's).
        settings: AdamW's.
    """

    def __init__(self, groups: Any, momentum: float, **settings: Any) -> None:
        super().__init__(groups, **settings)
        self._momentum = momentum

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update; every process must call it."""
        groups = self.param_groups
        for group in groups:
            if "matrices" in group:
                self._step_matrices(group)
        self.param_groups = [group for group in groups if "matrices" not in group]
        super().step()
        self.param_groups = groups

    def _step_matrices(self, group: dict[str, Any]) -> None:
        tensors: list[Tensor] = group["params"]
        own = torch.cat([self._ahead(tensor).flatten() for tensor in tensors])
        shared = tensors[0].ndim == 1 and world_size() > 1
        whole = _gathered(own) if shared else own
        shapes = list(group["matrices"].values())
        sizes = [math.prod(shape) for shape in shapes]
        matrices = whole[: sum(sizes)].split(sizes)  # ZeRO pads the last share
        _make_steps([matrix.view(shape) for matrix, shape in zip(matrices, shapes, strict=True)])
        if world_size() > 1:
            dist.all_reduce(whole)
        steps = whole.view(-1, own.numel())[rank() if shared else 0].split([tensor.numel() for tensor in tensors])
        for tensor, step in zip(tensors, steps, strict=True):
            tensor.mul_(1 - group["lr"] * group["weight_decay"])
            tensor.add_(step.view_as(tensor), alpha=-group["lr"])

    def _ahead(self, tensor: Tensor) -> Tensor:
        """The gradient and the momentum that it was added to."""
        state = self.state[tensor]
        if not state:
            state.update(step=torch.tensor(0.0), exp_avg=torch.zeros_like(tensor))
        gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        state["step"] += 1
        state["exp_avg"].lerp_(gradient, 1 - self._momentum)
        return gradient.lerp(state["exp_avg"], self._momentum)


def _gathered(share: Tensor) -> Tensor:
    """The shares of all processes, one after another."""
    whole = share.new_empty(world_size() * share.numel())
    dist.all_gather_into_tensor(whole, share)
    return whole


def _make_steps(matrices: Sequence[Tensor]) -> None:
    """Turn those that fall to this process into steps, and the others into zeros."""
    for shape in {matrix.shape for matrix in matrices}:
        _make_alike([matrix for matrix in matrices if matrix.shape == shape])


def _make_alike(matrices: list[Tensor]) -> None:
    """The same for matrices of one shape, of which nothing is left in memory for the next."""
    mine = matrices[rank() :: world_size()]
    made = torch.stack(mine) if mine else matrices[0].new_empty(0, *matrices[0].shape)
    torch._foreach_zero_(matrices)
    for matrix, step in zip(mine, orthogonalized(made), strict=True):
        matrix.copy_(step).mul_(STEP * math.sqrt(max(matrix.shape)))
