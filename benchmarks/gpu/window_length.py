"""Time and memory of one layer's attention, forward and backward, by window length and backend.

python benchmarks/gpu/window_length.py [--windows 512 1024 2048 4096 8192] [--rows 4] [--dropout 0.1]

The shape is that of XLNet-Large with two streams. XLNet's recurrent memory and the number of targets grow with the window. Prints one
JSON line for each window and backend: milliseconds of the last of three runs and, on a GPU, its peak memory in MiB; or `out_of_memory`.
Results are not checked here; benchmarks/speed/attention.py checks them.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from benchmarks.common.layer_shapes import DTYPES
from benchmarks.speed.attention import run_of_case, time_on_cpu, time_on_gpu
from xlpre.model.kernels.backend import load_backend
from xlpre.model.kernels.selfcheck.fixtures import attention_case, random_attention_meta, random_attention_tensors


def measure(backend: str, window: int, args: argparse.Namespace) -> dict[str, object]:
    """Run a backend three times with a window. Return time and peak memory of the last run."""
    torch.manual_seed(0)
    attn_meta = random_attention_meta(args.rows, window, window * 3 // 4, window // 6, args.device)
    tensors = random_attention_tensors(attn_meta, args.heads, args.width, DTYPES[args.dtype])
    d_output = torch.randn(*attn_meta.query_rank.shape, args.heads, args.width, device=args.device)
    forward = run_of_case(attention_case(load_backend(backend), attn_meta, tensors), d_output, args.dropout)
    for _ in range(3):
        forward_ms, backward_ms, peak = time_on_cpu(forward) if args.device == "cpu" else time_on_gpu(forward)
    return {
        "forward_ms": round(forward_ms, 3),
        "backward_ms": round(backward_ms, 3),
        "peak_mib": peak and round(peak),
    }


def main() -> None:
    has_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--backends", nargs="+", default=["triton", "sdpa"])
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--device", default="cuda" if has_gpu else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16" if has_gpu else "fp32")
    args = parser.parse_args()
    for backend in args.backends:
        for window in args.windows:
            try:
                line = measure(backend, window, args)
            except torch.cuda.OutOfMemoryError:
                line = {"out_of_memory": True}
            print(json.dumps({"attention": backend, "window": window, "rows": args.rows, **line}), flush=True)


if __name__ == "__main__":
    main()
