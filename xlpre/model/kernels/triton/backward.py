"""Kernels of the gradients of relative attention for GPUs; kernels/triton.py derives them and triton_launch.py calls them."""

from __future__ import annotations

import triton
import triton.language as tl

from xlpre.model.kernels.triton.primitives import LOG2E, SIZES, _facts, _sees, _tile, _undropped


@triton.jit(do_not_specialize=SIZES)
def differentiate_keys(
    query, key, value, bias, step, row_facts, key_facts, dropped, log_total, d_out, delta, d_key, d_value,
    N, K, H, n_pitch, k_pitch, reach,
    PLACES: tl.constexpr, SEGMENTS: tl.constexpr, LIMITED: tl.constexpr, DROPOUT: tl.constexpr,
    E: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of keys and values. Scores are transposed here, (KEYS, ROWS): they are the left factor of both products."""
    batch, head = tl.program_id(1) // H, tl.program_id(1) % H
    at = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    of_keys = key_facts + batch * 4 * k_pitch + at
    rank, segment = tl.load(of_keys)[:, None], tl.load(of_keys + k_pitch)[:, None]
    tile_facts = key_facts + batch * 4 * k_pitch + tl.program_id(0) * KEYS
    first, last = tl.load(tile_facts + 2 * k_pitch), tl.load(tile_facts + 3 * k_pitch)
    mine = tl.load(_tile(key, batch, head, at, K, H, E), mask=at[:, None] < K, other=0.0)
    values = tl.load(_tile(value, batch, head, at, K, H, E), mask=at[:, None] < K, other=0.0)
    lines = tl.program_id(1).to(tl.int64) * N
    if PLACES:
        of_bias = bias + lines * k_pitch + at[:, None]
        following = first // ROWS * ROWS + tl.arange(0, ROWS)[None, :]
        ahead = tl.load(of_bias + following * k_pitch, mask=(following < N) & (following < last), other=0.0)
    if DROPOUT:
        dropped += tl.program_id(1).to(tl.int64) * n_pitch * (k_pitch // 32)
    sum_key, sum_value = tl.zeros([KEYS, E], tl.float32), tl.zeros([KEYS, E], tl.float32)
    for begin in range(first // ROWS * ROWS, last, ROWS):
        begin = tl.multiple_of(begin, ROWS)
        row = begin + tl.arange(0, ROWS)
        inside = row < N
        facts = row_facts + batch * 6 * n_pitch + row
        theirs = tl.load(_tile(query, batch, head, row, N, H, E), mask=inside[:, None], other=0.0)
        score = tl.dot(mine, tl.trans(theirs), input_precision="ieee")
        if PLACES:
            score += ahead.to(tl.float32)
            following = row[None, :] + ROWS
            ahead = tl.load(of_bias + following * k_pitch, mask=(following < N) & (following < last), other=0.0)
        if SEGMENTS:
            score_step = tl.load(step + lines + row, mask=inside, other=0.0).to(tl.float32)
            score += tl.where(segment != tl.load(facts + 3 * n_pitch)[None, :], score_step[None, :], 0.0)
        own, column = tl.load(facts + n_pitch)[None, :], tl.load(facts + 2 * n_pitch)[None, :]
        seen = _sees(tl.load(facts)[None, :], own, column, rank, at[:, None], reach, LIMITED)
        log_sum = tl.load(log_total + lines + row, mask=inside, other=0.0)[None, :]
        probability = tl.where(seen, tl.exp2(score * LOG2E - log_sum), 0.0)
        gradient = tl.load(_tile(d_out, batch, head, row, N, H, E), mask=inside[:, None], other=0.0)
        d_probability = tl.dot(values, tl.trans(gradient), input_precision="ieee")
        used = probability
        if DROPOUT:
            used = _undropped(probability, dropped, row, tl.program_id(0) * KEYS, n_pitch, True, ROWS, KEYS)
        sum_value += tl.dot(used.to(gradient.dtype), gradient, input_precision="ieee")
        d_score = used * d_probability - probability * tl.load(delta + lines + row, mask=inside, other=0.0)[None, :]
        sum_key += tl.dot(d_score.to(theirs.dtype), theirs, input_precision="ieee")
    tl.store(_tile(d_key, batch, head, at, K, H, E), sum_key.to(d_key.dtype.element_ty), mask=at[:, None] < K)
    tl.store(_tile(d_value, batch, head, at, K, H, E), sum_value.to(d_value.dtype.element_ty), mask=at[:, None] < K)


@triton.jit(do_not_specialize=SIZES)
def differentiate_rows(
    query, key, value, bias, step, row_facts, key_facts, dropped, log_total, d_out, delta, d_query, d_step,
    N, K, H, n_pitch, k_pitch, reach,
    PLACES: tl.constexpr, SEGMENTS: tl.constexpr, LIMITED: tl.constexpr, DROPOUT: tl.constexpr,
    E: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of queries and steps; that of the bias takes the place of the bias, between the first and last key seen."""
    batch, head = tl.program_id(1) // H, tl.program_id(1) % H
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < N
    rank, own, column, segment, first, last = _facts(row_facts, batch, row, n_pitch)
    mine = tl.load(_tile(query, batch, head, row, N, H, E), mask=inside[:, None], other=0.0)
    gradient = tl.load(_tile(d_out, batch, head, row, N, H, E), mask=inside[:, None], other=0.0)
    lines = tl.program_id(1).to(tl.int64) * N
    log_sum = tl.load(log_total + lines + row, mask=inside, other=0.0)
    shared = tl.load(delta + lines + row, mask=inside, other=0.0)
    if PLACES:
        of_bias = bias + lines * k_pitch + row[:, None] * k_pitch
        first_keys = first // KEYS * KEYS + tl.arange(0, KEYS)
        ahead = tl.load(of_bias + first_keys[None, :], mask=inside[:, None], other=0.0)
    if SEGMENTS:
        score_step = tl.load(step + lines + row, mask=inside, other=0.0).to(tl.float32)
    if DROPOUT:
        dropped += tl.program_id(1).to(tl.int64) * n_pitch * (k_pitch // 32)
    sum_step, sum_query = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, E], tl.float32)
    for begin in range(first // KEYS * KEYS, last, KEYS):
        begin = tl.multiple_of(begin, KEYS)
        at = begin + tl.arange(0, KEYS)
        of_keys = key_facts + batch * 4 * k_pitch + at
        theirs = tl.load(_tile(key, batch, head, at, K, H, E), mask=at[:, None] < K, other=0.0)
        score = tl.dot(mine, tl.trans(theirs), input_precision="ieee")
        if PLACES:
            score += ahead.to(tl.float32)
            ahead = tl.load(of_bias + at[None, :] + KEYS, mask=inside[:, None] & (begin + KEYS < last), other=0.0)
        if SEGMENTS:
            different = segment[:, None] != tl.load(of_keys + k_pitch)[None, :]
            score += tl.where(different, score_step[:, None], 0.0)
        key_rank = tl.load(of_keys)[None, :]
        seen = _sees(rank[:, None], own[:, None], column[:, None], key_rank, at[None, :], reach, LIMITED)
        probability = tl.where(seen, tl.exp2(score * LOG2E - log_sum[:, None]), 0.0)
        values = tl.load(_tile(value, batch, head, at, K, H, E), mask=at[:, None] < K, other=0.0)
        d_probability = tl.dot(gradient, tl.trans(values), input_precision="ieee")
        used = probability
        if DROPOUT:
            used = _undropped(probability, dropped, row, begin, n_pitch, False, ROWS, KEYS)
        d_score = used * d_probability - probability * shared[:, None]
        if SEGMENTS:
            sum_step += tl.sum(tl.where(different, d_score, 0.0), 1)
        rounded = d_score.to(theirs.dtype)
        if PLACES:
            tl.store(of_bias + at[None, :], rounded, mask=inside[:, None])
        sum_query += tl.dot(rounded, theirs, input_precision="ieee")
    tl.store(_tile(d_query, batch, head, row, N, H, E), sum_query.to(d_query.dtype.element_ty), mask=inside[:, None])
    if SEGMENTS:
        tl.store(d_step + lines + row, sum_step.to(d_step.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def differentiate_place_queries(
    pos_key, row_facts, direction, d_bias, d_query,
    N, K, R, H, n_pitch, k_pitch,
    E: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of queries from those of their position scores."""
    batch, head = tl.program_id(1) // H, tl.program_id(1) % H
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    _, _, column, _, first, last = _facts(row_facts, batch, row, n_pitch)
    shift = K - column
    way = tl.load(direction + batch)
    source = d_bias + (tl.program_id(1).to(tl.int64) * N * k_pitch) + row[:, None] * k_pitch - shift[:, None]
    near, far = shift + first, tl.where(row < N, shift + last, 0)  # of a row: the distances written
    sum_query = tl.zeros([ROWS, E], tl.float32)
    for begin in range(first + tl.min(shift), last + tl.max(shift), KEYS):
        distance = begin + tl.arange(0, KEYS)
        written = (distance[None, :] >= near[:, None]) & (distance[None, :] < far[:, None])
        d_score = tl.load(source + distance[None, :], mask=written, other=0.0)
        theirs = tl.load(_tile(pos_key, way, head, distance, R, H, E), mask=distance[:, None] < R, other=0.0)
        sum_query += tl.dot(d_score, theirs, input_precision="ieee")
    sum_query = sum_query.to(d_query.dtype.element_ty)
    tl.store(_tile(d_query, batch, head, row, N, H, E), sum_query, mask=row[:, None] < N)


@triton.jit(do_not_specialize=SIZES)
def differentiate_place_keys(
    query, row_facts, d_bias, d_place_keys, d_offsets,
    N, K, R, H, n_pitch, k_pitch,
    OFFSETS: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of the keys of distances, (B, R, H, E), and of their offsets, (B, R, H), a batch row at a time."""
    batch, head = tl.program_id(1) // H, tl.program_id(1) % H
    distance = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    lines = d_bias + tl.program_id(1).to(tl.int64) * N * k_pitch
    sum_keys, sum_offsets = tl.zeros([KEYS, E], tl.float32), tl.zeros([KEYS], tl.float32)
    for begin in range(0, N, ROWS):
        row = begin + tl.arange(0, ROWS)
        facts = row_facts + batch * 6 * n_pitch
        first, last = tl.load(facts + 4 * n_pitch + begin), tl.load(facts + 5 * n_pitch + begin)
        shift = K - tl.load(facts + 2 * n_pitch + row)  # of a row: distance index - key
        n_written = tl.where(row < N, last - first, 0).to(tl.uint32)
        written = (distance[:, None] - (shift + first)[None, :]).to(tl.uint32) < n_written[None, :]
        d_score = tl.load(lines + (row * k_pitch - shift)[None, :] + distance[:, None], mask=written, other=0.0)
        theirs = tl.load(_tile(query, batch, head, row, N, H, E), mask=row[:, None] < N, other=0.0)
        sum_keys += tl.dot(d_score, theirs, input_precision="ieee")
        if OFFSETS:
            sum_offsets += tl.sum(d_score.to(tl.float32), 1)
    tl.store(_tile(d_place_keys, batch, head, distance, R, H, E), sum_keys, mask=distance[:, None] < R)
    if OFFSETS:
        tl.store(d_offsets + (batch * R + distance) * H + head, sum_offsets, mask=distance < R)
