"""Compare the backends of relative attention: errors against the reference, time and memory of a forward and a backward pass.

python benchmarks/speed/attention.py --dropout 0.1
python benchmarks/speed/attention.py --device cpu --rows 2 --dropout 0.1 --repeats 5

The input is random, in the shape of one layer of XLNet-Large with two streams, where half of the window is reused. Prints two JSON lines
for each backend. The first line compares results:

- `errors`: relative error of the output and of each gradient, without dropout, compared with `reference` in the next higher precision
- `errors_with_dropout`: the same errors with dropout, if the reference drops the same attention weights as the backend
- `keep_fraction`: fraction of the attention weights that dropout kept
- `keep_deviations`: difference between `keep_fraction` and the expected fraction, in standard deviations
- `reproducible`: true if two runs give the same bits

The second line contains the speed: median milliseconds of a forward and a backward pass (on a CPU, process time) and, on a GPU, the peak
memory of the two passes. The backends take turns. `bare` is torch's attention of the same size without bias and mask, for comparison.

The exit status is 1 if an error exceeds the tolerance of the self-check, if dropout keeps an unlikely fraction, or if a backend fails.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from benchmarks.common.layer_shapes import DTYPES, add_shape_arguments, exact_results, keep_mask
from xlpre.model.kernels.backend import load_backend
from xlpre.model.kernels.selfcheck.fixtures import (
    AttentionCase,
    Case,
    attention_case,
    random_attention_meta,
    random_attention_tensors,
    relative_error,
)
from xlpre.model.kernels.selfcheck.selfcheck import TOLERANCE

MAX_DEVIATIONS = 6.0  # standard deviations of a binomial count; chance exceeds them in 2e-9 of all cases
BACKENDS = {"cpu": ["reference", "sdpa", "cpu"], "cuda": ["reference", "sdpa", "triton"]}

Run = Callable[
    [], tuple[Tensor, Callable[[], object]]
]  # runs a forward pass; returns its output and a function that runs the backward pass


def check_numbers(case: AttentionCase, d_output: Tensor, dropout: float) -> dict[str, Any]:
    """Compare a backend with the reference. Return the first JSON line of the module docstring."""
    expected = exact_results(case, d_output)
    line: dict[str, Any] = {"errors": relative_error(case.run(d_output), expected)}
    del expected
    if dropout:
        keep, visible = keep_mask(case, dropout), case.backend.attn_meta.visible()[:, None]
        n, n_kept = int(visible.sum()) * keep.size(1), int((keep & visible).sum())
        keep_prob = 1 - round(dropout * 2**16) / 2**16  # the GPU kernels round the dropout rate to 16 bits
        line["keep_fraction"] = round(n_kept / n, 6)
        line["keep_deviations"] = round((n_kept / n - keep_prob) / (keep_prob * (1 - keep_prob) / n) ** 0.5, 2)
        result = case.run(d_output, dropout)
        line["errors_with_dropout"] = relative_error(result, exact_results(case, d_output, keep, dropout))
    first, second = (case.run(d_output, dropout) for _ in range(2))
    line["reproducible"] = all(torch.equal(first[name], second[name]) for name in first)
    return line


def agrees(line: dict[str, Any], dtype: str) -> bool:
    """Return True if all errors are within the tolerance of the self-check (nan is not), and the dropout rate is plausible."""
    errors = [*line["errors"].values(), *line.get("errors_with_dropout", {}).values()]
    return all(x <= TOLERANCE[DTYPES[dtype]] for x in errors) and abs(line.get("keep_deviations", 0)) <= MAX_DEVIATIONS


def bare_attention(tensors: dict[str, Tensor], dropout: float) -> Run:
    """Return a function that runs torch's attention without a bias and a mask."""
    inputs = [tensors[name].detach().requires_grad_() for name in ("query", "key", "value")]
    d_output = torch.randn_like(inputs[0]).transpose(1, 2)

    def forward() -> tuple[Tensor, Callable[[], object]]:
        out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in inputs), dropout_p=dropout)
        return out, lambda: torch.autograd.grad(out, inputs, d_output)

    return forward


