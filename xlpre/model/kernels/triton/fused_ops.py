"""What stands between the products of a layer, each in one pass over its elements on GPUs, forward and backward.

norm(rows + dropout(branch)), with s the sum, m the mean of a row of s, r one over its deviation, k what dropout multiplies an element by:

    x = (s - m) r            out = weight x + bias
    g = weight d_out         d_rows = r (g - mean(g) - x mean(g x))      d_branch = k d_rows
                             d_weight = sum of d_out x over all rows     d_bias = sum of d_out over all rows

Forward reads two numbers of an element and writes two, s and out; backward reads s and d_out and writes both gradients. A program sums
over its rows, and what programs found is summed after them: nobody adds into another's result, so gradients are the same bits each time.

dropout(gelu(x)) reads a number of an element and writes one; backward reads x and the gradient, and writes one. What dropout drew is kept
by neither, but drawn again from the same seed.

Each is an operator of torch, as attention is (kernels/triton.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from xlpre.model.kernels.triton import fused_ops_kernels
from xlpre.model.kernels.triton.launch import SHARES, dropout_level, new_seed

LANES = 8  # elements that one call for random numbers decides about
PROGRAMS = 512  # of add_norm's backward pass at the most: four for each multiprocessor of a large GPU
BLOCK = 1024  # elements of a lane of gelu's


def add_norm(rows: Tensor, branch: Tensor, weight: Tensor, bias: Tensor, eps: float, dropout: float) -> Tensor:
    """norm(rows + dropout(branch)).

    Args:
        rows: (..., D), in bf16, fp16 or fp32, as all that follow.
        branch: like them.
        weight: of the norm, (D,).
        bias: of it, (D,).
        eps: of it, added to a row's variance.
        dropout: share of `branch` that is set to 0; the rest grows by as much.

    Returns:
        Like `rows`.
    """
    return _add_norm(rows, branch, weight, bias, new_seed(rows.device) if dropout else None, eps, dropout)[0]


def gelu_dropout(x: Tensor, dropout: float) -> Tensor:
    """dropout(gelu(x)) of any shape, in bf16, fp16 or fp32; GELU's tanh approximation, as in feedforward.py."""
    return _gelu(x, new_seed(x.device), dropout)


ADD_NORM = "(Tensor rows, Tensor branch, Tensor weight, Tensor bias, Tensor? seed, float eps, float dropout)"
ADD_NORM_BACKWARD = (
    "(Tensor d_out, Tensor summed, Tensor mean, Tensor rstd, Tensor weight, Tensor? seed, float dropout) -> Tensor[]"
)


