"""Tile sizes of the attention kernels. `python benchmarks/gpu/tiles.py` searches for faster tiles on your GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch

# Query rows and keys are padded to a multiple of this number. It is a multiple of the size of every tile. A tile has a multiple of 32 keys,
# because a word of the dropout mask has 32 bits.
TILE_MULTIPLE = 128
MAX_HEAD_WIDTH = 256
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Tile(NamedTuple):
    """Launch configuration of a kernel.

    Attributes:
        rows: number of query rows in a tile.
        keys: number of keys in a tile, or number of distances in the kernels of positions.
        warps: number of warps of a program.
        stages: number of pipeline stages of the loop over tiles.
    """

    rows: int
    keys: int
    warps: int
    stages: int


# Each kernel has four tiles: for head widths up to 64, up to 128 and up to 256 in 16 bits, and for every head width in fp32. The tile for
# head widths up to 64 is the fastest of 18 on an H200, or within 2 % of it (reports/gpu); the others are the largest tried. Two
# conditions hold in bf16 on sm_90, with and without dropout. First, a tile spills no register. Second, it fits into 99 KB of shared
# memory, the smallest limit among GPUs of compute capability 8.x. The tiles for head widths above 128 and for fp32 (where products do
# not run on tensor cores) spill some bytes nevertheless (benchmarks/gpu/attention_registers.py).
TILES: dict[str, tuple[Tile, ...]] = {
    "draw_dropout_mask": (Tile(64, 64, 4, 1),) * 4,
    "position_scores": (Tile(64, 64, 4, 4), Tile(128, 64, 8, 2), Tile(32, 32, 4, 1), Tile(32, 32, 8, 1)),
    "attention_forward": (Tile(64, 32, 4, 3), Tile(128, 32, 8, 2), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    "backward_key_value": (Tile(64, 64, 4, 2), Tile(32, 64, 4, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    "backward_query": (Tile(64, 64, 4, 4), Tile(64, 32, 4, 2), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    "backward_position_query": (Tile(64, 64, 4, 2), Tile(64, 64, 4, 3), Tile(32, 32, 4, 1), Tile(32, 32, 8, 1)),
    "backward_position_key": (Tile(32, 128, 4, 3), Tile(64, 64, 4, 3), Tile(32, 32, 4, 1), Tile(32, 32, 8, 1)),
}


def is_supported(head_width: int, dtype: torch.dtype) -> bool:
    """Return True if the kernels support a head width and a dtype."""
    return head_width <= MAX_HEAD_WIDTH and dtype in DTYPES


def tile_index(head_width: int, dtype: torch.dtype) -> int:
    """Return the index into a line of TILES for a head width and a dtype."""
    return 3 if dtype == torch.float32 else (head_width > 64) + (head_width > 128)


def tile_for(kernel: str, head_width: int, dtype: torch.dtype) -> Tile:
    """Return the tile of a kernel for a head width and a dtype."""
    return TILES[kernel][tile_index(head_width, dtype)]
