"""What kernels of relative attention for GPUs have in common; triton_forward.py and triton_backward.py are made of it.

A program takes one tile of rows (or of keys, or of distances) of one head of one batch row. Tensors of rows are (B, N, H, E), of keys
(B, K, H, E), numbers of rows (B, H, N); what is (B, H, N, K) has lines of k_pitch numbers. `row_facts` (B, 6, n_pitch) and `key_facts`
(B, 4, k_pitch) are what Prepared says they are, of the N rows of a panel. No kernel adds into what another program writes: the same
input gives the same output.

The bias of the tile after is loaded while a tile is computed (`ahead`): Triton itself loads ahead only what goes into a product, and
waited for the bias at the top of each turn.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)  # probabilities are powers of two: exp(x) = 2 ** (x * LOG2E)
RANDOM_ROUNDS = tl.constexpr(7)  # of Philox4x32: the fewest that pass every test (Salmon et al. 2011, table 2)
# knowing that 16 divides one makes no kernel better, and each model and length compile anew
SIZES = ("N", "K", "R", "H")


@triton.jit
def _tile(tensor, batch, head, index, length, H, E: tl.constexpr):
    """Pointers (index, E) into a tensor (B, length, H, E)."""
    start = tensor + (batch.to(tl.int64) * length * H + head) * E
    return start + index[:, None] * (H * E) + tl.arange(0, E)[None, :]


@triton.jit
def _facts(row_facts, batch, row, n_pitch):
    """Of rows: rank, column of the own key, column, segment; of their granule: first and last key."""
    facts = row_facts + batch * 6 * n_pitch + row
    rank, own, column = tl.load(facts), tl.load(facts + n_pitch), tl.load(facts + 2 * n_pitch)
    first, last = tl.min(tl.load(facts + 4 * n_pitch)), tl.max(tl.load(facts + 5 * n_pitch))
    return rank, own, column, tl.load(facts + 3 * n_pitch), first, last


@triton.jit
def _sees(query_rank, own, column, key_rank, key, reach, LIMITED: tl.constexpr):
    """Geometry.visible of a tile; its operands stand as rows or as columns."""
    seen = (query_rank > key_rank) | (own == key)
    if LIMITED:
        seen = seen & (column - key <= reach)
    return seen


@triton.jit
def _undropped(
    probability, dropped, row, first_key, n_pitch, TURNED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr
):
    """What dropout leaves of a tile (ROWS, KEYS), or (KEYS, ROWS) if TURNED.

    A bit that `draw` drew becomes a sign, and what is negative 0: a choice by conditions would take more instructions, as there are few
    registers for conditions.
    """
    word, sign = first_key // 32 + tl.arange(0, KEYS // 32), 31 - tl.arange(0, 32)
    if TURNED:
        words = tl.load(dropped + word[:, None] * n_pitch + row[None, :])
        signs = tl.reshape(words[:, None, :] << sign[None, :, None], [KEYS, ROWS])
    else:
        words = tl.load(dropped + word[None, :] * n_pitch + row[:, None])
        signs = tl.reshape(words[:, :, None] << sign[None, None, :], [ROWS, KEYS])
    signed = probability.to(tl.int32, bitcast=True) ^ (signs & -(2**31))
    return tl.maximum(signed.to(tl.float32, bitcast=True), 0.0)
