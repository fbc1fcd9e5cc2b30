"""Compare the fused add-norm and GELU-dropout kernels with torch's operators: errors and time.

python benchmarks/gpu/fused_ops.py [--rows 19104] [--width 1024] [--dropout 0.1]

The input is random. Its default shape is that of 32 sequences of XLNet-Large, both streams. There are three contenders: `eager` runs
torch's operators one by one, `compiled` uses torch.compile, and `kernel` is the fused kernel. Prints JSON lines for each operation:

- For `kernel`: relative errors of the output and of each gradient, without dropout, compared with torch's operators in the next higher
  precision; and whether two runs with dropout give the same bits.
- For each contender: median milliseconds of a forward and a backward pass, the gigabytes per second that result if each number is read
  or written only once, and the time relative to `eager`. The contenders take turns.

The exit status is 1 if an error exceeds the tolerance of the self-check, if two runs differ, or if a contender fails. The command needs
a GPU; tiny sizes also run under TRITON_INTERPRET=1.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from benchmarks.common.layer_shapes import DTYPES
from benchmarks.speed.attention import run_of_case, time_in_turns
from xlpre.model.kernels.selfcheck.fixtures import (
    FUSED_OPS,
    FusedCase,
    exact_fused_case,
    fused_kernel,
    random_fused_tensors,
    relative_error,
)
from xlpre.model.kernels.selfcheck.selfcheck import TOLERANCE

# numbers of tensors of the input's size that the forward and the backward pass read or write; the latter writes one more with dropout
# before add_norm
N_TENSORS = {"add_norm": (4, 3), "gelu_dropout": (2, 3)}


def check_numbers(kernel: FusedCase, op: str, d_output: torch.Tensor, dropout: float) -> dict[str, Any]:
    """Return the errors of a kernel compared with torch's operators, and whether two runs with dropout give the same bits."""
    errors = relative_error(kernel.run(d_output), exact_fused_case(op, kernel.tensors).run(d_output))
    first, second = (kernel.run(d_output, dropout) for _ in range(2))
    reproducible = all(torch.equal(first[name], second[name]) for name in first)
    agrees = reproducible and all(x <= TOLERANCE[d_output.dtype] for x in errors.values())
    return {"errors": errors, "reproducible": reproducible, "agrees": agrees}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32 * 597)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=20, help="timed turns; 0 skips timing")
    parser.add_argument("--no-compiled", action="store_true", help="do not run the contender `compiled`")
    args = parser.parse_args()
    torch.manual_seed(0)
    passed = True
    for op, (n_forward, n_backward) in N_TENSORS.items():
        n_tensors = (n_forward, n_backward + (op == "add_norm" and args.dropout > 0))
        tensors = random_fused_tensors(op, args.rows, args.width, DTYPES[args.dtype], args.device)
        d_output = torch.randn_like(next(iter(tensors.values())))
        functions = {"eager": FUSED_OPS[op], "compiled": torch.compile(FUSED_OPS[op], dynamic=False)}
        functions["kernel"] = fused_kernel(op)
        if args.no_compiled:
            del functions["compiled"]
        cases = {name: FusedCase(tensors, function) for name, function in functions.items()}
        line = check_numbers(cases["kernel"], op, d_output, args.dropout)
        passed &= line["agrees"]
        print_line(op, "kernel", line, args)
        runs = {name: run_of_case(case, d_output, args.dropout) for name, case in cases.items()}
        for name, line in (time_in_turns(runs, args.device, args.repeats, "eager") if args.repeats else {}).items():
            for n, direction in zip(n_tensors, ("forward", "backward"), strict=True):
                line[f"{direction}_gb_s"] = round(n * d_output.nbytes / 1e6 / line[f"{direction}_ms"], 1)
            print_line(op, name, line, args)
    sys.exit(not passed)


def print_line(op: str, name: str, line: dict[str, Any], args: argparse.Namespace) -> None:
    print(json.dumps({"fused_op": op, "contender": name, **line, "shape": vars(args)}), flush=True)


if __name__ == "__main__":
    main()
