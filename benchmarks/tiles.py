"""Which cut of each GPU kernel of attention is the fastest on this GPU.

python benchmarks/tiles.py [--kernels attend differentiate_rows] [--dropout 0.1] [--seconds 90]

The shape is that of kernels.py. Each kernel is run alone, cut in each way of `cuts`, and must write what it writes as it is cut now.
Workers compile first, because that takes longer than all else; what is not compiled after --seconds is left out. One JSON line for each
kernel: milliseconds (medians) of the tile that stands in xlpre/model/kernels/triton/tiles.py, of the fastest and of all others that ran,
why others did not, and what to write into that file. Under TRITON_INTERPRET=1 with --device cpu times mean nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, wait
from typing import Any
from unittest.mock import patch

import torch
from layer_shapes import DTYPES, add_shape
from torch import Tensor

from xlpre.model.kernels.backend import with_triton
from xlpre.model.kernels.selfcheck.fixtures import attention_case, geometry_of, tensors_of
from xlpre.model.kernels.triton.launch import KERNELS, Launch
from xlpre.model.kernels.triton.tiles import TILES, Tile, column_of

WRITTEN = {"score_places": ("bias",), "attend": ("out", "log_total"), "differentiate_keys": ("d_key", "d_value")}
WRITTEN |= {"differentiate_rows": ("d_query", "d_step"), "differentiate_place_queries": ("d_query",)}
WRITTEN |= {"differentiate_place_keys": ("d_place_keys",), "draw": ("dropped",)}
NEAR = 1e-2  # the norm of a difference over the norm; sums in another order
recorded: dict[str, Recorded] = {}  # of this process


class Recorded:
    """A call of a kernel that can be made again."""

    def __init__(self, launch: Launch, words: tuple[Any, ...]) -> None:
        self._launch, self._words, self._kernel = launch, words, words[1]
        names = KERNELS[self._kernel].arg_names
        self.named = dict(zip(names, words[2:], strict=False))
        self.original: Tensor | None = None  # what the bias was, where the call overwrites it

    def run(self, tile: Tile) -> None:
        """Once, cut so."""
        with patch.dict(TILES, {self._kernel: (tile,) * 4}):
            self._launch.call(*self._words)

    def written(self, tile: Tile) -> list[Tensor]:
        """What it writes; nan, or 0 of integers, where it writes nothing."""
        of = [self.named[name] for name in WRITTEN[self._kernel] if self.named[name] is not None]
        for tensor in of:
            tensor.fill_(torch.nan if tensor.is_floating_point() else 0)
        self._restore()
        self.run(tile)
        return [tensor.clone() for tensor in of]

    def time(self, tile: Tile, repeats: int) -> float:
        """Milliseconds, the median; on a processor of little meaning."""
        took = []
        for _ in range(repeats + 3):
            self._restore()
            took.append(_milliseconds(lambda: self.run(tile), self._words[2].is_cuda))
        return round(statistics.median(took[3:]), 4)

    def _restore(self) -> None:
        if self.original is not None:
            self.named["bias"].copy_(self.original)


def _milliseconds(work: Callable[[], None], on_gpu: bool) -> float:
    if not on_gpu:
        begun = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - begun)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1_000_000)  # clock cycles, in which the kernel is put behind, so that its launch is not timed
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def record(given: argparse.Namespace) -> None:
    """Make one forward and backward, and keep the calls."""
    torch.manual_seed(0)
    attn_meta = geometry_of(given.rows, given.window, given.memory, given.targets, given.device)
    layer = attention_case(with_triton(), attn_meta, tensors_of(attn_meta, given.heads, given.width, DTYPES[given.dtype]))
    call = Launch.call

    def kept(launch: Launch, *words: Any) -> None:
        recorded.setdefault(words[1], Recorded(launch, words))
        call(launch, *words)

    with patch.object(Launch, "call", kept):
        out = layer.output(given.dropout)
        layer.differentiate(out, torch.randn_like(out))
    recorded["differentiate_rows"].original = recorded["score_places"].named["bias"]


def cuts(kernel: str) -> list[Tile]:
    """Tiles worth a try: larger ones spill (triton_aot.py)."""
    sizes = [(64, 64, 4), (64, 32, 4), (128, 32, 4), (128, 64, 8), (128, 32, 8), (64, 64, 8)]
    if kernel in ("differentiate_keys", "differentiate_place_keys"):  # which keep keys and go over rows
        sizes = [(rows, keys, warps) for keys, rows, warps in sizes]
    return [Tile(*size, stages) for size, stages in itertools.product(sizes, (2, 3, 4))]


def tried(kernel: str, tile: Tile) -> str:
    """Compile it and run it once, in a worker; why it cannot be."""
    try:
        recorded[kernel].written(tile)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    return ""


def compiled(kernels: list[str], given: argparse.Namespace) -> dict[str, dict[Tile, str]]:
    """For each kernel the tiles that were tried in time, and why some failed."""
    found: dict[str, dict[Tile, str]] = {kernel: {} for kernel in kernels}
    if not given.workers:
        return {kernel: {tile: tried(kernel, tile) for tile in cuts(kernel)[: given.most]} for kernel in kernels}
    until = time.monotonic() + given.seconds
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.workers, spawn, record, (given,)) as pool:
        by_turns = itertools.zip_longest(*([(k, tile) for tile in cuts(k)[: given.most]] for k in kernels))
        jobs = {pool.submit(tried, *job): job for turn in by_turns for job in turn if job}
        done, late = wait(jobs, timeout=until - time.monotonic())
        for job in late:
            job.cancel()
        for job in done:
            kernel, tile = jobs[job]
            found[kernel][tile] = job.result() if job.exception() is None else str(job.exception())[:200]
    return found


def line_of(kernel: str, tiles: dict[Tile, str], given: argparse.Namespace) -> dict[str, Any]:
    """What was found."""
    call, column = recorded[kernel], column_of(given.width, DTYPES[given.dtype])
    now = TILES[kernel][column]
    expected, times = call.written(now), {now: call.time(now, given.repeats)}
    failed = {tile: why for tile, why in tiles.items() if why}
    for tile in tiles.keys() - failed.keys() - {now}:
        off = [
            ((x.float() - y.float()).nan_to_num().norm() / y.float().nan_to_num().norm()).item()
            + 1.0 * (x.isnan() != y.isnan()).any().item()
            for x, y in zip(call.written(tile), expected, strict=True)
        ]
        if max(off) <= NEAR:
            times[tile] = call.time(tile, given.repeats)
        else:
            failed[tile] = f"writes something else, off by {max(off):.2g}"
    best = min(times, key=times.__getitem__)
    line = [best if i == column else tile for i, tile in enumerate(TILES[kernel])]
    return {
        "kernel": kernel,
        "now": now,
        "now_ms": times[now],
        "best": best,
        "best_ms": times[best],
        "tiles": [[tile, ms] for tile, ms in sorted(times.items(), key=lambda item: item[1])],
        "failed": [[tile, why] for tile, why in failed.items()],
        "write": f'"{kernel}": ({", ".join(f"Tile{tuple(tile)}" for tile in line)}),',
    }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shape(parser)
    parser.add_argument("--kernels", nargs="+", choices=TILES, default=list(TILES))
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--workers", type=int, default=12, help="that compile; 0: this process does")
    parser.add_argument("--seconds", type=float, default=90.0, help="for compiling")
    parser.add_argument("--most", type=int, help="tiles of a kernel, the first; else all")
    given = parser.parse_args()
    record(given)
    kernels = [kernel for kernel in given.kernels if kernel in recorded]  # without dropout nothing is drawn
    for kernel, tiles in compiled(kernels, given).items():
        print(json.dumps({**line_of(kernel, tiles, given), "shape": vars(given)}), flush=True)


if __name__ == "__main__":
    main()
