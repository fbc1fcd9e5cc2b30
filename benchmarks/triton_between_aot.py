"""What the GPU kernels between the products of a layer take of a multiprocessor: as triton_aot.py, which needs no GPU.

python benchmarks/triton_between_aot.py [--width 768 1024] [--dtype bf16] [--no-dropout]

Prints a line for each kernel and width of rows: registers of a thread, how many it may have, bytes it spills, shared memory of a program,
in how many pieces of 16 bytes a thread reads and writes rows and how many that must be, and instructions for an element; ends with
status 1 if any spills, has more registers, or reads rows in smaller pieces.
"""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any

from layer_shapes import DTYPES
from triton_aot import compiled, instructions

from xlpre.model.kernels.triton import fused_ops_kernels
from xlpre.model.kernels.triton.fused_ops import BLOCK, LANES, cut

KERNELS = ("add_norm", "differentiate_add_norm", "gelu", "differentiate_gelu")
# of a thread at rows up to 1,024 in 16 bits: the most that triton 3.6 and 3.7 take, in eights, and one eight more
REGISTERS = {"add_norm": 136, "differentiate_add_norm": 160, "gelu": 72, "differentiate_gelu": 72}
TYPES = {"seed": "*i64", "eps": "fp32", "grown": "fp32"}
TYPES |= dict.fromkeys(("N", "n", "n_groups", "threshold"), "i32") | dict.fromkeys(("mean", "rstd"), "*fp32")


def line(name: str, width: int, dtype: str, dropout: bool, capability: int) -> tuple[str, bool]:
    """What is said of a kernel, and whether it is as it should be."""
    kernel = getattr(fused_ops_kernels, name)
    constants: dict[str, Any] = {"BLOCK": BLOCK, "LANES": LANES}
    warps, elements = 4, BLOCK * LANES
    if "norm" in name:
        constants = cut(width, dropout)
        warps, elements = constants.pop("num_warps"), constants["WIDTH"] * LANES
        if not dropout:
            constants |= {key: None for key in ("seed", "d_branch") if key in kernel.arg_names}
    sums = dict.fromkeys(("d_weight", "d_bias"), "*fp32")
    types = {key: (TYPES | sums).get(key, f"*{dtype}") for key in kernel.arg_names}
    found = compiled(kernel, types, constants, warps, 3, capability)
    n_instructions = len(instructions(found.code))
    most = REGISTERS[name] if width <= 1024 and dtype != "fp32" else 255
    wide = len(re.findall(r"(?:ld|st)\.global\S*\.v4", found.ptx))
    tensors = {"add_norm": 4, "differentiate_add_norm": 3 + dropout, "gelu": 2, "differentiate_gelu": 3}[name]
    needed = tensors * elements // (32 * warps) * DTYPES[dtype].itemsize // 16
    text = f"{name:24}{width:>6} {warps:>5} {found.registers:>9} {most:>7} {found.spilled:>7} {found.shared:>7} "
    text += f"{wide:>4} of {needed:<3} {n_instructions * 32 * warps / elements:>8.1f}"
    return text, found.spilled == 0 and found.registers <= most and wide >= needed


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--width", type=int, nargs="+", default=[256, 768, 1024, 2048, 4096])
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--no-dropout", action="store_true")
    parser.add_argument("--capability", type=int, default=90)
    given = parser.parse_args()
    print(f"{'kernel':24}{'width':>6} warps registers allowed spilled  shared 16 bytes instructions an element")
    right = True
    for name in KERNELS[:2] if given.no_dropout else KERNELS:
        for width in given.width if "norm" in name else given.width[:1]:
            text, good = line(name, width, given.dtype, not given.no_dropout, given.capability)
            print(text, flush=True)
            right &= good
    sys.exit(not right)


if __name__ == "__main__":
    main()
