"""How the GPU kernels of attention are cut: one line a kernel, to be replaced by what `python benchmarks/tiles.py` finds faster."""

from __future__ import annotations

from typing import NamedTuple

import torch

GRANULE = 128  # rows and keys are padded to a multiple of it; every tile divides it, those of keys in whole words of 32
WIDEST = 256
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Tile(NamedTuple):
    """How a kernel is cut.

    Attributes:
        rows: of a tile,
        keys: of it, or distances.
        warps: of a program.
        stages: tiles that are loaded ahead.
    """

    rows: int
    keys: int
    warps: int
    stages: int


# For heads up to 64, 128 and 256 wide, and for fp32: the largest tiles tried that spill no register on sm_90 in bf16, with and without
# dropout, and take less than the 99 KB of shared memory that the smallest GPUs of compute capability 8 have; heads wider than 128, and
# fp32, whose products run outside tensor cores, spill some bytes (benchmarks/triton_aot.py). One program of 8 warps then fills a
# multiprocessor's registers.
TILES: dict[str, tuple[Tile, ...]] = {
    "draw": (Tile(64, 64, 4, 1),) * 4,
    "score_places": (Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(32, 32, 4, 1), Tile(32, 32, 8, 1)),
    "attend": (Tile(128, 64, 8, 3), Tile(128, 32, 8, 2), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    "differentiate_keys": (Tile(64, 128, 8, 2), Tile(32, 64, 4, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    "differentiate_rows": (Tile(128, 64, 8, 3), Tile(64, 32, 4, 2), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    "differentiate_place_queries": (Tile(128, 64, 8, 3), Tile(64, 64, 4, 3), Tile(32, 32, 4, 1), Tile(32, 32, 8, 1)),
    "differentiate_place_keys": (Tile(32, 128, 4, 3), Tile(64, 64, 4, 3), Tile(32, 32, 4, 1), Tile(32, 32, 8, 1)),
}


def computes(width: int, dtype: torch.dtype) -> bool:
    """Whether the kernels are for heads of `width` in `dtype`."""
    return width <= WIDEST and dtype in DTYPES


def column_of(width: int, dtype: torch.dtype) -> int:
    """Which entry of a line is for heads of `width`."""
    return 3 if dtype == torch.float32 else (width > 64) + (width > 128)


def tile_of(kernel: str, width: int, dtype: torch.dtype) -> Tile:
    """The tile of a kernel for heads of `width`."""
    return TILES[kernel][column_of(width, dtype)]
