"""Kernels of the fused operations. kernels/triton/fused_ops.py derives and launches them.

Random numbers come from Philox (Salmon et al. 2011). The backward pass generates them again. A call returns four 32-bit words, and
an element needs 16 bits. So one call suffices for PHILOX_OUTPUTS elements of a program: the same column of PHILOX_OUTPUTS rows, or
the same offset of PHILOX_OUTPUTS blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from xlpre.model.kernels.triton.primitives import LOG2E, PHILOX_ROUNDS

CUBIC = tl.constexpr(0.044715)
SLOPE = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi): GELU is x / (1 + e^-w), w = SLOPE (x + CUBIC x^3)


@triton.jit
def random_words(seed, group, column):
    """Draw four random words for each column of a group of rows."""
    zeros = tl.zeros_like(column)
    return tl.philox(tl.load(seed), zeros + group, zeros, zeros, column, PHILOX_ROUNDS)


@triton.jit
def dropout(x, words, i: tl.constexpr, drop_level, dropout_scale):
    """Apply dropout: zero an element if the i-th 16 bits of its words are below `drop_level`, otherwise scale it."""
    bits = (words[i // 2] >> (16 * (i % 2))) & 0xFFFF
    return tl.where(bits < drop_level.to(tl.uint32), 0.0, x * dropout_scale)


@triton.jit
def load_pair(first, second, row, column, N, D: tl.constexpr):
    """Load a row of two tensors. With PREFETCH, the next row is loaded before a row is stored, to hide the latency."""
    index, mask = tl.cast(row, tl.int64) * D + column, (column < D) & (row < N)
    return tl.load(first + index, mask=mask, other=0.0), tl.load(second + index, mask=mask, other=0.0)


@triton.jit
def sigmoid(x):
    """Compute 1 / (1 + e^-x)."""
    return 1 / (1 + tl.exp2(-x * LOG2E))


@triton.jit(do_not_specialize=("N", "drop_level"))
def add_norm_forward(
    x, branch, weight, bias, seed, summed, out, mean, rstd,
    N, eps, drop_level, dropout_scale,
    HAS_DROPOUT: tl.constexpr, PREFETCH: tl.constexpr, D: tl.constexpr, PADDED_D: tl.constexpr, PHILOX_OUTPUTS: tl.constexpr,
):  # fmt: skip
    """Compute sums and norms of PHILOX_OUTPUTS rows."""
    column = tl.arange(0, PADDED_D)
    in_row = column < D
    norm_weight = tl.load(weight + column, mask=in_row, other=0.0).to(tl.float32)
    norm_bias = tl.load(bias + column, mask=in_row, other=0.0).to(tl.float32)
    group = tl.program_id(0)
    if PREFETCH:
        pair = load_pair(x, branch, group * PHILOX_OUTPUTS, column, N, D)
    if HAS_DROPOUT:
        words = random_words(seed, group, column)
    for i in tl.static_range(PHILOX_OUTPUTS):
        row = group * PHILOX_OUTPUTS + i
        index = tl.cast(row, tl.int64) * D + column
        mask = in_row & (row < N)
        if not PREFETCH:
            pair = load_pair(x, branch, row, column, N, D)
        residual, addend = pair[0].to(tl.float32), pair[1].to(tl.float32)
        if PREFETCH and i + 1 < PHILOX_OUTPUTS:
            pair = load_pair(x, branch, row + 1, column, N, D)
        if HAS_DROPOUT:
            addend = dropout(addend, words, i, drop_level, dropout_scale)
        rounded = (residual + addend).to(summed.dtype.element_ty)  # both passes use the same rounded sum
        tl.store(summed + index, rounded, mask=mask)
        total = rounded.to(tl.float32)
        row_mean = tl.sum(total) / D
        centered = tl.where(in_row, total - row_mean, 0.0)
        row_rstd = tl.rsqrt(tl.sum(centered * centered) / D + eps)
        tl.store(out + index, (centered * row_rstd * norm_weight + norm_bias).to(out.dtype.element_ty), mask=mask)
        tl.store(mean + row, row_mean, mask=row < N)
        tl.store(rstd + row, row_rstd, mask=row < N)


@triton.jit(do_not_specialize=("N", "n_groups", "drop_level"))
def add_norm_backward(
    d_out, summed, mean, rstd, weight, seed, d_x, d_branch, d_weight, d_bias,
    N, n_groups, drop_level, dropout_scale,
    HAS_DROPOUT: tl.constexpr, PREFETCH: tl.constexpr, D: tl.constexpr, PADDED_D: tl.constexpr, PHILOX_OUTPUTS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of both summands, and the contributions of this program to the gradients of weight and bias.

    Groups of PHILOX_OUTPUTS rows are distributed over the programs: each program takes every num_programs-th group.
    """
    column = tl.arange(0, PADDED_D)
    in_row = column < D
    norm_weight = tl.load(weight + column, mask=in_row, other=0.0).to(tl.float32)
    sum_weight, sum_bias = tl.zeros([PADDED_D], tl.float32), tl.zeros([PADDED_D], tl.float32)
    for group in range(tl.program_id(0), n_groups, tl.num_programs(0)):
        if PREFETCH:
            pair = load_pair(d_out, summed, group * PHILOX_OUTPUTS, column, N, D)
        if HAS_DROPOUT:
            words = random_words(seed, group, column)
        for i in tl.static_range(PHILOX_OUTPUTS):
            row = group * PHILOX_OUTPUTS + i
            index = tl.cast(row, tl.int64) * D + column
            mask = in_row & (row < N)
            if not PREFETCH:
                pair = load_pair(d_out, summed, row, column, N, D)
            gradient, total = pair[0].to(tl.float32), pair[1].to(tl.float32)
            if PREFETCH and i + 1 < PHILOX_OUTPUTS:
                pair = load_pair(d_out, summed, row + 1, column, N, D)
            row_rstd = tl.load(rstd + row, mask=row < N, other=0.0)
            normed = tl.where(mask, (total - tl.load(mean + row, mask=row < N, other=0.0)) * row_rstd, 0.0)
            sum_weight += gradient * normed
            sum_bias += gradient
            d_normed = gradient * norm_weight
            d_sum = row_rstd * (d_normed - tl.sum(d_normed) / D - normed * (tl.sum(d_normed * normed) / D))
            tl.store(d_x + index, d_sum.to(d_x.dtype.element_ty), mask=mask)
            if HAS_DROPOUT:
                d_addend = dropout(d_sum, words, i, drop_level, dropout_scale)
                tl.store(d_branch + index, d_addend.to(d_branch.dtype.element_ty), mask=mask)
    output = tl.program_id(0) * D + column
    tl.store(d_weight + output, sum_weight, mask=in_row)
    tl.store(d_bias + output, sum_bias, mask=in_row)


