"""Compile and assemble the fused kernels for sm_90, and print their registers and shared memory. This needs no GPU.

python benchmarks/gpu/fused_ops_registers.py [--width 768 1024] [--dtype bf16] [--no-dropout]

Prints one line for each kernel and row width:

    registers, budget   registers per thread, and the most that the kernel may use
    spilled, shared     spilled bytes per thread, and bytes of shared memory per program
    vectors             A of B: a thread reads or writes A vectors of 16 bytes; B vectors are needed for its elements
    instructions        instructions of all threads, per element

The exit status is 1 if a kernel spills, exceeds its budget, or accesses some elements in smaller vectors than 16 bytes.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from benchmarks.common.layer_shapes import DTYPES
from benchmarks.gpu.attention_registers import MAX_REGISTERS, assemble_kernel, instructions
from xlpre.model.kernels.triton import fused_ops_kernels
from xlpre.model.kernels.triton.fused_ops import BLOCK, PHILOX_OUTPUTS, add_norm_config

KERNELS = ("add_norm_forward", "add_norm_backward", "gelu_dropout_forward", "gelu_dropout_backward")
# Budgets: registers per thread for rows of up to 1,024 elements in 16 bits. A budget is what triton 3.6 or 3.7 needs (the larger),
# rounded up to a multiple of 8, plus 8.
REGISTERS = {
    "add_norm_forward": 136,
    "add_norm_backward": 160,
    "gelu_dropout_forward": 72,
    "gelu_dropout_backward": 72,
}
TYPES = {"seed": "*i64", "eps": "fp32", "dropout_scale": "fp32"}
TYPES |= dict.fromkeys(("N", "n", "n_groups", "drop_level"), "i32")
TYPES |= dict.fromkeys(("mean", "rstd", "d_weight", "d_bias"), "*fp32")


def check_kernel(name: str, width: int, dtype: str, has_dropout: bool, capability: int) -> tuple[str, bool]:
    """Compile a kernel. Return the line to print, and True if the kernel meets the conditions of the module docstring.

    Args:
        name: one of KERNELS.
        width: number of elements in a row.
        dtype: one of DTYPES.
        has_dropout: compile with dropout.
        capability: compute capability, 90 for sm_90.
    """
    kernel = getattr(fused_ops_kernels, name)
    constants: dict[str, Any] = {"BLOCK": BLOCK, "PHILOX_OUTPUTS": PHILOX_OUTPUTS}
    warps, n_elements = 4, BLOCK * PHILOX_OUTPUTS
    if "norm" in name:
        constants = add_norm_config(width, has_dropout)
        warps, n_elements = constants.pop("num_warps"), constants["PADDED_D"] * PHILOX_OUTPUTS
        if not has_dropout:
            constants |= {key: None for key in ("seed", "d_branch") if key in kernel.arg_names}
    types = {key: TYPES.get(key, f"*{dtype}") for key in kernel.arg_names}
    assembly = assemble_kernel(kernel, types, constants, warps, 3, capability)
    budget = REGISTERS[name] if width <= 1024 and dtype != "fp32" else MAX_REGISTERS
    n_vectors = len(re.findall(r"(?:ld|st)\.global\S*\.v4", assembly.ptx))
    n_tensors = {"add_norm_forward": 4, "add_norm_backward": 3 + has_dropout}
    n_tensors |= {"gelu_dropout_forward": 2, "gelu_dropout_backward": 3}
    needed = n_tensors[name] * n_elements // (32 * warps) * DTYPES[dtype].itemsize // 16
    n_instructions = len(instructions(assembly.sass)) * 32 * warps / n_elements
    line = f"{name:24}{width:>6} {warps:>5} {assembly.registers:>9} {budget:>6} {assembly.spilled:>7} {assembly.shared:>6} "
    line += f"{n_vectors:>4} of {needed:<3} {n_instructions:>8.1f}"
    return line, assembly.spilled == 0 and assembly.registers <= budget and n_vectors >= needed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, nargs="+", default=[256, 768, 1024, 2048, 4096])
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--no-dropout", action="store_true")
    parser.add_argument("--capability", type=int, default=90)
    args = parser.parse_args()
    print(f"{'kernel':24}{'width':>6} warps registers budget spilled shared    vectors instructions")
    passed = True
    for name in KERNELS[:2] if args.no_dropout else KERNELS:
        for width in args.width if "norm" in name else args.width[:1]:
            line, kernel_passed = check_kernel(name, width, args.dtype, not args.no_dropout, args.capability)
            print(line, flush=True)
            passed &= kernel_passed
    sys.exit(not passed)


if __name__ == "__main__":
    main()
