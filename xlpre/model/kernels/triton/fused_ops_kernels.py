"""GPU kernels of what stands between the products of a layer; kernels/between.py says what they compute and calls them.

Random numbers are Philox's (Salmon et al. 2011), made again in the backward pass: 16 bits for an element, so that the four words of one
call decide for LANES elements, which stand under each other in as many rows, or as many blocks, of one program.
"""

from __future__ import annotations

import triton
import triton.language as tl

from xlpre.model.kernels.triton.primitives import LOG2E, RANDOM_ROUNDS

CUBIC = tl.constexpr(0.044715)
SLOPE = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi): GELU is x / (1 + e^-w), w = SLOPE (x + CUBIC x^3)


@triton.jit
def _drawn(seed, group, column):
    """Four random words for each column of a group of rows."""
    zeros = tl.zeros_like(column)
    return tl.philox(tl.load(seed), zeros + group, zeros, zeros, column, RANDOM_ROUNDS)


@triton.jit
def _kept(x, words, lane: tl.constexpr, threshold, grown):
    """What dropout leaves of `x`, whose element is dropped if its 16 bits are below the threshold."""
    bits = (words[lane // 2] >> (16 * (lane % 2))) & 0xFFFF
    return tl.where(bits < threshold.to(tl.uint32), 0.0, x * grown)


@triton.jit
def _two(first, second, row, column, N, D: tl.constexpr):
    """A row of each of two tensors; where AHEAD, loaded before the row above it is stored, so that a program waits less."""
    at, wanted = tl.cast(row, tl.int64) * D + column, (column < D) & (row < N)
    return tl.load(first + at, mask=wanted, other=0.0), tl.load(second + at, mask=wanted, other=0.0)


@triton.jit(do_not_specialize=("N", "threshold"))
def add_norm(
    rows, branch, weight, bias, seed, summed, out, mean, rstd,
    N, eps, threshold, grown,
    DROPOUT: tl.constexpr, AHEAD: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Sums and norms of LANES rows."""
    column = tl.arange(0, WIDTH)
    inside = column < D
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    group = tl.program_id(0)
    if AHEAD:
        ahead = _two(rows, branch, group * LANES, column, N, D)
    if DROPOUT:
        words = _drawn(seed, group, column)
    for lane in tl.static_range(LANES):
        row = group * LANES + lane
        at = tl.cast(row, tl.int64) * D + column
        wanted = inside & (row < N)
        if not AHEAD:
            ahead = _two(rows, branch, row, column, N, D)
        before, added = ahead[0].to(tl.float32), ahead[1].to(tl.float32)
        if AHEAD and lane + 1 < LANES:
            ahead = _two(rows, branch, row + 1, column, N, D)
        if DROPOUT:
            added = _kept(added, words, lane, threshold, grown)
        total = (before + added).to(summed.dtype.element_ty)  # so that both passes know the same sum
        tl.store(summed + at, total, mask=wanted)
        x = total.to(tl.float32)
        middle = tl.sum(x) / D
        apart = tl.where(inside, x - middle, 0.0)
        scale = tl.rsqrt(tl.sum(apart * apart) / D + eps)
        tl.store(out + at, (apart * scale * gain + shift).to(out.dtype.element_ty), mask=wanted)
        tl.store(mean + row, middle, mask=row < N)
        tl.store(rstd + row, scale, mask=row < N)


@triton.jit(do_not_specialize=("N", "n_groups", "threshold"))
def differentiate_add_norm(
    d_out, summed, mean, rstd, weight, seed, d_rows, d_branch, d_weight, d_bias,
    N, n_groups, threshold, grown,
    DROPOUT: tl.constexpr, AHEAD: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Gradients of both summands of every so many groups of LANES rows, and what those add to the gradients of weight and bias."""
    column = tl.arange(0, WIDTH)
    inside = column < D
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    of_weight, of_bias = tl.zeros([WIDTH], tl.float32), tl.zeros([WIDTH], tl.float32)
    for group in range(tl.program_id(0), n_groups, tl.num_programs(0)):
        if AHEAD:
            ahead = _two(d_out, summed, group * LANES, column, N, D)
        if DROPOUT:
            words = _drawn(seed, group, column)
        for lane in tl.static_range(LANES):
            row = group * LANES + lane
            at = tl.cast(row, tl.int64) * D + column
            wanted = inside & (row < N)
            if not AHEAD:
                ahead = _two(d_out, summed, row, column, N, D)
            given, total = ahead[0].to(tl.float32), ahead[1].to(tl.float32)
            if AHEAD and lane + 1 < LANES:
                ahead = _two(d_out, summed, row + 1, column, N, D)
            scale = tl.load(rstd + row, mask=row < N, other=0.0)
            x = tl.where(wanted, (total - tl.load(mean + row, mask=row < N, other=0.0)) * scale, 0.0)
            of_weight += given * x
            of_bias += given
            pulled = given * gain
            moved = scale * (pulled - tl.sum(pulled) / D - x * (tl.sum(pulled * x) / D))
            tl.store(d_rows + at, moved.to(d_rows.dtype.element_ty), mask=wanted)
            if DROPOUT:
                left = _kept(moved, words, lane, threshold, grown)
                tl.store(d_branch + at, left.to(d_branch.dtype.element_ty), mask=wanted)
    partial = tl.program_id(0) * D + column
    tl.store(d_weight + partial, of_weight, mask=inside)
    tl.store(d_bias + partial, of_bias, mask=inside)


@triton.jit(do_not_specialize=("threshold",))
def gelu(x, seed, out, n, threshold, grown, BLOCK: tl.constexpr, LANES: tl.constexpr):
    """GELU with dropout of LANES blocks."""
    at_first = tl.program_id(0).to(tl.int64) * (BLOCK * LANES) + tl.arange(0, BLOCK)
    words = _drawn(seed, tl.program_id(0), tl.arange(0, BLOCK))
    for lane in tl.static_range(LANES):
        at = at_first + lane * BLOCK
        given = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
        active = given * _sigmoid((given + given * given * given * CUBIC) * SLOPE)
        tl.store(out + at, _kept(active, words, lane, threshold, grown).to(out.dtype.element_ty), mask=at < n)


@triton.jit(do_not_specialize=("threshold",))
def differentiate_gelu(d_out, x, seed, d_x, n, threshold, grown, BLOCK: tl.constexpr, LANES: tl.constexpr):
    """Its gradient."""
    at_first = tl.program_id(0).to(tl.int64) * (BLOCK * LANES) + tl.arange(0, BLOCK)
    words = _drawn(seed, tl.program_id(0), tl.arange(0, BLOCK))
    for lane in tl.static_range(LANES):
        at = at_first + lane * BLOCK
        given = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
        gate = _sigmoid((given + given * given * given * CUBIC) * SLOPE)
        slope = gate + given * gate * (1 - gate) * (SLOPE + given * given * (3 * CUBIC * SLOPE))
        above = tl.load(d_out + at, mask=at < n, other=0.0).to(tl.float32)
        tl.store(d_x + at, (_kept(above, words, lane, threshold, grown) * slope).to(d_x.dtype.element_ty), mask=at < n)


@triton.jit
def _sigmoid(x):
    return 1 / (1 + tl.exp2(-x * LOG2E))
