"""Self-check of the GPU kernels: decides if `model.attention_backend=auto` uses kernels/triton on a GPU.

python -m xlpre.model.kernels.selfcheck.selfcheck cuda:0 bfloat16 64      (device, dtype, head width)

On a GPU that the kernels were never tested on, they may be wrong or slow, may hang, or may corrupt the CUDA context of their process. So
a separate process tests them, in training before this process uses its GPU:

- Output and gradients of attention match those of `reference` in twice the precision, on random data of both streams.
- They also match for small inputs without memory, with padded keys, a limited distance, position offsets or rows that see no key. Each of
  these inputs is computed in several panels (ranges of query rows).
- The fused operations (kernels/triton/fused_ops.py) match torch's operators.
- With dropout, two runs give finite results with the same bits.
- Attention is not slower than `sdpa`.

The result is stored in the cache folder, one file for each GPU model, dtype, head width, and version of kernels, torch and Triton. If the
check ends without a result, for example for lack of memory or time, it runs again at the next start.
"""

from __future__ import annotations

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
from xlpre.model.kernels.base import AttentionBackend
from xlpre.model.kernels.reference import ReferenceBackend
from xlpre.model.kernels.sdpa import SdpaBackend
from xlpre.model.kernels.selfcheck.fixtures import (
    FUSED_OPS,
    AttentionCase,
    Case,
    FusedCase,
    attention_case,
    exact_fused_case,
    fused_kernel,
    higher_precision,
    random_attention_meta,
    random_attention_tensors,
    random_fused_tensors,
    relative_error,
    unusual_attention_inputs,
)
from xlpre.model.kernels.triton.tiles import is_supported

# Largest relative error. Products in 16 bits with sums in fp32 are off by a few units in the last place.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}
DROPOUT = 0.1
MAX_SECONDS = 300.0  # time limit of a check
TIMED_SECONDS = 1.0
SHAPE = {"rows": 4, "window": 512, "memory": 384, "targets": 85}  # sizes of the published presets
N_HEAD = 8
FUSED_WIDTHS = (768, 1536)  # one for each value of PREFETCH in add-norm, neither a power of two
TIMED_ROWS = 32  # batch rows for timing: enough that kernel launches do not dominate the time


# results of this process, also of checks that ended without a result
_results = dict[tuple[torch.device, torch.dtype, int], bool]()


def passes_selfcheck(
    device: torch.device, dtype: torch.dtype, head_width: int, timeout_seconds: float = MAX_SECONDS
) -> bool:
    """Return True if the GPU kernels are correct and fast on a device. Runs the self-check if there is no stored result.

    Args:
        device: device of the model.
        dtype: dtype of queries, keys and values.
        head_width: E.
        timeout_seconds: time limit of the check, which is never longer than MAX_SECONDS.
    """
    if not _can_run(device, dtype, head_width):
        return False
    key = (device, dtype, head_width)
    if key not in _results:
        _results[key] = _check_once(*key, min(timeout_seconds, MAX_SECONDS))
    return _results[key]


# torch.compile takes the result as a constant, instead of tracing a subprocess. The decorator for this is
# torch.compiler.assume_constant_result, which would import the compiler; that takes seconds.
passes_selfcheck._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _can_run(device: torch.device, dtype: torch.dtype, head_width: int) -> bool:
    if device.type != "cuda" or torch.version.cuda is None or not torch.cuda.is_available():
        return False
    supported = is_supported(head_width, dtype) and torch.cuda.get_device_capability(device) >= (8, 0)
    return supported and find_spec("triton") is not None


def _check_once(device: torch.device, dtype: torch.dtype, head_width: int, timeout_seconds: float) -> bool:
    """Return the stored result. If there is none, run the self-check and store what it finds."""
    kernels = b"".join(path.read_bytes() for path in sorted(Path(__file__).parents[1].rglob("*.py")))
    gpu = torch.cuda.get_device_name(device)
    key = (gpu, str(dtype), head_width, torch.__version__, version("triton"), kernels)
    name = f"selfcheck-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}.json"
    try:
        result = json.loads((cache_dir() / name).read_text("utf-8"))
    except (OSError, RuntimeError, ValueError):
        _log("checking the GPU kernels on this machine, once; this takes about a minute")
        result = run_selfcheck(str(device), dtype, head_width, timeout_seconds)
        if "errors" in result:
            with suppress(OSError, RuntimeError), atomic_write(cache_dir() / name) as partial:
                partial.write_text(json.dumps(result, indent=1), encoding="utf-8")
    if not result["passed"]:
        again = f"when {cache_dir() / name} is deleted" if "errors" in result else "at the next start"
        _log(
            f"attention uses torch's operators instead of the GPU kernels of this project: {result['reason']} "
            f"(the check runs again {again})"
        )
    return bool(result["passed"])


def _log(message: str) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        logging.getLogger(__name__).warning("note: %s", message)


def run_selfcheck(device: str, dtype: torch.dtype, head_width: int, timeout_seconds: float) -> dict[str, Any]:
    """Check the kernels in a separate process.

    Args:
        device: device, as torch.device takes it.
        dtype: dtype of queries, keys and values.
        head_width: E.
        timeout_seconds: time after which the process is killed.

    Returns:
        The result of `check_kernels`. If the process fails or times out, the result has only `passed` and `reason`.
    """
    command = [sys.executable, "-m", __name__, device, str(dtype).removeprefix("torch."), str(head_width)]
    root = str(Path(__file__).parents[4])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))}
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=timeout_seconds, env=env)
    except subprocess.TimeoutExpired:
        return {"passed": False, "reason": f"they did not finish within {timeout_seconds:.0f} seconds"}
    try:
        return dict(json.loads(process.stdout.splitlines()[-1]))
    except (IndexError, TypeError, ValueError):
        lines = process.stderr.strip().splitlines() or [f"exit status {process.returncode}"]
        return {"passed": False, "reason": f"they failed ({lines[-1]})"}


