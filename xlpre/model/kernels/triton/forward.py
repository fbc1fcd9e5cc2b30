"""Forward kernels of relative attention. kernels/triton/attention.py derives them, kernels/triton/launch.py launches them."""

from __future__ import annotations

import triton
import triton.language as tl

from xlpre.model.kernels.triton.primitives import (
    LOG2E,
    PHILOX_ROUNDS,
    SIZES,
    apply_dropout,
    is_visible,
    load_row_info,
    tile_pointers,
)


@triton.jit
def thin_bits(bits, random, level_bit):
    """If `level_bit` is even, clear a random half of the set bits. If it is odd, set a random half of the other bits."""
    return (bits & random) | ((bits | random) & (0 - (level_bit & 1)).to(tl.uint32))


@triton.jit(do_not_specialize=(*SIZES, "first_row", "drop_level"))
def draw_dropout_mask(
    seed, row_info, drop_mask, first_row, drop_level, H, n_pitch, k_pitch, ROWS: tl.constexpr, KEYS: tl.constexpr
):
    """Draw the dropout mask of a tile of rows: one bit per key, 1 (dropped) with probability drop_level / 2^16.

    A bit depends on seed, head, row and key only. Rows are counted from `first_row`.

    The 32 bits of a word are drawn together, by 16 calls of `thin_bits`: one for each bit of `drop_level`, lowest bit first.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    _, _, _, _, first, last = load_row_info(row_info, tl.program_id(1) // H, row, n_pitch)
    output = drop_mask + tl.program_id(1).to(tl.int64) * n_pitch * (k_pitch // 32) + row[:, None]
    row_counter = first_row + row[:, None]
    zeros, seed_value = tl.zeros([ROWS, KEYS // 32], tl.int32), tl.load(seed)
    for start in range(first // KEYS * KEYS, last, KEYS):
        word = start // 32 + tl.arange(0, KEYS // 32)[None, :]
        bits = zeros.to(tl.uint32)
        for i in tl.static_range(4):
            a, b, c, d = tl.philox(
                seed_value, zeros + row_counter, zeros + word, zeros + tl.program_id(1), zeros + i, PHILOX_ROUNDS
            )
            bits = thin_bits(thin_bits(bits, a, drop_level >> (4 * i)), b, drop_level >> (4 * i + 1))
            bits = thin_bits(thin_bits(bits, c, drop_level >> (4 * i + 2)), d, drop_level >> (4 * i + 3))
        tl.store(output + word * n_pitch, bits.to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=SIZES)
def position_scores(
    query, pos_key, pos_offset, row_info, direction, bias,
    N, K, R, H, n_pitch, k_pitch,
    HAS_OFFSET: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute the position score of each distance, and store it at the key of this distance."""
    batch, head = tl.program_id(1) // H, tl.program_id(1) % H
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    _, _, position_key, _, first, last = load_row_info(row_info, batch, row, n_pitch)
    shift = K - position_key  # distance index - key
    queries = tl.load(tile_pointers(query, batch, head, row, N, H, E), mask=row[:, None] < N, other=0.0)
    way = tl.load(direction + batch)
    output = bias + (tl.program_id(1).to(tl.int64) * N * k_pitch) + row[:, None] * k_pitch - shift[:, None]
    for start in range(first + tl.min(shift), last + tl.max(shift), KEYS):
        distance = start + tl.arange(0, KEYS)
        keys = tl.load(tile_pointers(pos_key, way, head, distance, R, H, E), mask=distance[:, None] < R, other=0.0)
        score = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        if HAS_OFFSET:
            score += tl.load(pos_offset + (way * R + distance) * H + head, mask=distance < R, other=0.0)[None, :]
        key = distance[None, :] - shift[:, None]
        mask = (row[:, None] < N) & (key >= first) & (key < last)
        tl.store(output + distance[None, :], score.to(bias.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=SIZES)
def attention_forward(
    query, key, value, bias, segment_score, row_info, key_info, drop_mask, out, lse,
    N, K, H, n_pitch, k_pitch, max_distance, keep_prob,
    HAS_POSITIONS: tl.constexpr, HAS_SEGMENTS: tl.constexpr, HAS_MAX_DISTANCE: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    E: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute the output of a tile of query rows, and log2(keep_prob * sum of exp(score)) of each row."""
    batch, head = tl.program_id(1) // H, tl.program_id(1) % H
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_range = row < N
    rank, self_key, position_key, segment, first, last = load_row_info(row_info, batch, row, n_pitch)
    queries = tl.load(tile_pointers(query, batch, head, row, N, H, E), mask=in_range[:, None], other=0.0)
    head_offset = tl.program_id(1).to(tl.int64) * N
    if HAS_POSITIONS:
        row_bias = bias + head_offset * k_pitch + row[:, None] * k_pitch
        first_tile = first // KEYS * KEYS + tl.arange(0, KEYS)
        next_bias = tl.load(row_bias + first_tile[None, :], mask=in_range[:, None], other=0.0)
    if HAS_SEGMENTS:
        row_segment_score = tl.load(segment_score + head_offset + row, mask=in_range, other=0.0).to(tl.float32)
    if HAS_DROPOUT:
        drop_mask += tl.program_id(1).to(tl.int64) * n_pitch * (k_pitch // 32)
    row_max = tl.full([ROWS], -float("inf"), tl.float32)
    total, mean = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, E], tl.float32)
    for start in range(first // KEYS * KEYS, last, KEYS):
        start = tl.multiple_of(start, KEYS)
        index = start + tl.arange(0, KEYS)
        info = key_info + batch * 4 * k_pitch + index
        keys = tl.load(tile_pointers(key, batch, head, index, K, H, E), mask=index[:, None] < K, other=0.0)
        score = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        if HAS_POSITIONS:
            score += next_bias.to(tl.float32)
            next_bias = tl.load(
                row_bias + index[None, :] + KEYS, mask=in_range[:, None] & (start + KEYS < last), other=0.0
            )
        if HAS_SEGMENTS:
            segments_differ = segment[:, None] != tl.load(info + k_pitch)[None, :]
            score += tl.where(segments_differ, row_segment_score[:, None], 0.0)
        key_rank = tl.load(info)[None, :]
        visible = is_visible(
            rank[:, None],
            self_key[:, None],
            position_key[:, None],
            key_rank,
            index[None, :],
            max_distance,
            HAS_MAX_DISTANCE,
        )
        score = tl.where(visible, score, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(score, 1) * LOG2E)
        origin = tl.where(new_max == -float("inf"), 0.0, new_max)  # for rows that have seen no key yet
        rescale = tl.exp2(row_max - origin)
        probability = tl.exp2(score * LOG2E - origin[:, None])  # one fused multiply-add
        total = total * rescale + tl.sum(probability, 1)
        if HAS_DROPOUT:
            probability = apply_dropout(probability, drop_mask, row, start, n_pitch, False, ROWS, KEYS)
        values = tl.load(tile_pointers(value, batch, head, index, K, H, E), mask=index[:, None] < K, other=0.0)
        mean = mean * rescale[:, None] + tl.dot(probability.to(values.dtype), values, input_precision="ieee")
        row_max = new_max
    total *= keep_prob  # scales the weights that dropout keeps by 1 / keep_prob
    sees_any = total != 0  # true for nan
    mean = mean / tl.where(sees_any, total, 1.0)[:, None]
    tl.store(tile_pointers(out, batch, head, row, N, H, E), mean.to(out.dtype.element_ty), mask=in_range[:, None])
    tl.store(lse + head_offset + row, tl.where(sees_any, row_max + tl.log2(total), 0.0), mask=in_range)
