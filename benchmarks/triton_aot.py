"""What the GPU kernels of attention take of a multiprocessor: compiled for sm_90 and assembled, which needs no GPU.

python benchmarks/triton_aot.py [--width 64 128] [--dtype bf16] [--kernel attend] [--tile 128,64,8,2 ...] [--no-dropout] [--same-length]

Prints a line for each kernel and tile: registers of a thread, how many it may have, bytes it spills, shared memory of a program, products
of a warp group, and instructions that threads take for a pair of row and key (or distance) in the kernel's loop; ends with status 1 if any
spills or has more registers. Needs the package triton, with the assembler that it brings. Not to be run under TRITON_INTERPRET=1.
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
from layer_shapes import DTYPES
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from xlpre.model.kernels.triton.launch import KERNELS
from xlpre.model.kernels.triton.primitives import SIZES
from xlpre.model.kernels.triton.tiles import TILES, Tile, column_of, tile_of

INTEGERS = ("row_facts", "key_facts", "direction", "dropped")
SINGLE = ("log_total", "delta", "d_place_keys", "d_offsets")  # fp32 whatever the rest is
ALIGNED = ("n_pitch", "k_pitch", "n")  # multiples of 16; of other sizes the kernels are not told
# Registers of a thread for heads 64 and 128 wide in 16 bits: the most that triton 3.6 and 3.7 take, in eights, and one eight more where as
# many programs still share the 65,536 registers of a multiprocessor. Where that is all a thread can have, spilling is what fails.
REGISTERS = {
    "draw": (32, 32),
    "score_places": (240, 224),
    "attend": (208, 240),
    "differentiate_keys": (224, 255),
    "differentiate_rows": (255, 255),
    "differentiate_place_queries": (128, 255),
    "differentiate_place_keys": (128, 168),
}
MOST_REGISTERS = 255  # that a thread can have; what needs more spills
FLAGS = {"PLACES": True, "SEGMENTS": True, "OFFSETS": False}


class Compiled(NamedTuple):
    """A kernel.

    Attributes:
        registers: of a thread.
        spilled: bytes of a thread that registers had no room for.
        shared: bytes of shared memory of a program.
        ptx: what Triton made of it,
        code: and the assembler.
    """

    registers: int
    spilled: int
    shared: int
    ptx: str
    code: str


class Cost(NamedTuple):
    """Of a kernel.

    Attributes:
        registers: see Compiled,
        spilled: it,
        shared: and it.
        wgmma: products of a warp group in the code.
        instructions: of all threads in one turn of the longest loop, for each pair of row and key of a tile.
    """

    registers: int
    spilled: int
    shared: int
    wgmma: int
    instructions: float


def cost(name: str, width: int, dtype: str, tile: Tile, dropout: bool, limited: bool, capability: int) -> Cost:
    """Compile and assemble a kernel of xlpre/model/kernels/triton/forward.py or triton_backward.py."""
    kernel = KERNELS[name]
    constants = {**FLAGS, "DROPOUT": dropout, "LIMITED": limited, "E": width, "ROWS": tile.rows, "KEYS": tile.keys}
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    absent = [key for key in kernel.arg_names if key in ("offsets", "d_offsets") or (key == "dropped" and not dropout)]
    constants |= dict.fromkeys(absent)
    types = {key: _type(key, dtype) for key in kernel.arg_names}
    found = compiled(kernel, types, constants, tile.warps, tile.stages, capability)
    wgmma = found.ptx.count("wgmma.mma_async")
    a_pair = _longest_loop(found.code) * 32 * tile.warps / (tile.rows * tile.keys)
    return Cost(found.registers, found.spilled, found.shared, wgmma, a_pair)


def compiled(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int, stages: int, capability: int
) -> Compiled:
    """Compile and assemble a kernel whose arguments are of `types` where they are no `constants`."""
    signature = {key: "constexpr" if key in constants else types[key] for key in kernel.arg_names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, key in enumerate(kernel.arg_names)
        if signature[key].startswith("*") or key in ALIGNED
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps, "num_stages": stages}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    said, code = _assemble(made.asm["ptx"])
    registers = max(int(n) for n in re.findall(r"Used (\d+) registers", said))
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", said))
    return Compiled(registers, spilled, made.metadata.shared, made.asm["ptx"], code)


def allowed(name: str, width: int, dtype: str, tile: Tile) -> int:
    """Registers of a thread that a kernel may have; as many as there are if it is not cut as TILES says, for wider heads and fp32."""
    column = column_of(width, DTYPES[dtype])
    as_it_stands = column < 2 and tile == TILES[name][column]
    return REGISTERS[name][column] if as_it_stands else MOST_REGISTERS


def _type(name: str, dtype: str) -> str:
    if name in INTEGERS:
        return "*i32"
    if name == "seed":
        return "*i64"
    if name in SINGLE:
        return "*fp32"
    if name == "share":
        return "fp32"
    return "i32" if name in (*ALIGNED, *SIZES, "reach", "first_row", "threshold") else f"*{dtype}"


def _assemble(ptx: str) -> tuple[str, str]:
    """What the assembler says of it, and the machine's code."""
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    target = re.search(r"\.target (\w+)", ptx)
    assert target is not None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx, encoding="utf-8")
        code = path.with_suffix(".cubin")
        assembled, shown = (
            [tools / "ptxas", "-v", f"-arch={target[1]}", path, "-o", code],
            [tools / "cuobjdump", "-sass", code],
        )
        said, sass = (subprocess.run(x, capture_output=True, text=True, check=True) for x in (assembled, shown))
        return said.stderr, sass.stdout


