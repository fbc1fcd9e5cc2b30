"""Memory and time of one layer's attention as the window grows, forward and backward, by each backend.

python benchmarks/gpu/window_length.py [--windows 512 1024 2048 4096 8192] [--rows 4] [--dropout 0.1]

Heads of XLNet-Large, two streams; memory and targets grow with the window. One JSON line for each window and backend: milliseconds, the
last of three turns, and the peak memory of a turn in MiB (of a GPU; a processor does not tell); none of them where that does not fit.
No numbers are compared (kernels.py does).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from benchmarks.kernels import of_layer, on_cpu, on_gpu
from benchmarks.layer_shapes import DTYPES
from xlpre.model.kernels.backend import backend_named
from xlpre.model.kernels.selfcheck.fixtures import attention_case, geometry_of, tensors_of


def line_of(backend: str, window: int, given: argparse.Namespace) -> dict[str, object]:
    """What is said of a backend at a window."""
    torch.manual_seed(0)
    attn_meta = geometry_of(given.rows, window, window * 3 // 4, window // 6, given.device)
    tensors = tensors_of(attn_meta, given.heads, given.width, DTYPES[given.dtype])
    weights = torch.randn(*attn_meta.query_rank.shape, given.heads, given.width, device=given.device)
    forward = of_layer(attention_case(backend_named(backend), attn_meta, tensors), weights, given.dropout)
    for _ in range(3):
        found = on_cpu(forward) if given.device == "cpu" else on_gpu(forward)
    forward_ms, backward_ms, mb = found
    return {"forward_ms": round(forward_ms, 3), "backward_ms": round(backward_ms, 3), "mb": mb and round(mb)}


def main() -> None:
    """See the module."""
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
    given = parser.parse_args()
    for backend in given.backends:
        for window in given.windows:
            try:
                line = line_of(backend, window, given)
            except torch.cuda.OutOfMemoryError:
                line = {"out_of_memory": True}
            print(json.dumps({"attention": backend, "window": window, "rows": given.rows, **line}), flush=True)


if __name__ == "__main__":
    main()
