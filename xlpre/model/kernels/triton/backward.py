"""Backward kernels of relative attention. kernels/triton/attention.py derives them, kernels/triton/launch.py launches them."""

from __future__ import annotations

import triton
import triton.language as tl

from xlpre.model.kernels.triton.primitives import (
    LOG2E,
    SIZES,
    apply_dropout,
    is_visible,
    load_row_info,
    tile_pointers,
)


@triton.jit(do_not_specialize=SIZES)
def backward_key_value(
    query, key, value, bias, segment_score, row_info, key_info, drop_mask, lse, d_out, delta, d_key, d_value,
    N, K, H, n_pitch, k_pitch, max_distance,
    HAS_POSITIONS: tl.constexpr, HAS_SEGMENTS: tl.constexpr, HAS_MAX_DISTANCE: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    E: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a tile of keys and values.

    Scores are transposed here, (KEYS, ROWS), because they are the left factor of the products for d key and d value.
    """
    batch, head = tl.program_id(1) // H, tl.program_id(1) % H
    index = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    info = key_info + batch * 4 * k_pitch + index
    rank, segment = tl.load(info)[:, None], tl.load(info + k_pitch)[:, None]
    tile_info = key_info + batch * 4 * k_pitch + tl.program_id(0) * KEYS
    first, last = tl.load(tile_info + 2 * k_pitch), tl.load(tile_info + 3 * k_pitch)
    keys = tl.load(tile_pointers(key, batch, head, index, K, H, E), mask=index[:, None] < K, other=0.0)
    values = tl.load(tile_pointers(value, batch, head, index, K, H, E), mask=index[:, None] < K, other=0.0)
    head_offset = tl.program_id(1).to(tl.int64) * N
    if HAS_POSITIONS:
        key_bias = bias + head_offset * k_pitch + index[:, None]
        next_row = first // ROWS * ROWS + tl.arange(0, ROWS)[None, :]
        next_bias = tl.load(key_bias + next_row * k_pitch, mask=(next_row < N) & (next_row < last), other=0.0)
    if HAS_DROPOUT:
        drop_mask += tl.program_id(1).to(tl.int64) * n_pitch * (k_pitch // 32)
    sum_key, sum_value = tl.zeros([KEYS, E], tl.float32), tl.zeros([KEYS, E], tl.float32)
    for start in range(first // ROWS * ROWS, last, ROWS):
        start = tl.multiple_of(start, ROWS)
        row = start + tl.arange(0, ROWS)
        in_range = row < N
        rows = row_info + batch * 6 * n_pitch + row
        queries = tl.load(tile_pointers(query, batch, head, row, N, H, E), mask=in_range[:, None], other=0.0)
        score = tl.dot(keys, tl.trans(queries), input_precision="ieee")
        if HAS_POSITIONS:
            score += next_bias.to(tl.float32)
            next_row = row[None, :] + ROWS
            next_bias = tl.load(key_bias + next_row * k_pitch, mask=(next_row < N) & (next_row < last), other=0.0)
        if HAS_SEGMENTS:
            row_segment_score = tl.load(segment_score + head_offset + row, mask=in_range, other=0.0).to(tl.float32)
            score += tl.where(segment != tl.load(rows + 3 * n_pitch)[None, :], row_segment_score[None, :], 0.0)
        self_key, position_key = tl.load(rows + n_pitch)[None, :], tl.load(rows + 2 * n_pitch)[None, :]
        visible = is_visible(
            tl.load(rows)[None, :], self_key, position_key, rank, index[:, None], max_distance, HAS_MAX_DISTANCE
        )
        row_lse = tl.load(lse + head_offset + row, mask=in_range, other=0.0)[None, :]
        probability = tl.where(visible, tl.exp2(score * LOG2E - row_lse), 0.0)
        gradient = tl.load(tile_pointers(d_out, batch, head, row, N, H, E), mask=in_range[:, None], other=0.0)
        d_probability = tl.dot(values, tl.trans(gradient), input_precision="ieee")
        weight = probability
        if HAS_DROPOUT:
            weight = apply_dropout(probability, drop_mask, row, tl.program_id(0) * KEYS, n_pitch, True, ROWS, KEYS)
        sum_value += tl.dot(weight.to(gradient.dtype), gradient, input_precision="ieee")
        row_delta = tl.load(delta + head_offset + row, mask=in_range, other=0.0)[None, :]
        d_score = weight * d_probability - probability * row_delta
        sum_key += tl.dot(d_score.to(queries.dtype), queries, input_precision="ieee")
    tl.store(
        tile_pointers(d_key, batch, head, index, K, H, E), sum_key.to(d_key.dtype.element_ty), mask=index[:, None] < K
    )
    sum_value = sum_value.to(d_value.dtype.element_ty)
    tl.store(tile_pointers(d_value, batch, head, index, K, H, E), sum_value, mask=index[:, None] < K)


@triton.jit(do_not_specialize=SIZES)
def backward_query(
    query, key, value, bias, segment_score, row_info, key_info, drop_mask, lse, d_out, delta, d_query, d_segment_score,
    N, K, H, n_pitch, k_pitch, max_distance,
    HAS_POSITIONS: tl.constexpr, HAS_SEGMENTS: tl.constexpr, HAS_MAX_DISTANCE: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    E: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a tile of queries and segment scores.

    Also overwrite the bias with its gradient, for the keys from the first to the last that these rows see.
    """
    batch, head = tl.program_id(1) // H, tl.program_id(1) % H
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_range = row < N
    rank, self_key, position_key, segment, first, last = load_row_info(row_info, batch, row, n_pitch)
    queries = tl.load(tile_pointers(query, batch, head, row, N, H, E), mask=in_range[:, None], other=0.0)
    gradient = tl.load(tile_pointers(d_out, batch, head, row, N, H, E), mask=in_range[:, None], other=0.0)
    head_offset = tl.program_id(1).to(tl.int64) * N
    row_lse = tl.load(lse + head_offset + row, mask=in_range, other=0.0)
    row_delta = tl.load(delta + head_offset + row, mask=in_range, other=0.0)
    if HAS_POSITIONS:
        row_bias = bias + head_offset * k_pitch + row[:, None] * k_pitch
        first_tile = first // KEYS * KEYS + tl.arange(0, KEYS)
        next_bias = tl.load(row_bias + first_tile[None, :], mask=in_range[:, None], other=0.0)
    if HAS_SEGMENTS:
        row_segment_score = tl.load(segment_score + head_offset + row, mask=in_range, other=0.0).to(tl.float32)
    if HAS_DROPOUT:
        drop_mask += tl.program_id(1).to(tl.int64) * n_pitch * (k_pitch // 32)
    sum_segment_score, sum_query = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, E], tl.float32)
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
        probability = tl.where(visible, tl.exp2(score * LOG2E - row_lse[:, None]), 0.0)
        values = tl.load(tile_pointers(value, batch, head, index, K, H, E), mask=index[:, None] < K, other=0.0)
        d_probability = tl.dot(gradient, tl.trans(values), input_precision="ieee")
        weight = probability
        if HAS_DROPOUT:
            weight = apply_dropout(probability, drop_mask, row, start, n_pitch, False, ROWS, KEYS)
        d_score = weight * d_probability - probability * row_delta[:, None]
        if HAS_SEGMENTS:
            sum_segment_score += tl.sum(tl.where(segments_differ, d_score, 0.0), 1)
        rounded = d_score.to(keys.dtype)
        if HAS_POSITIONS:
            tl.store(row_bias + index[None, :], rounded, mask=in_range[:, None])
        sum_query += tl.dot(rounded, keys, input_precision="ieee")
    sum_query = sum_query.to(d_query.dtype.element_ty)
    tl.store(tile_pointers(d_query, batch, head, row, N, H, E), sum_query, mask=in_range[:, None])
    if HAS_SEGMENTS:
        sum_segment_score = sum_segment_score.to(d_segment_score.dtype.element_ty)
        tl.store(d_segment_score + head_offset + row, sum_segment_score, mask=in_range)


