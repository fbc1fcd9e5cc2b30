"""Tile sizes of the attention kernels, one line for each kernel. `python benchmarks/gpu/tiles.py` prints better lines for a GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch

# Rows and keys are padded to a multiple of this. All tiles divide it, and tiles of keys are multiples of 32, the bits of a mask word.
TILE_MULTIPLE = 128
MAX_HEAD_WIDTH = 256
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Tile(NamedTuple):
    """Launch configuration of a kernel.

    Attributes:
        rows: rows of a tile.
        keys: keys of a tile, or distances.
        warps: warps of a program.
        stages: pipeline stages of the loop.
    """

    rows: int
    keys: int
    warps: int
    stages: int


# One tile each for head widths up to 64, 128 and 256 in 16 bits, and one for fp32. These are the largest tiles tried that meet two
# conditions in bf16 on sm_90, with and without dropout: they spill no register, and they fit into 99 KB of shared memory, the smallest
# of compute capability 8. Head widths above 128, and fp32, whose products do not run on tensor cores, spill some bytes
# (benchmarks/gpu/attention_registers.py). One program of 8 warps fills the registers of a multiprocessor.
TILES: dict[str, tuple[Tile, ...]] = {
    "draw_dropout_mask": (Tile(64, 64, 4, 1),) * 4,
    "position_scores": (Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(32, 32, 4, 1), Tile(32, 32, 8, 1)),
    "attention_forward": (Tile(128, 64, 8, 3), Tile(128, 32, 8, 2), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    "backward_key_value": (Tile(64, 128, 8, 2), Tile(32, 64, 4, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    "backward_query": (Tile(128, 64, 8, 3), Tile(64, 32, 4, 2), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    "backward_position_query": (Tile(128, 64, 8, 3), Tile(64, 64, 4, 3), Tile(32, 32, 4, 1), Tile(32, 32, 8, 1)),
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