@triton.jit(do_not_specialize=("drop_level",))
def gelu_dropout_forward(x, seed, out, n, drop_level, dropout_scale, BLOCK: tl.constexpr, PHILOX_OUTPUTS: tl.constexpr):
    """Compute GELU and dropout of PHILOX_OUTPUTS blocks."""
    offset = tl.program_id(0).to(tl.int64) * (BLOCK * PHILOX_OUTPUTS) + tl.arange(0, BLOCK)
    words = random_words(seed, tl.program_id(0), tl.arange(0, BLOCK))
    for i in tl.static_range(PHILOX_OUTPUTS):
        index = offset + i * BLOCK
        v = tl.load(x + index, mask=index < n, other=0.0).to(tl.float32)
        active = v * sigmoid((v + v * v * v * CUBIC) * SLOPE)
        dropped = dropout(active, words, i, drop_level, dropout_scale)
        tl.store(out + index, dropped.to(out.dtype.element_ty), mask=index < n)


@triton.jit(do_not_specialize=("drop_level",))
def gelu_dropout_backward(
    d_out, x, seed, d_x, n, drop_level, dropout_scale, BLOCK: tl.constexpr, PHILOX_OUTPUTS: tl.constexpr
):
    """Compute the gradient of `gelu_dropout_forward`."""
    offset = tl.program_id(0).to(tl.int64) * (BLOCK * PHILOX_OUTPUTS) + tl.arange(0, BLOCK)
    words = random_words(seed, tl.program_id(0), tl.arange(0, BLOCK))
    for i in tl.static_range(PHILOX_OUTPUTS):
        index = offset + i * BLOCK
        v = tl.load(x + index, mask=index < n, other=0.0).to(tl.float32)
        gate = sigmoid((v + v * v * v * CUBIC) * SLOPE)
        slope = gate + v * gate * (1 - gate) * (SLOPE + v * v * (3 * CUBIC * SLOPE))
        gradient = tl.load(d_out + index, mask=index < n, other=0.0).to(tl.float32)
        d_v = dropout(gradient, words, i, drop_level, dropout_scale) * slope
        tl.store(d_x + index, d_v.to(d_x.dtype.element_ty), mask=index < n)