def instructions(code: str) -> list[tuple[str, str]]:
    """Of a kernel's code, the place of each in hexadecimal digits, and its text."""
    return re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", code, re.MULTILINE)


def _longest_loop(code: str) -> int:
    """Of a kernel's code, so many instructions between a branch back and where it goes."""
    found = instructions(code)
    places = [int(place, 16) for place, _ in found]
    back = [
        (int(to[1], 16), place)
        for place, (_, text) in zip(places, found, strict=True)
        if (to := re.search(r"BRA.* (0x[0-9a-f]+)", text))
    ]
    return max((sum(begin <= x <= end for x in places) for begin, end in back if begin < end), default=0)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--width", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--kernel", choices=TILES, nargs="+", default=list(TILES))
    parser.add_argument("--tile", nargs="+", help="rows,keys,warps,stages, instead of the chosen ones")
    parser.add_argument("--no-dropout", action="store_true")
    parser.add_argument("--same-length", action="store_true", help="with a limit to how far back is seen")
    parser.add_argument("--capability", type=int, default=90)
    given = parser.parse_args()
    print(
        f"{'kernel':28}{'E':>4} {'rows x keys':>11} {'warps':>5} {'stages':>6} {'registers':>9} {'allowed':>7} {'spilled':>7} "
        f"{'shared':>7} wgmma instructions"
    )
    bad = False
    for name in given.kernel if not given.no_dropout else [x for x in given.kernel if x != "draw"]:
        for width in given.width:
            chosen = [tile_of(name, width, DTYPES[given.dtype])]
            for tile in [Tile(*map(int, text.split(","))) for text in given.tile] if given.tile else chosen:
                found = cost(name, width, given.dtype, tile, not given.no_dropout, given.same_length, given.capability)
                most = allowed(name, width, given.dtype, tile)
                bad |= found.spilled > 0 or found.registers > most
                cut = f"{tile.rows:>5} x {tile.keys:<3}"
                print(
                    f"{name:28}{width:>4} {cut:>11} {tile.warps:>5} {tile.stages:>6} {found.registers:>9} {most:>7}"
                    f" {found.spilled:>7} {found.shared:>7} {found.wgmma:>5} {found.instructions:>12.1f}",
                    flush=True,
                )
    sys.exit(bad)


if __name__ == "__main__":
    main()