def run_of_case(case: Case, d_output: Tensor, dropout: float) -> Run:
    """Return a function that runs the forward pass of a case; see Run."""

    def forward() -> tuple[Tensor, Callable[[], object]]:
        out = case.output(dropout)
        return out, lambda: case.gradients(out, d_output)

    return forward


def time_on_gpu(forward: Run) -> tuple[float, float, float]:
    """Return milliseconds of the forward and the backward pass, and their peak memory in MiB."""
    torch.cuda.reset_peak_memory_stats()
    allocated = torch.cuda.memory_allocated()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    torch.cuda._sleep(
        10_000_000
    )  # cycles; the kernels are queued meanwhile, so that the time of their launches is not included
    events[0].record()
    _, backward = forward()
    events[1].record()
    backward()
    events[2].record()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - allocated) / 2**20
    return events[0].elapsed_time(events[1]), events[1].elapsed_time(events[2]), peak


def time_on_cpu(forward: Run) -> tuple[float, float, None]:
    """Return milliseconds of process time of the forward and the backward pass. Memory is not measured."""
    start = time.process_time()
    _, backward = forward()
    middle = time.process_time()
    backward()
    return 1e3 * (middle - start), 1e3 * (time.process_time() - middle), None


def time_in_turns(runs: dict[str, Run], device: str, repeats: int, baseline: str) -> dict[str, dict[str, Any]]:
    """Time the contenders in turns. Return the second JSON line of the module docstring for each.

    Args:
        runs: functions that run a forward pass, by the name of the contender.
        device: device of the tensors.
        repeats: number of timed turns, after three to warm up.
        baseline: name of the contender to which `time_vs_...` relates the times.
    """
    samples: dict[str, list[Any]] = {name: [] for name in runs}
    for repeat in range(repeats + 3):
        for name, forward in runs.items():
            sample = time_on_cpu(forward) if device == "cpu" else time_on_gpu(forward)
            if repeat >= 3:
                samples[name].append(sample)
    lines = {}
    for name, timed in samples.items():
        forward_ms, backward_ms = (statistics.median(sample[i] for sample in timed) for i in (0, 1))
        ratios = (sum(x[:2]) / sum(y[:2]) for x, y in zip(timed, samples[baseline], strict=True))
        lines[name] = {
            "forward_ms": round(forward_ms, 3),
            "backward_ms": round(backward_ms, 3),
            f"time_vs_{baseline}": round(statistics.median(ratios), 2),
            "peak_mib": timed[-1][2] and round(timed[-1][2]),
        }
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shape_arguments(parser)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=20, help="timed turns; 0 skips timing")
    parser.add_argument("--backends", nargs="+", help="default: all backends of the device")
    args = parser.parse_args()
    torch.manual_seed(0)
    attn_meta = random_attention_meta(args.rows, args.window, args.memory, args.targets, args.device)
    tensors = random_attention_tensors(attn_meta, args.heads, args.width, DTYPES[args.dtype])
    d_output = torch.randn(*attn_meta.query_rank.shape, args.heads, args.width, device=args.device)
    passed = True
    runs = {"bare": bare_attention(tensors, args.dropout)} if args.repeats else {}
    for name in args.backends or BACKENDS[torch.device(args.device).type]:
        try:
            case = attention_case(load_backend(name), attn_meta, tensors)
            line = check_numbers(case, d_output, args.dropout)
            line["agrees"] = agrees(line, args.dtype)
            runs[name] = run_of_case(case, d_output, args.dropout)
        except Exception:
            line = failure()
        # the errors of the reference are its own rounding, which has no tolerance
        passed &= line["agrees"] or (name == "reference" and "failed" not in line)
        print_line(name, line, args)
    try:
        for name, line in (time_in_turns(runs, args.device, args.repeats, "bare") if args.repeats else {}).items():
            print_line(name, line, args)
    except Exception:
        passed = False
        print_line("all", failure(), args)
    sys.exit(not passed)


def failure() -> dict[str, Any]:
    return {"agrees": False, "failed": traceback.format_exc(limit=-4)[-3000:]}


def print_line(name: str, line: dict[str, Any], args: argparse.Namespace) -> None:
    print(json.dumps({"backend": name, **line, "shape": vars(args)}), flush=True)


if __name__ == "__main__":
    main()
