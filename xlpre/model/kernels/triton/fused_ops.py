"""Fused add-norm and GELU-dropout on GPUs, forward and backward, each in one pass over its elements.

norm(x + dropout(branch)): let s be the sum, m the mean and 1 / r the standard deviation of a row of s, and k the scaled dropout mask. Then:

    n = (s - m) r            out = weight n + bias
    g = weight d_out         d_x = r (g - mean(g) - n mean(g n))        d_branch = k d_x
                             d_weight = sum of d_out n over all rows    d_bias = sum of d_out over all rows

For each element, the forward pass reads x and branch and writes s and out. The backward pass reads s and d_out and writes both gradients.
Each program sums over its own rows, and the sums of all programs are added afterwards, so that gradients are reproducible.

dropout(gelu(x)): for each element, the forward pass reads x and writes out. The backward pass reads x and d_out and writes d_x. Neither
operation saves its dropout mask; the backward pass generates it again from the seed.

Each operation is an operator of torch, as attention is (kernels/triton/attention.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from xlpre.model.kernels.triton import fused_ops_kernels as kernels
from xlpre.model.kernels.triton.launch import DROPOUT_LEVELS, dropout_level, launch, new_seed_tensor

PHILOX_OUTPUTS = 8  # elements for which one call of the random number generator suffices
MAX_PROGRAMS = 512  # of the backward pass of add_norm: four for each multiprocessor of a large GPU
BLOCK = 1024  # elements of a block of gelu_dropout


def add_norm(x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor, eps: float, dropout: float) -> Tensor:
    """Compute norm(x + dropout(branch)).

    Args:
        x: (..., D), in bf16, fp16 or fp32. The other tensors have the same dtype.
        branch: (..., D).
        weight: (D,), of the norm.
        bias: (D,), of the norm.
        eps: epsilon, added to the variance of a row.
        dropout: probability of zeroing an element of `branch`. The others are scaled by 1 / (1 - dropout).

    Returns:
        A tensor like `x`.
    """
    return _add_norm(x, branch, weight, bias, new_seed_tensor(x.device) if dropout else None, eps, dropout)[0]


def gelu_dropout(x: Tensor, dropout: float) -> Tensor:
    """Compute dropout(gelu(x)), with the tanh approximation of GELU, as in feedforward.py.

    Args:
        x: any shape, in bf16, fp16 or fp32.
        dropout: probability of zeroing an element. The others are scaled by 1 / (1 - dropout).

    Returns:
        A tensor like `x`.
    """
    return _gelu_dropout(x, new_seed_tensor(x.device), dropout)


ADD_NORM_SCHEMA = "(Tensor x, Tensor branch, Tensor weight, Tensor bias, Tensor? seed, float eps, float dropout)"
ADD_NORM_BACKWARD_SCHEMA = (
    "(Tensor d_out, Tensor summed, Tensor mean, Tensor rstd, Tensor weight, Tensor? seed, float dropout) -> Tensor[]"
)


@torch.library.custom_op(
    "xlpre::add_norm", mutates_args=(), schema=f"{ADD_NORM_SCHEMA} -> (Tensor, Tensor, Tensor, Tensor)"
)
def _add_norm(
    x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor, seed: Tensor | None, eps: float, dropout: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the norm and the sum, like `x`, and mean and inverse standard deviation of each of the N rows, float32."""
    x, branch, weight, bias = (tensor.contiguous() for tensor in (x, branch, weight, bias))
    out, summed, mean, rstd = _empty_add_norm(x)
    N = len(mean)
    launch(
        kernels.add_norm_forward,
        (_n_groups(N),),
        x,
        x=x,
        branch=branch,
        weight=weight,
        bias=bias,
        seed=seed,
        summed=summed,
        out=out,
        mean=mean,
        rstd=rstd,
        N=N,
        eps=eps,
        **_dropout_args(dropout),
        **add_norm_config(x.size(-1), seed is not None),
    )
    return out, summed, mean, rstd


@torch.library.custom_op("xlpre::add_norm_backward", mutates_args=(), schema=ADD_NORM_BACKWARD_SCHEMA)
def _add_norm_backward(
    d_out: Tensor, summed: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, seed: Tensor | None, dropout: float
) -> list[Tensor]:
    """Return the gradients of x, weight and bias. With dropout, add the gradient of branch, which otherwise equals that of x."""
    D, N = summed.size(-1), len(mean)
    n_programs = min(_n_groups(N), MAX_PROGRAMS)
    d_x, d_branch = torch.empty_like(summed), None if seed is None else torch.empty_like(summed)
    d_weight, d_bias = (summed.new_empty(n_programs, D, dtype=torch.float32) for _ in range(2))
    launch(
        kernels.add_norm_backward,
        (n_programs,),
        summed,
        d_out=d_out.contiguous(),
        summed=summed,
        mean=mean,
        rstd=rstd,
        weight=weight.contiguous(),
        seed=seed,
        d_x=d_x,
        d_branch=d_branch,
        d_weight=d_weight,
        d_bias=d_bias,
        N=N,
        n_groups=_n_groups(N),
        **_dropout_args(dropout),
        **add_norm_config(D, seed is not None),
    )
    gradients = [d_x, *(x.sum(0).to(weight.dtype) for x in (d_weight, d_bias))]
    return gradients if d_branch is None else [*gradients, d_branch]


