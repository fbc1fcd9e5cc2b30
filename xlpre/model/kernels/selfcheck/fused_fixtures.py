"""What stands between the products of a layer, on random data: to compare kernels/between.py with torch's operators by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from xlpre.model.kernels.selfcheck.fixtures import Case, clone_leaves, higher_precision

EPS = 1e-12  # the published one


@dataclass(frozen=True)
class FusedCase(Case):
    """One of WORKS.

    Attributes:
        work: of the tensors, in their order, and a share of dropout.
    """

    work: Callable[..., Tensor]

    def output(self, dropout: float = 0.0) -> Tensor:
        """(N, width)."""
        return self.work(*self.tensors.values(), dropout)


def norm_of_sum(rows: Tensor, branch: Tensor, weight: Tensor, bias: Tensor, dropout: float) -> Tensor:
    """Operator by operator."""
    return F.layer_norm(rows + F.dropout(branch, dropout), weight.shape, weight, bias, EPS)


def gelu(inner: Tensor, dropout: float) -> Tensor:
    """Operator by operator."""
    return F.dropout(F.gelu(inner, approximate="tanh"), dropout)


WORKS: dict[str, Callable[..., Tensor]] = {"norm": norm_of_sum, "gelu": gelu}


def exact_of(work: str, tensors: dict[str, Tensor]) -> FusedCase:
    """One of WORKS by torch, in twice the precision of `tensors`."""
    (dtype,) = {x.dtype for x in tensors.values()}
    return FusedCase(clone_leaves(tensors, higher_precision(dtype)), WORKS[work])


def kernel_of(work: str) -> Callable[..., Tensor]:
    """What computes one of WORKS in one pass."""
    from xlpre.model.kernels.triton.fused_ops import add_norm, gelu_dropout

    def norm(rows: Tensor, branch: Tensor, weight: Tensor, bias: Tensor, dropout: float) -> Tensor:
        return add_norm(rows, branch, weight, bias, EPS, dropout)

    kernels: dict[str, Callable[..., Tensor]] = {"norm": norm, "gelu": gelu_dropout}
    return kernels[work]


def tensors_between(
    work: str, n_rows: int, width: int, dtype: torch.dtype, device: str | torch.device
) -> dict[str, Tensor]:
    """What one of WORKS is made of: rows of `width`, or, for GELU, of four times that."""
    of_rows, of_norm = (n_rows, width), (width,)
    of_works: dict[str, dict[str, tuple[int, ...]]] = {
        "norm": {"rows": of_rows, "branch": of_rows, "weight": of_norm, "bias": of_norm},
        "gelu": {"inner": (n_rows, 4 * width)},
    }
    shapes = of_works[work].items()
    return {name: torch.randn(shape, device=device).to(dtype).requires_grad_() for name, shape in shapes}
