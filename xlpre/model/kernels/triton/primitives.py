"""Device functions that the attention kernels share.

A program computes one tile of query rows (or of keys, or of distances) of one head of one batch row. Layouts of tensors:

- rows (B, N, H, E), keys (B, K, H, E), scalars per row (B, H, N)
- matrices (B, H, N, K) with `k_pitch` elements per row
- `row_info` (B, 6, n_pitch) and `key_info` (B, 4, k_pitch), see TritonBackend, for the N query rows of a panel (panels.py)

No program adds into the output of another one, so the same input always gives the same bits.

The bias of the next tile is loaded while a tile is computed (`next_bias`). Triton itself prefetches only operands of products, and would
wait for the bias at the start of each iteration.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)  # probabilities are powers of two: exp(x) = 2 ** (x * LOG2E)
PHILOX_ROUNDS = tl.constexpr(7)  # of Philox4x32: the fewest that pass every test (Salmon et al. 2011, table 2)
# Triton does not specialize the kernels on these arguments. It would compile them again for other lengths, and gain no speed.
SIZES = ("N", "K", "R", "H")


@triton.jit
def tile_pointers(tensor, batch, head, index, length, H, E: tl.constexpr):
    """Return pointers (index, E) into a tensor (B, length, H, E)."""
    start = tensor + (batch.to(tl.int64) * length * H + head) * E
    return start + index[:, None] * (H * E) + tl.arange(0, E)[None, :]


@triton.jit
def load_row_info(row_info, batch, row, n_pitch):
    """Load rank, self key, position key and segment of query rows (see TritonBackend), and the range of keys that they see."""
    info = row_info + batch * 6 * n_pitch + row
    rank, self_key, position_key = tl.load(info), tl.load(info + n_pitch), tl.load(info + 2 * n_pitch)
    first, last = tl.min(tl.load(info + 4 * n_pitch)), tl.max(tl.load(info + 5 * n_pitch))
    return rank, self_key, position_key, tl.load(info + 3 * n_pitch), first, last


@triton.jit
def is_visible(query_rank, self_key, position_key, key_rank, key, max_distance, HAS_MAX_DISTANCE: tl.constexpr):
    """Return the attention mask of a tile, as AttentionMeta.visible. Arguments are broadcast along rows or keys."""
    visible = (query_rank > key_rank) | (self_key == key)
    if HAS_MAX_DISTANCE:
        visible = visible & (position_key - key <= max_distance)
    return visible


@triton.jit
def apply_dropout(
    probability, drop_mask, row, first_key, n_pitch, TRANSPOSED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr
):
    """Zero the dropped probabilities of a tile (ROWS, KEYS), or (KEYS, ROWS) if TRANSPOSED.

    A mask bit of 1 flips the sign bit of the probability, and negative numbers are then replaced by 0. nan stays nan. A selection by
    predicates or by bit masks would take more instructions.
    """
    word, shift = first_key // 32 + tl.arange(0, KEYS // 32), 31 - tl.arange(0, 32)
    if TRANSPOSED:
        words = tl.load(drop_mask + word[:, None] * n_pitch + row[None, :])
        signs = tl.reshape(words[:, None, :] << shift[None, :, None], [KEYS, ROWS])
    else:
        words = tl.load(drop_mask + word[None, :] * n_pitch + row[:, None])
        signs = tl.reshape(words[:, :, None] << shift[None, None, :], [ROWS, KEYS])
    signed = probability.to(tl.int32, bitcast=True) ^ (signs & -(2**31))
    return tl.maximum(signed.to(tl.float32, bitcast=True), 0.0, propagate_nan=tl.PropagateNan.ALL)
