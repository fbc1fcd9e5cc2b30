"""Compile and assemble the attention kernels for sm_90, and print their registers and shared memory. This needs no GPU.

python benchmarks/gpu/attention_registers.py [--width 64 128] [--dtype bf16] [--kernel attention_forward] [--tile 128,64,8,2 ...]
    [--no-dropout] [--same-length]

Prints one line for each kernel and tile (a tile has the rows and keys that a program computes at a time, its warps and its pipeline
stages):

    registers, budget   registers per thread, and the most that the kernel may use
    spilled, shared     spilled bytes per thread, and bytes of shared memory per program
    wgmma               number of warp-group matrix products in the code
    maxima              number of maximum instructions that return the other operand if one is nan
    instructions        instructions of all threads in an iteration of the longest loop, per pair of row and key (or distance)

The exit status is 1 if a kernel spills or exceeds its budget. The command needs the package triton, which includes the assembler, and
does not run under TRITON_INTERPRET=1.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from benchmarks.common.layer_shapes import DTYPES
from xlpre.model.kernels.triton.launch import KERNELS
from xlpre.model.kernels.triton.primitives import SIZES
from xlpre.model.kernels.triton.tiles import TILES, Tile, tile_for, tile_index

INT32_TENSORS = ("row_info", "key_info", "direction", "drop_mask")
FLOAT32_TENSORS = ("lse", "delta", "d_pos_key", "d_pos_offset")  # float32 in every precision
ALIGNED = ("n_pitch", "k_pitch", "n")  # Triton compiles these as multiples of 16, and assumes nothing about other sizes
INT32_SCALARS = (*ALIGNED, *SIZES, "max_distance", "first_row", "drop_level")
# Budgets: registers per thread for head widths 64 and 128 in 16 bits. A budget is what triton 3.6 or 3.7 needs (the larger), rounded up
# to a multiple of 8. Another 8 are added where this does not reduce the programs that fit into the 65,536 registers of a multiprocessor.
# A kernel whose budget is the hardware limit (255) fails only if it spills.
REGISTERS = {
    "draw_dropout_mask": (32, 32),
    "position_scores": (240, 224),
    "attention_forward": (208, 240),
    "backward_key_value": (224, 255),
    "backward_query": (255, 255),
    "backward_position_query": (128, 255),
    "backward_position_key": (128, 168),
}
MAX_REGISTERS = 255  # hardware limit per thread; a kernel that needs more spills


class Assembly(NamedTuple):
    """A compiled and assembled kernel.

    Attributes:
        registers: number of registers per thread.
        spilled: bytes per thread that do not fit into registers.
        shared: bytes of shared memory per program.
        ptx: PTX code, which Triton compiles.
        sass: disassembled machine code, as text.
    """

    registers: int
    spilled: int
    shared: int
    ptx: str
    sass: str


class Cost(NamedTuple):
    """Resources of an attention kernel.

    Attributes:
        registers: number of registers per thread.
        spilled: bytes per thread that do not fit into registers.
        shared: bytes of shared memory per program.
        wgmma: number of warp-group matrix products in the code.
        maxima: number of floating-point maximum instructions in the code that return the other operand if one is nan.
        instructions: instructions of all threads in one iteration of the longest loop, per pair of row and key of a tile.
    """

    registers: int
    spilled: int
    shared: int
    wgmma: int
    maxima: int
    instructions: float


def kernel_cost(
    name: str, width: int, dtype: str, tile: Tile, has_dropout: bool, has_max_distance: bool, capability: int
) -> Cost:
    """Compile an attention kernel and return the resources that it uses.

    Args:
        name: one of KERNELS.
        width: width of the heads.
        dtype: one of DTYPES.
        tile: tile of the kernel.
        has_dropout: compile with dropout.
        has_max_distance: compile with a limited distance.
        capability: compute capability, 90 for sm_90.
    """
    kernel = KERNELS[name]
    constants: dict[str, Any] = {"HAS_POSITIONS": True, "HAS_SEGMENTS": True, "HAS_OFFSET": False}
    constants |= {"HAS_DROPOUT": has_dropout, "HAS_MAX_DISTANCE": has_max_distance}
    constants |= {"E": width, "ROWS": tile.rows, "KEYS": tile.keys, "pos_offset": None, "d_pos_offset": None}
    if not has_dropout:
        constants["drop_mask"] = None
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    types = {key: argument_type(key, dtype) for key in kernel.arg_names}
    assembly = assemble_kernel(kernel, types, constants, tile.warps, tile.stages, capability)
    wgmma, maxima = (len(re.findall(pattern, assembly.ptx)) for pattern in (r"wgmma\.mma_async", r"\bmax(\.ftz)?\.f32"))
    instructions = longest_loop(assembly.sass) * 32 * tile.warps / (tile.rows * tile.keys)
    return Cost(assembly.registers, assembly.spilled, assembly.shared, wgmma, maxima, instructions)


def assemble_kernel(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int, stages: int, capability: int
) -> Assembly:
    """Compile a kernel with Triton and assemble it with ptxas.

    Args:
        kernel: a `triton.jit` function.
        types: Triton types of all arguments by name.
        constants: values of the arguments that are compile-time constants.
        warps: warps of a program.
        stages: pipeline stages.
        capability: compute capability, 90 for sm_90.
    """
    signature = {key: "constexpr" if key in constants else types[key] for key in kernel.arg_names}
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, key in enumerate(kernel.arg_names)
        if signature[key].startswith("*") or key in ALIGNED
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": warps, "num_stages": stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    log, sass = run_assembler(compiled.asm["ptx"])
    registers = max(int(n) for n in re.findall(r"Used (\d+) registers", log))
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", log))
    return Assembly(registers, spilled, compiled.metadata.shared, compiled.asm["ptx"], sass)


def register_budget(name: str, width: int, dtype: str, tile: Tile) -> int:
    """Return the registers per thread that a kernel may use: its budget in REGISTERS, or the hardware limit if it has none.

    Only the tiles in TILES for head widths up to 128 in 16 bits have a budget.
    """
    index = tile_index(width, DTYPES[dtype])
    has_budget = index < 2 and tile == TILES[name][index]
    return REGISTERS[name][index] if has_budget else MAX_REGISTERS


def argument_type(name: str, dtype: str) -> str:
    """Return the Triton type of the kernel argument `name`, such as `*bf16` for a bf16 tensor."""
    if name in INT32_TENSORS:
        return "*i32"
    if name == "seed":
        return "*i64"
    if name in FLOAT32_TENSORS:
        return "*fp32"
    if name == "keep_prob":
        return "fp32"
    return "i32" if name in INT32_SCALARS else f"*{dtype}"


def run_assembler(ptx: str) -> tuple[str, str]:
    """Assemble PTX code. Return the log of the assembler and the disassembled machine code."""
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    target = re.search(r"\.target (\w+)", ptx)
    assert target is not None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx, encoding="utf-8")
        cubin = path.with_suffix(".cubin")
        assemble = [tools / "ptxas", "-v", f"-arch={target[1]}", path, "-o", cubin]
        disassemble = [tools / "cuobjdump", "-sass", cubin]
        log, sass = (
            subprocess.run(command, capture_output=True, text=True, check=True) for command in (assemble, disassemble)
        )
        return log.stderr, sass.stdout


def instructions(sass: str) -> list[tuple[str, str]]:
    """Return the instructions of disassembled machine code, each as its hexadecimal address and its text."""
    return re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", sass, re.MULTILINE)


def longest_loop(sass: str) -> int:
    """Return the largest number of instructions between a backward branch and its target."""
    lines = instructions(sass)
    addresses = [int(address, 16) for address, _ in lines]
    loops = [
        (int(target[1], 16), address)
        for address, (_, text) in zip(addresses, lines, strict=True)
        if (target := re.search(r"BRA.* (0x[0-9a-f]+)", text))
    ]
    return max((sum(start <= x <= end for x in addresses) for start, end in loops if start < end), default=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--kernel", choices=TILES, nargs="+", default=list(TILES))
    parser.add_argument("--tile", nargs="+", help="rows,keys,warps,stages; default: the tile of the kernel")
    parser.add_argument("--no-dropout", action="store_true")
    parser.add_argument("--same-length", action="store_true", help="limit the distance of keys (model.attention_span)")
    parser.add_argument("--capability", type=int, default=90)
    args = parser.parse_args()
    print(
        f"{'kernel':24}{'E':>4} {'rows x keys':>11} {'warps':>5} {'stages':>6} {'registers':>9} {'budget':>6} {'spilled':>7} "
        f"{'shared':>6} wgmma maxima instructions"
    )
    failed = False
    for name in args.kernel if not args.no_dropout else [x for x in args.kernel if x != "draw_dropout_mask"]:
        for width in args.width:
            current = [tile_for(name, width, DTYPES[args.dtype])]
            for tile in [Tile(*map(int, text.split(","))) for text in args.tile] if args.tile else current:
                cost = kernel_cost(
                    name, width, args.dtype, tile, not args.no_dropout, args.same_length, args.capability
                )
                budget = register_budget(name, width, args.dtype, tile)
                failed |= cost.spilled > 0 or cost.registers > budget
                size = f"{tile.rows:>5} x {tile.keys:<3}"
                print(
                    f"{name:24}{width:>4} {size:>11} {tile.warps:>5} {tile.stages:>6} {cost.registers:>9} {budget:>6}"
                    f" {cost.spilled:>7} {cost.shared:>6} {cost.wgmma:>5} {cost.maxima:>6} {cost.instructions:>12.1f}",
                    flush=True,
                )
    sys.exit(failed)


if __name__ == "__main__":
    main()
