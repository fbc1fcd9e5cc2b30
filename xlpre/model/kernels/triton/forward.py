"""Kernels of relative attention for GPUs; kernels/triton.py derives what they compute and triton_launch.py calls them."""

from __future__ import annotations

import triton
import triton.language as tl

from xlpre.model.kernels.triton.primitives import LOG2E, RANDOM_ROUNDS, SIZES, _facts, _sees, _tile, _undropped


@triton.jit
def _thinned(bits, random, chosen):
    """Of `bits` a half, and where the last bit of `chosen` is 1, a half of the others too."""
    return (bits & random) | ((bits | random) & (0 - (chosen & 1)).to(tl.uint32))


@triton.jit(do_not_specialize=(*SIZES, "first_row", "threshold"))
def draw(seed, row_facts, dropped, first_row, threshold, H, n_pitch, k_pitch, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """What dropout drops of a tile of rows, a bit a key, by seed, head, row and key alone; threshold / 2^16 of all.

    Rows are those from `first_row` on of all that there are.

    All 32 bits of a word are drawn at once: it is thinned 16 times, by 16 random words and the threshold's bits, from the last.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    _, _, _, _, first, last = _facts(row_facts, tl.program_id(1) // H, row, n_pitch)
    into = dropped + tl.program_id(1).to(tl.int64) * n_pitch * (k_pitch // 32) + row[:, None]
    counted = first_row + row[:, None]
    zeros, drawn = tl.zeros([ROWS, KEYS // 32], tl.int32), tl.load(seed)
    for begin in range(first // KEYS * KEYS, last, KEYS):
        word = begin // 32 + tl.arange(0, KEYS // 32)[None, :]
        bits = zeros.to(tl.uint32)
        for four in tl.static_range(4):
            a, b, c, d = tl.philox(
                drawn, zeros + counted, zeros + word, zeros + tl.program_id(1), zeros + four, RANDOM_ROUNDS
            )
            bits = _thinned(_thinned(bits, a, threshold >> (4 * four)), b, threshold >> (4 * four + 1))
            bits = _thinned(_thinned(bits, c, threshold >> (4 * four + 2)), d, threshold >> (4 * four + 3))
        tl.store(into + word * n_pitch, bits.to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=SIZES)
def score_places(
    query, pos_key, offsets, row_facts, direction, bias,
    N, K, R, H, n_pitch, k_pitch,
    OFFSETS: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Position scores: a product by distance, each score stored in the column of its key."""
    batch, head = tl.program_id(1) // H, tl.program_id(1) % H
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    _, _, column, _, first, last = _facts(row_facts, batch, row, n_pitch)
    shift = K - column  # of a row: distance index - key
    mine = tl.load(_tile(query, batch, head, row, N, H, E), mask=row[:, None] < N, other=0.0)
    way = tl.load(direction + batch)
    into = bias + (tl.program_id(1).to(tl.int64) * N * k_pitch) + row[:, None] * k_pitch - shift[:, None]
    for begin in range(first + tl.min(shift), last + tl.max(shift), KEYS):
        distance = begin + tl.arange(0, KEYS)
        theirs = tl.load(_tile(pos_key, way, head, distance, R, H, E), mask=distance[:, None] < R, other=0.0)
        score = tl.dot(mine, tl.trans(theirs), input_precision="ieee")
        if OFFSETS:
            score += tl.load(offsets + (way * R + distance) * H + head, mask=distance < R, other=0.0)[None, :]
        key = distance[None, :] - shift[:, None]
        wanted = (row[:, None] < N) & (key >= first) & (key < last)
        tl.store(into + distance[None, :], score.to(bias.dtype.element_ty), mask=wanted)


@triton.jit(do_not_specialize=SIZES)
def attend(
    query, key, value, bias, step, row_facts, key_facts, dropped, out, log_total,
    N, K, H, n_pitch, k_pitch, reach, share,
    PLACES: tl.constexpr, SEGMENTS: tl.constexpr, LIMITED: tl.constexpr, DROPOUT: tl.constexpr,
    E: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The output of a tile of rows, and log2 of the sum of their exponentials times the share that dropout keeps."""
    batch, head = tl.program_id(1) // H, tl.program_id(1) % H
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < N
    rank, own, column, segment, first, last = _facts(row_facts, batch, row, n_pitch)
    mine = tl.load(_tile(query, batch, head, row, N, H, E), mask=inside[:, None], other=0.0)
    lines = tl.program_id(1).to(tl.int64) * N
    if PLACES:
        of_bias = bias + lines * k_pitch + row[:, None] * k_pitch
        first_keys = first // KEYS * KEYS + tl.arange(0, KEYS)
        ahead = tl.load(of_bias + first_keys[None, :], mask=inside[:, None], other=0.0)
    if SEGMENTS:
        score_step = tl.load(step + lines + row, mask=inside, other=0.0).to(tl.float32)
    if DROPOUT:
        dropped += tl.program_id(1).to(tl.int64) * n_pitch * (k_pitch // 32)
    largest = tl.full([ROWS], -float("inf"), tl.float32)
    total, mean = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, E], tl.float32)
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
        score = tl.where(seen, score, -float("inf"))
        larger = tl.maximum(largest, tl.max(score, 1) * LOG2E)
        origin = tl.where(larger == -float("inf"), 0.0, larger)  # a row that has seen nothing yet
        shrunk = tl.exp2(largest - origin)
        probability = tl.exp2(score * LOG2E - origin[:, None])  # one fused multiply-add
        total = total * shrunk + tl.sum(probability, 1)
        if DROPOUT:
            probability = _undropped(probability, dropped, row, begin, n_pitch, False, ROWS, KEYS)
        values = tl.load(_tile(value, batch, head, at, K, H, E), mask=at[:, None] < K, other=0.0)
        mean = mean * shrunk[:, None] + tl.dot(probability.to(values.dtype), values, input_precision="ieee")
        largest = larger
    total *= share  # so that what dropout left grows by 1 / share
    sees = total > 0
    mean = mean / tl.where(sees, total, 1.0)[:, None]
    tl.store(_tile(out, batch, head, row, N, H, E), mean.to(out.dtype.element_ty), mask=inside[:, None])
    tl.store(log_total + lines + row, tl.where(sees, largest + tl.log2(total), 0.0), mask=inside)