@torch.library.custom_op(
    "xlpre::gelu_dropout", mutates_args=(), schema="(Tensor x, Tensor seed, float dropout) -> Tensor"
)
def _gelu_dropout(x: Tensor, seed: Tensor, dropout: float) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    launch(
        kernels.gelu_dropout_forward,
        (_n_programs(x),),
        x,
        x=x,
        seed=seed,
        out=out,
        n=x.numel(),
        **_dropout_args(dropout),
        BLOCK=BLOCK,
        PHILOX_OUTPUTS=PHILOX_OUTPUTS,
    )
    return out


@torch.library.custom_op(
    "xlpre::gelu_dropout_backward",
    mutates_args=(),
    schema="(Tensor d_out, Tensor x, Tensor seed, float dropout) -> Tensor",
)
def _gelu_dropout_backward(d_out: Tensor, x: Tensor, seed: Tensor, dropout: float) -> Tensor:
    x = x.contiguous()
    d_x = torch.empty_like(x)
    launch(
        kernels.gelu_dropout_backward,
        (_n_programs(x),),
        x,
        d_out=d_out.contiguous(),
        x=x,
        seed=seed,
        d_x=d_x,
        n=x.numel(),
        **_dropout_args(dropout),
        BLOCK=BLOCK,
        PHILOX_OUTPUTS=PHILOX_OUTPUTS,
    )
    return d_x


@_add_norm.register_fake
def _empty_add_norm(x: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n_rows = x.numel() // x.size(-1)
    mean, rstd = (x.new_empty(n_rows, dtype=torch.float32) for _ in range(2))
    return x.new_empty(x.shape), x.new_empty(x.shape), mean, rstd


@_add_norm_backward.register_fake
def _fake_add_norm_backward(
    d_out: Tensor, summed: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, seed: Any, *_: Any
) -> list[Tensor]:
    gradients = [summed, weight, weight] if seed is None else [summed, weight, weight, summed]
    return [x.new_empty(x.shape) for x in gradients]


@_gelu_dropout.register_fake
def _fake_gelu_dropout(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


_gelu_dropout_backward.register_fake(_fake_gelu_dropout)


def _setup_add_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, weight, _, seed, _, ctx.dropout = inputs
    ctx.set_materialize_grads(
        False
    )  # otherwise autograd would pass a tensor of zeros for each output without a gradient
    ctx.save_for_backward(*output[1:], weight, seed)


def _autograd_add_norm(ctx: Any, d_out: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if d_out is None:  # the output was used by an operation without a gradient
        return (None,) * 7
    d_x, d_weight, d_bias, *d_branch = _add_norm_backward(d_out, *ctx.saved_tensors, ctx.dropout)
    return d_x, (d_branch or [d_x])[0], d_weight, d_bias, None, None, None


def _setup_gelu_dropout(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, seed, ctx.dropout = inputs
    ctx.save_for_backward(x, seed)


def _autograd_gelu_dropout(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    return _gelu_dropout_backward(d_out, *ctx.saved_tensors, ctx.dropout), None, None


_add_norm.register_autograd(_autograd_add_norm, setup_context=_setup_add_norm)
_gelu_dropout.register_autograd(_autograd_gelu_dropout, setup_context=_setup_gelu_dropout)


def _dropout_args(dropout: float) -> dict[str, int | float]:
    level = dropout_level(dropout)
    return {"drop_level": level, "dropout_scale": DROPOUT_LEVELS / (DROPOUT_LEVELS - level)}


def add_norm_config(width: int, has_dropout: bool) -> dict[str, Any]:
    """Return constants and number of warps of the add-norm kernels.

    A thread holds 8 or 16 elements of a row. Its registers suffice for rows of up to 4,096 elements.
    """
    padded = 1 << (width - 1).bit_length()
    warps = max(1, min(padded // 256, 4), min(padded // 512, 32))  # 32 is the limit of the hardware
    constants = {"HAS_DROPOUT": has_dropout, "PREFETCH": padded <= 1024, "D": width, "PADDED_D": padded}
    return {**constants, "PHILOX_OUTPUTS": PHILOX_OUTPUTS, "num_warps": warps}


def _n_groups(n_rows: int) -> int:
    return -(-n_rows // PHILOX_OUTPUTS)


def _n_programs(x: Tensor) -> int:
    return -(-x.numel() // (BLOCK * PHILOX_OUTPUTS))
