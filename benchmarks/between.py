"""What stands between the products of a layer, by one GPU kernel each: whether it agrees with torch, and how long it takes.

python benchmarks/between.py [--rows 19104] [--width 1024] [--dropout 0.1]

Dropout, sum and norm of rows, and GELU and dropout of rows four times as wide, on random data; the rows of 32 sequences of XLNet-Large if
nothing is said. Two JSON lines for each contender and work, of numbers and then of times:

- `kernel`: how far it is from torch's operators in twice the precision, the norm of the difference over the norm, for the output and every
  gradient, without dropout; and whether two turns with dropout give the same bits;
- milliseconds of forward and backward, medians of turns that contenders take one after the other; what that is in gigabytes a second if
  each number that must be read or written is once; and how long against `eager`, torch operator by operator. `compiled` is torch.compile's.

Status 1 if a kernel is farther off than the trial allows, or anything fails. Needs a GPU, or TRITON_INTERPRET=1 for tiny sizes.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch
from kernels import of_layer, race
from layer_shapes import DTYPES

from xlpre.model.kernels.selfcheck.fixtures import apart
from xlpre.model.kernels.selfcheck.fused_fixtures import WORKS, FusedCase, exact_of, kernel_of, tensors_between
from xlpre.model.kernels.selfcheck.selfcheck import TOLERANCE

PASSES = {"norm": (4, 4), "gelu": (2, 3)}  # tensors of rows that must be read or written, forward and backward


def agreement(kernel: FusedCase, work: str, weights: torch.Tensor, dropout: float) -> dict[str, Any]:
    """What a line says of the numbers."""
    off_by = apart(kernel.all(weights), exact_of(work, kernel.tensors).all(weights))
    first, second = (kernel.all(weights, dropout) for _ in range(2))
    same = all(torch.equal(first[name], second[name]) for name in first)
    return {
        "off_by": off_by,
        "same_bits": same,
        "agrees": same and all(x <= TOLERANCE[weights.dtype] for x in off_by.values()),
    }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32 * 597)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=20, help="0 does not time")
    parser.add_argument("--no-compiled", action="store_true", help="without torch.compile")
    given = parser.parse_args()
    torch.manual_seed(0)
    right = True
    for work, passes in PASSES.items():
        tensors = tensors_between(work, given.rows, given.width, DTYPES[given.dtype], given.device)
        weights = torch.randn_like(next(iter(tensors.values())))
        works = {"eager": WORKS[work], "compiled": torch.compile(WORKS[work], dynamic=False), "kernel": kernel_of(work)}
        if given.no_compiled:
            del works["compiled"]
        ready = {name: FusedCase(tensors, contender) for name, contender in works.items()}
        found = agreement(ready["kernel"], work, weights, given.dropout)
        right &= found["agrees"]
        say(work, "kernel", found, given)
        turns = {name: of_layer(contender, weights, given.dropout) for name, contender in ready.items()}
        for name, line in (race(turns, given.device, given.repeats, "eager") if given.repeats else {}).items():
            for n_tensors, way in zip(passes, ("forward", "backward"), strict=True):
                line[f"{way}_gb_s"] = round(n_tensors * weights.nbytes / 1e6 / line[f"{way}_ms"], 1)
            say(work, name, line, given)
    sys.exit(not right)


def say(work: str, name: str, line: dict[str, Any], given: argparse.Namespace) -> None:
    """A line."""
    print(json.dumps({"between": work, "contender": name, **line, "shape": vars(given)}), flush=True)


if __name__ == "__main__":
    main()