@torch.library.custom_op("xlpre::add_norm", mutates_args=(), schema=f"{ADD_NORM} -> (Tensor, Tensor, Tensor, Tensor)")
def _add_norm(
    rows: Tensor, branch: Tensor, weight: Tensor, bias: Tensor, seed: Tensor | None, eps: float, dropout: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The norm and the sum, like `rows`; the mean, and one over the deviation, of each of N rows, float32."""
    rows, branch, weight, bias = (x.contiguous() for x in (rows, branch, weight, bias))
    D = rows.size(-1)
    out, summed, mean, rstd = _found(rows)
    N = len(mean)
    given = (rows, branch, weight, bias, seed, summed, out, mean, rstd, N, eps, *_settings(dropout))
    fused_ops_kernels.add_norm[_groups(N),](*given, **cut(D, seed is not None))
    return out, summed, mean, rstd


@torch.library.custom_op("xlpre::add_norm_backward", mutates_args=(), schema=ADD_NORM_BACKWARD)
def _add_norm_backward(
    d_out: Tensor, summed: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, seed: Tensor | None, dropout: float
) -> list[Tensor]:
    """Gradients of rows, weight and bias; and with dropout that of the branch, which is that of rows without."""
    D, N = summed.size(-1), len(mean)
    programs = min(_groups(N), PROGRAMS)
    d_rows, d_branch = torch.empty_like(summed), None if seed is None else torch.empty_like(summed)
    sums = [summed.new_empty(programs, D, dtype=torch.float32) for _ in range(2)]
    given = (d_out.contiguous(), summed, mean, rstd, weight.contiguous(), seed, d_rows, d_branch, *sums)
    kernel = fused_ops_kernels.differentiate_add_norm[programs,]
    kernel(*given, N, _groups(N), *_settings(dropout), **cut(D, seed is not None))
    found = [d_rows, *(x.sum(0).to(weight.dtype) for x in sums)]
    return found if d_branch is None else [*found, d_branch]


@torch.library.custom_op(
    "xlpre::gelu_dropout", mutates_args=(), schema="(Tensor x, Tensor seed, float dropout) -> Tensor"
)
def _gelu(x: Tensor, seed: Tensor, dropout: float) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    fused_ops_kernels.gelu[_blocks(x),](x, seed, out, x.numel(), *_settings(dropout), BLOCK=BLOCK, LANES=LANES)
    return out


@torch.library.custom_op(
    "xlpre::gelu_dropout_backward",
    mutates_args=(),
    schema="(Tensor d_out, Tensor x, Tensor seed, float dropout) -> Tensor",
)
def _gelu_backward(d_out: Tensor, x: Tensor, seed: Tensor, dropout: float) -> Tensor:
    x = x.contiguous()
    d_x, given = torch.empty_like(x), (d_out.contiguous(), x, seed)
    fused_ops_kernels.differentiate_gelu[_blocks(x),](
        *given, d_x, x.numel(), *_settings(dropout), BLOCK=BLOCK, LANES=LANES
    )
    return d_x


@_add_norm.register_fake
def _found(rows: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n_rows = rows.numel() // rows.size(-1)
    mean, rstd = (rows.new_empty(n_rows, dtype=torch.float32) for _ in range(2))
    return rows.new_empty(rows.shape), rows.new_empty(rows.shape), mean, rstd


@_add_norm_backward.register_fake
def _gradients(
    d_out: Tensor, summed: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, seed: Any, *_: Any
) -> list[Tensor]:
    of_weight = [weight.new_empty(weight.shape) for _ in range(2)]
    return [summed.new_empty(summed.shape), *of_weight, *([] if seed is None else [summed.new_empty(summed.shape)])]


@_gelu.register_fake
def _like(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


_gelu_backward.register_fake(_like)


def _keep_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, weight, _, seed, _, ctx.dropout = inputs
    ctx.set_materialize_grads(False)  # else each output without a gradient would get one of zeros
    ctx.save_for_backward(*output[1:], weight, seed)


def _differentiate_norm(ctx: Any, d_out: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if d_out is None:  # what took the output has no gradient
        return (None,) * 7
    d_rows, d_weight, d_bias, *d_branch = _add_norm_backward(d_out, *ctx.saved_tensors, ctx.dropout)
    return d_rows, (d_branch or [d_rows])[0], d_weight, d_bias, None, None, None


def _keep_gelu(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, seed, ctx.dropout = inputs
    ctx.save_for_backward(x, seed)


def _differentiate_gelu(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    return _gelu_backward(d_out, *ctx.saved_tensors, ctx.dropout), None, None


_add_norm.register_autograd(_differentiate_norm, setup_context=_keep_norm)
_gelu.register_autograd(_differentiate_gelu, setup_context=_keep_gelu)


def _settings(dropout: float) -> tuple[int, float]:
    """How many of SHARES are dropped, and by how much the others grow."""
    dropped = dropout_level(dropout)
    return dropped, SHARES / (SHARES - dropped)


def cut(width: int, drops: bool) -> dict[str, Any]:
    """How a program of add_norm is cut: 8 or 16 elements of a row for a thread, for which registers suffice up to rows of 4,096."""
    padded = 1 << (width - 1).bit_length()
    warps = max(1, min(padded // 256, 4), min(padded // 512, 32))  # more than 32 no program can have
    constants = {"DROPOUT": drops, "AHEAD": padded <= 1024, "D": width, "WIDTH": padded, "LANES": LANES}
    return {**constants, "num_warps": warps}


def _groups(n_rows: int) -> int:
    return -(-n_rows // LANES)


def _blocks(x: Tensor) -> int:
    return -(-x.numel() // (BLOCK * LANES))