def check_kernels(
    device: torch.device,
    dtype: torch.dtype,
    head_width: int,
    shape: dict[str, int] = SHAPE,
    n_head: int = N_HEAD,
    timed_rows: int = TIMED_ROWS,
) -> dict[str, Any]:
    """Check the kernels in this process.

    Args:
        device: device to check.
        dtype: dtype of queries, keys and values.
        head_width: E.
        shape: arguments of `random_attention_meta`.
        n_head: H.
        timed_rows: batch rows for timing.

    Returns:
        `passed`, `errors` (relative error of each output and gradient), `ms` (of a forward and a backward pass, by backend) and
        `reason` (why the check failed).
    """
    from xlpre.model.kernels.triton import panels
    from xlpre.model.kernels.triton.attention import TritonBackend

    torch.manual_seed(0)
    attn_meta = random_attention_meta(**shape, device=device)
    tensors = random_attention_tensors(attn_meta, n_head, head_width, dtype)
    d_output = torch.randn(*attn_meta.query_rank.shape, n_head, head_width, device=device)
    expected = attention_case(ReferenceBackend, attn_meta, tensors, higher_precision(dtype)).run(d_output)
    case = attention_case(TritonBackend, attn_meta, tensors)
    errors, reproducible = relative_error(case.run(d_output), expected), _is_reproducible(case, d_output)
    if not all(x <= TOLERANCE[dtype] for x in errors.values()):
        reason = f"their results differ from the reference (relative errors: {errors})"
        return {"passed": False, "errors": errors, "reason": reason}
    unusual = unusual_attention_inputs(panels.TILE_MULTIPLE, n_head, head_width, dtype, device)
    for feature, (meta, unusual_tensors) in unusual.items():
        d_unusual = torch.randn_like(unusual_tensors["query"])
        expected = attention_case(ReferenceBackend, meta, unusual_tensors, higher_precision(dtype)).run(d_unusual)
        with panels.smallest_panels():
            result_of_kernels = attention_case(TritonBackend, meta, unusual_tensors).run(d_unusual)
        unusual_errors = relative_error(result_of_kernels, expected)
        errors |= {f"{feature}: {name}": x for name, x in unusual_errors.items()}
    for width, op in product(FUSED_WIDTHS, FUSED_OPS):
        tensors = random_fused_tensors(op, attn_meta.query_rank.numel(), width, dtype, device)
        kernel, d_fused = FusedCase(tensors, fused_kernel(op)), torch.randn_like(next(iter(tensors.values())))
        expected = exact_fused_case(op, tensors).run(d_fused)
        fused_errors = relative_error(kernel.run(d_fused), expected)
        errors |= {f"{op} {width} {name}": x for name, x in fused_errors.items()}
        reproducible &= _is_reproducible(kernel, d_fused)
    result: dict[str, Any] = {"passed": False, "errors": errors}
    if not all(x <= TOLERANCE[dtype] for x in errors.values()):
        return {**result, "reason": f"their results differ from the reference (relative errors: {errors})"}
    if not reproducible:
        return {**result, "reason": "with dropout, the results of two runs differ or are not finite"}
    attn_meta = random_attention_meta(**{**shape, "rows": timed_rows}, device=device)
    tensors = random_attention_tensors(attn_meta, n_head, head_width, dtype)
    d_output = torch.randn(*attn_meta.query_rank.shape, n_head, head_width, device=device)
    backends: dict[str, type[AttentionBackend]] = {"triton": TritonBackend, "sdpa": SdpaBackend}
    cases = {name: attention_case(backend, attn_meta, tensors) for name, backend in backends.items()}
    result["ms"] = ms = {name: _median_ms(case, d_output) for name, case in cases.items()}
    if ms["triton"] > ms["sdpa"]:
        return {**result, "reason": f"they are slower than PyTorch's attention (milliseconds: {ms})"}
    return {**result, "passed": True}


def _is_reproducible(case: Case, d_output: Tensor) -> bool:
    """Return True if two runs with dropout give finite results with the same bits."""
    first, second = (case.run(d_output, DROPOUT) for _ in range(2))
    return all(torch.equal(first[name], second[name]) and bool(first[name].isfinite().all()) for name in first)


def _median_ms(case: AttentionCase, d_output: Tensor) -> float:
    """Return the median milliseconds of a forward and a backward pass with dropout."""
    timer = Timer("case.run(d_output, DROPOUT)", globals={"case": case, "d_output": d_output, "DROPOUT": DROPOUT})
    timer.timeit(2)  # compiles
    return round(1e3 * timer.blocked_autorange(min_run_time=TIMED_SECONDS).median, 3)


if __name__ == "__main__":
    _device, _dtype, _head_width = torch.device(sys.argv[1]), getattr(torch, sys.argv[2]), int(sys.argv[3])
    if _device.index is not None:
        torch.cuda.set_device(_device)  # Triton launches on the current device
    print(json.dumps(check_kernels(_device, _dtype, _head_width)))