@triton.jit(do_not_specialize=SIZES)
def backward_position_query(
    pos_key, row_info, direction, d_bias, d_query,
    N, K, R, H, n_pitch, k_pitch,
    E: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a tile of position queries from the gradient of their position scores."""
    batch, head = tl.program_id(1) // H, tl.program_id(1) % H
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    _, _, position_key, _, first, last = load_row_info(row_info, batch, row, n_pitch)
    shift = K - position_key  # distance index - key
    way = tl.load(direction + batch)
    source = d_bias + (tl.program_id(1).to(tl.int64) * N * k_pitch) + row[:, None] * k_pitch - shift[:, None]
    low, high = shift + first, tl.where(row < N, shift + last, 0)  # range of distances that `d_bias` holds for a row
    sum_query = tl.zeros([ROWS, E], tl.float32)
    for start in range(first + tl.min(shift), last + tl.max(shift), KEYS):
        distance = start + tl.arange(0, KEYS)
        mask = (distance[None, :] >= low[:, None]) & (distance[None, :] < high[:, None])
        d_score = tl.load(source + distance[None, :], mask=mask, other=0.0)
        keys = tl.load(tile_pointers(pos_key, way, head, distance, R, H, E), mask=distance[:, None] < R, other=0.0)
        sum_query += tl.dot(d_score, keys, input_precision="ieee")
    sum_query = sum_query.to(d_query.dtype.element_ty)
    tl.store(tile_pointers(d_query, batch, head, row, N, H, E), sum_query, mask=row[:, None] < N)


@triton.jit(do_not_specialize=SIZES)
def backward_position_key(
    query, row_info, d_bias, d_pos_key, d_pos_offset,
    N, K, R, H, n_pitch, k_pitch,
    HAS_OFFSET: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a tile of position keys (B, R, H, E) and of their offsets (B, R, H), for each batch row."""
    batch, head = tl.program_id(1) // H, tl.program_id(1) % H
    distance = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    source = d_bias + tl.program_id(1).to(tl.int64) * N * k_pitch
    sum_key, sum_offset = tl.zeros([KEYS, E], tl.float32), tl.zeros([KEYS], tl.float32)
    for start in range(0, N, ROWS):
        row = start + tl.arange(0, ROWS)
        info = row_info + batch * 6 * n_pitch
        first, last = tl.load(info + 4 * n_pitch + start), tl.load(info + 5 * n_pitch + start)
        shift = K - tl.load(info + 2 * n_pitch + row)  # distance index - key
        n_distances = tl.where(row < N, last - first, 0).to(tl.uint32)  # distances that `d_bias` holds for a row
        mask = (distance[:, None] - (shift + first)[None, :]).to(tl.uint32) < n_distances[None, :]
        d_score = tl.load(source + (row * k_pitch - shift)[None, :] + distance[:, None], mask=mask, other=0.0)
        queries = tl.load(tile_pointers(query, batch, head, row, N, H, E), mask=row[:, None] < N, other=0.0)
        sum_key += tl.dot(d_score, queries, input_precision="ieee")
        if HAS_OFFSET:
            sum_offset += tl.sum(d_score.to(tl.float32), 1)
    tl.store(tile_pointers(d_pos_key, batch, head, distance, R, H, E), sum_key, mask=distance[:, None] < R)
    if HAS_OFFSET:
        tl.store(d_pos_offset + (batch * R + distance) * H + head, sum_offset, mask=distance < R)
