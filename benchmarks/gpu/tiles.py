"""Search for the fastest tile of each attention kernel on this GPU.

A tile has the rows and keys that a program of a kernel computes at a time, its warps and its pipeline stages.

python benchmarks/gpu/tiles.py [--kernels attention_forward backward_query] [--dropout 0.1] [--seconds 90]

The shape is that of benchmarks/speed/attention.py. First, worker processes compile each kernel in parallel with each tile of
`candidate_tiles`, which takes longer than the timing. Tiles that are not compiled after --seconds are skipped. Then this process times
each kernel alone with each compiled tile. A tile fails if its output differs from that of the current tile, which is the tile in
xlpre/model/kernels/triton/tiles.py. Under TRITON_INTERPRET=1 with --device cpu, times are meaningless.

Prints one JSON line for each kernel: the median milliseconds of the current tile, of the fastest tile and of all tiles that ran; the
errors of the tiles that failed; and the line to write into tiles.py to use the fastest tile.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from benchmarks.common.layer_shapes import DTYPES, add_shape_arguments
from xlpre.model.kernels.backend import load_triton
from xlpre.model.kernels.selfcheck.fixtures import attention_case, random_attention_meta, random_attention_tensors
from xlpre.model.kernels.triton.launch import KernelLauncher
from xlpre.model.kernels.triton.tiles import TILES, Tile, tile_index

OUTPUTS = {
    "draw_dropout_mask": ("drop_mask",),
    "position_scores": ("bias",),
    "attention_forward": ("out", "lse"),
    "backward_key_value": ("d_key", "d_value"),
    "backward_query": ("d_query", "d_segment_score"),
    "backward_position_query": ("d_query",),
    "backward_position_key": ("d_pos_key",),
}
TOLERANCE = 1e-2  # relative error of an output; tiles differ in the order of their sums
recorded: dict[str, RecordedCall] = {}  # launches of this process by kernel


class RecordedCall:
    """A kernel launch that can be repeated.

    Args:
        launcher: launcher of the kernel.
        kernel: name of the kernel.
        tiled: the dimension that tiles divide; see KernelLauncher.launch.
        args: arguments of the launch.
    """

    def __init__(self, launcher: KernelLauncher, kernel: str, tiled: str, args: dict[str, Any]) -> None:
        self._launcher, self._kernel, self._tiled, self.args = launcher, kernel, tiled, args
        self.initial_bias: Tensor | None = None  # set for a kernel that overwrites its argument `bias`

    def run(self, tile: Tile) -> None:
        """Launch the kernel with a tile."""
        with patch.dict(TILES, {self._kernel: (tile,) * 4}):
            self._launcher.launch(self._kernel, self._tiled, **self.args)

    def outputs(self, tile: Tile) -> list[Tensor]:
        """Launch the kernel with a tile and return its output tensors. Elements that it does not write are nan, or 0 in integer tensors."""
        tensors = [self.args[name] for name in OUTPUTS[self._kernel] if self.args[name] is not None]
        for tensor in tensors:
            tensor.fill_(torch.nan if tensor.is_floating_point() else 0)
        self._restore_bias()
        self.run(tile)
        return [tensor.clone() for tensor in tensors]

    def median_ms(self, tile: Tile, repeats: int) -> float:
        """Return the median milliseconds of `repeats` launches, after three launches to warm up."""
        on_gpu = any(x.is_cuda for x in self.args.values() if isinstance(x, Tensor))
        samples = []
        for _ in range(repeats + 3):
            self._restore_bias()
            samples.append(milliseconds(lambda: self.run(tile), on_gpu))
        return round(statistics.median(samples[3:]), 4)

    def _restore_bias(self) -> None:
        if self.initial_bias is not None:
            self.args["bias"].copy_(self.initial_bias)


def milliseconds(function: Callable[[], None], on_gpu: bool) -> float:
    """Call a function, and return the milliseconds that it takes on the GPU, or on the CPU without one."""
    if not on_gpu:
        start = time.perf_counter()
        function()
        return 1e3 * (time.perf_counter() - start)
    start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(
        1_000_000
    )  # cycles; the kernel is queued meanwhile, so that the time of its launch is not included
    start_event.record()
    function()
    end_event.record()
    end_event.synchronize()
    return start_event.elapsed_time(end_event)


def record_calls(args: argparse.Namespace) -> None:
    """Run a forward and a backward pass of attention, and keep the launch of each kernel in `recorded`."""
    torch.manual_seed(0)
    attn_meta = random_attention_meta(args.rows, args.window, args.memory, args.targets, args.device)
    tensors = random_attention_tensors(attn_meta, args.heads, args.width, DTYPES[args.dtype])
    case, launch = attention_case(load_triton(), attn_meta, tensors), KernelLauncher.launch

    def recording_launch(launcher: KernelLauncher, kernel: str, tiled: str, **kernel_args: Any) -> None:
        recorded.setdefault(kernel, RecordedCall(launcher, kernel, tiled, kernel_args))
        launch(launcher, kernel, tiled, **kernel_args)

    with patch.object(KernelLauncher, "launch", recording_launch):
        out = case.output(args.dropout)
        case.gradients(out, torch.randn_like(out))
    recorded["backward_query"].initial_bias = recorded["position_scores"].args["bias"]


def candidate_tiles(kernel: str) -> list[Tile]:
    """Return the tiles to try. Larger tiles would spill registers, as attention_registers.py shows."""
    sizes = [(64, 64, 4), (64, 32, 4), (128, 32, 4), (128, 64, 8), (128, 32, 8), (64, 64, 8)]
    if kernel in ("backward_key_value", "backward_position_key"):  # these kernels loop over rows instead of keys
        sizes = [(rows, keys, warps) for keys, rows, warps in sizes]
    return [Tile(*size, stages) for size, stages in itertools.product(sizes, (2, 3, 4))]


def compile_tile(kernel: str, tile: Tile) -> str:
    """Compile a kernel with a tile and run it once. Return the text of the error, or an empty string on success."""
    try:
        recorded[kernel].outputs(tile)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    return ""


def compile_tiles(kernels: list[str], args: argparse.Namespace) -> dict[str, dict[Tile, str]]:
    """Compile the candidate tiles of each kernel until the time limit.

    Returns:
        For each kernel, the error of each tile that was tried; an empty string if it compiled.
    """
    candidates = {kernel: candidate_tiles(kernel)[: args.max_tiles] for kernel in kernels}
    if not args.workers:
        return {kernel: {tile: compile_tile(kernel, tile) for tile in tiles} for kernel, tiles in candidates.items()}
    errors: dict[str, dict[Tile, str]] = {kernel: {} for kernel in kernels}
    end = time.monotonic() + args.seconds
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.workers, spawn, record_calls, (args,)) as pool:
        in_turns = itertools.zip_longest(*([(kernel, tile) for tile in tiles] for kernel, tiles in candidates.items()))
        jobs = {pool.submit(compile_tile, *job): job for turn in in_turns for job in turn if job}
        done, late = wait(jobs, timeout=end - time.monotonic())
        for job in late:
            job.cancel()
        for job in done:
            kernel, tile = jobs[job]
            errors[kernel][tile] = job.result() if job.exception() is None else str(job.exception())[:200]
    return errors


def compare_tiles(kernel: str, errors: dict[Tile, str], args: argparse.Namespace) -> dict[str, Any]:
    """Check and time the tiles of a kernel that compiled, and return the JSON line to print."""
    call, index = recorded[kernel], tile_index(args.width, DTYPES[args.dtype])
    current = TILES[kernel][index]
    expected, times = call.outputs(current), {current: call.median_ms(current, args.repeats)}
    failed = {tile: error for tile, error in errors.items() if error}
    for tile in errors.keys() - failed.keys() - {current}:
        error = max(
            ((x.float() - y.float()).nan_to_num().norm() / y.float().nan_to_num().norm()).item()
            + 1.0 * (x.isnan() != y.isnan()).any().item()
            for x, y in zip(call.outputs(tile), expected, strict=True)
        )
        if error <= TOLERANCE:
            times[tile] = call.median_ms(tile, args.repeats)
        else:
            failed[tile] = f"different output, relative error {error:.2g}"
    best = min(times, key=times.__getitem__)
    line = [best if i == index else tile for i, tile in enumerate(TILES[kernel])]
    return {
        "kernel": kernel,
        "current": current,
        "current_ms": times[current],
        "best": best,
        "best_ms": times[best],
        "tiles": [[tile, ms] for tile, ms in sorted(times.items(), key=lambda item: item[1])],
        "failed": [[tile, error] for tile, error in failed.items()],
        "line": f'"{kernel}": ({", ".join(f"Tile{tuple(tile)}" for tile in line)}),',
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shape_arguments(parser)
    parser.add_argument("--kernels", nargs="+", choices=TILES, default=list(TILES))
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--workers", type=int, default=12, help="processes that compile; 0: compile in this process")
    parser.add_argument("--seconds", type=float, default=90.0, help="time limit for compilation")
    parser.add_argument("--max-tiles", type=int, help="tiles to try for each kernel; default: all")
    args = parser.parse_args()
    record_calls(args)
    kernels = [kernel for kernel in args.kernels if kernel in recorded]  # without dropout, no mask is drawn
    for kernel, errors in compile_tiles(kernels, args).items():
        print(json.dumps({**compare_tiles(kernel, errors, args), "shape": vars(args)}), flush=True)


if __name__ == "__main__":
    main()
