"""Whether `auto` takes kernels/triton.py and between.py on a GPU: tried there, by a process of its own, before they are trusted.

python -m xlpre.model.kernels.selfcheck.selfcheck cuda:0 bfloat16 64      (a device, a type, the width of a head)

On a GPU that nobody had at hand a kernel may be wrong, slow, hang, or break the context of the process that calls it. So before the
first step there its output and gradients are compared with those of `reference` in twice the precision, for both streams of a layer of
random data, and it is timed beside `sdpa`; what stands between products (kernels/between.py), which the same answer decides about, is
compared with torch's operators. What that finds is a file in the cache folder, one for each kind of GPU, type, width, and version of
kernels, torch and Triton; where it finds nothing, for lack of memory or time, it is tried again at the next start.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import version
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from xlpre.common.files import atomic_write, cache_dir
from xlpre.model.kernels.reference import Reference
from xlpre.model.kernels.sdpa import Sdpa
from xlpre.model.kernels.selfcheck.fixtures import (
    AttentionCase,
    Case,
    apart,
    attention_case,
    geometry_of,
    higher_precision,
    tensors_of,
)
from xlpre.model.kernels.selfcheck.fused_fixtures import WORKS, FusedCase, exact_of, kernel_of, tensors_between
from xlpre.model.kernels.triton.tiles import computes

# a norm of a difference over the norm: 16-bit numbers whose products are summed in fp32 are off by several of their last places
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}
DROPOUT = 0.1
PATIENCE = 300.0  # seconds
TIMED_SECONDS = 1.0
SHAPE = {"rows": 4, "window": 512, "memory": 384, "targets": 85}  # of the published presets
HEADS = 8
WIDTHS = (768, 1536)  # of rows between products: one for each way in which between.py cuts them, no power of two
ROWS = 32  # in place of so few, where it is timed: enough that a GPU computes for longer than kernels take to start


def passes_selfcheck(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Whether the kernels were found right there, and attention's no slower than `sdpa`; tried if need be, which is said."""
    return _possible(device, dtype, width) and _verdict(device, dtype, width)


# as by torch.compiler.assume_constant_result, which would import the compiler: it takes the answer, and does not look how it was found
passes_selfcheck._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _possible(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    if device.type != "cuda" or torch.version.cuda is None or not torch.cuda.is_available():
        return False
    written_for = computes(width, dtype) and torch.cuda.get_device_capability(device) >= (8, 0)
    return written_for and find_spec("triton") is not None


@functools.cache
def _verdict(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    kernels = b"".join(path.read_bytes() for path in sorted(Path(__file__).parents[1].rglob("*.py")))
    about = (torch.cuda.get_device_name(device), str(dtype), width, torch.__version__, version("triton"), kernels)
    name = f"trial-{hashlib.sha256(repr(about).encode()).hexdigest()[:16]}.json"
    try:
        found = json.loads((cache_dir() / name).read_text("utf-8"))
    except (OSError, RuntimeError, ValueError):
        _say("trying the GPU kernels of attention on this machine, once; that takes a minute or so")
        found = tried(str(device), dtype, width)
        if "off_by" in found:
            with suppress(OSError, RuntimeError), atomic_write(cache_dir() / name) as partial:
                partial.write_text(json.dumps(found, indent=1), encoding="utf-8")
    if not found["taken"]:
        again = f"without {name} in ~/.cache/xlpre" if "off_by" in found else "at the next start"
        _say(f"attention takes torch's, not the GPU kernels of this project: {found['why']} (tried again {again})")
    return bool(found["taken"])


def _say(what: str) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        logging.getLogger(__name__).warning("note: %s", what)


def tried(device: str, dtype: torch.dtype, width: int, patience: float = PATIENCE) -> dict[str, Any]:
    """The verdict of a process of its own, for so many seconds at most: `taken`, if not, `why`; and what it found, if it came so far."""
    name = str(dtype).removeprefix("torch.")
    command = [sys.executable, "-m", __name__, device, name, str(width)]
    root = str(Path(__file__).parents[4])
    paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=patience, env={**os.environ, "PYTHONPATH": paths}
        )
    except subprocess.TimeoutExpired:
        return {"taken": False, "why": f"they were not done after {patience:.0f} seconds"}
    try:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, TypeError, ValueError):
        said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        return {"taken": False, "why": f"they failed ({said[-1]})"}


def verdict(
    device: torch.device, dtype: torch.dtype, width: int, shape: dict[str, int], heads: int, rows: int
) -> dict[str, Any]:
    """Try them, in this process; time them with so many `rows`."""
    from xlpre.model.kernels.triton.attention import Triton

    torch.manual_seed(0)
    attn_meta = geometry_of(**shape, device=device)
    tensors = tensors_of(attn_meta, heads, width, dtype)
    weights = torch.randn(*attn_meta.query_rank.shape, heads, width, device=device)
    expected = attention_case(Reference(), attn_meta, tensors, higher_precision(dtype)).all(weights)
    layer = attention_case(Triton(), attn_meta, tensors)
    off_by, same = apart(layer.all(weights), expected), _same_twice(layer, weights)
    for n_columns, work in product(WIDTHS, WORKS):
        given = tensors_between(work, weights.size(0) * weights.size(1), n_columns, dtype, device)
        kernel, outward = FusedCase(given, kernel_of(work)), torch.randn_like(next(iter(given.values())))
        exact = exact_of(work, given).all(outward)
        off_by |= {f"{work} {n_columns} {name}": x for name, x in apart(kernel.all(outward), exact).items()}
        same &= _same_twice(kernel, outward)
    found: dict[str, Any] = {"taken": False, "off_by": off_by}
    if not all(x <= TOLERANCE[dtype] for x in off_by.values()):
        return {**found, "why": f"their numbers are not those of reference ({off_by})"}
    if not same:
        return {**found, "why": "with dropout they do not give the same finite numbers twice"}
    attn_meta = geometry_of(**{**shape, "rows": rows}, device=device)
    tensors = tensors_of(attn_meta, heads, width, dtype)
    weights = torch.randn(*attn_meta.query_rank.shape, heads, width, device=device)
    layer, torchs = attention_case(Triton(), attn_meta, tensors), attention_case(Sdpa(), attn_meta, tensors)
    found["ms"] = {"triton": _milliseconds(layer, weights), "sdpa": _milliseconds(torchs, weights)}
    if found["ms"]["triton"] > found["ms"]["sdpa"]:
        return {**found, "why": f"they are slower ({found['ms']})"}
    return {**found, "taken": True}


def _same_twice(ready: Case, weights: Tensor) -> bool:
    """Whether two turns with dropout give the same finite bits."""
    first, second = (ready.all(weights, DROPOUT) for _ in range(2))
    return all(torch.equal(first[name], second[name]) and bool(first[name].isfinite().all()) for name in first)


def _milliseconds(layer: AttentionCase, weights: Tensor) -> float:
    """Of forward and backward with dropout, one after another without waiting for the device between them; the median of several."""
    timer = Timer("layer.all(weights, DROPOUT)", globals={"layer": layer, "weights": weights, "DROPOUT": DROPOUT})
    timer.timeit(2)  # compiles
    return round(1e3 * timer.blocked_autorange(min_run_time=TIMED_SECONDS).median, 3)


if __name__ == "__main__":
    _device, _dtype, _width = torch.device(sys.argv[1]), getattr(torch, sys.argv[2]), int(sys.argv[3])
    if _device.index is not None:
        torch.cuda.set_device(_device)  # Triton asks for no device, but takes the current one
    print(json.dumps(verdict(_device, _dtype, _width, SHAPE, HEADS, ROWS)))
