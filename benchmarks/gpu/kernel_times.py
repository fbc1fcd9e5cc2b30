"""Time of each GPU kernel in a training step.

python benchmarks/gpu/kernel_times.py --impl xlpre:triton:layers --config '{"n_layer": 24, "rows": 16, ...}'

The contender and the configuration are those of benchmarks/speed/step.py. The profiler of torch records three steps. Prints JSON lines
with the times of a step in milliseconds, then one for each kernel that takes at least 0.5 % of `kernel_ms`, longest first. It needs a GPU.

    wall_ms, cpu_ms     wall time and processor time of a step, without the profiler
    busy_ms             time in which a kernel runs; the GPU waits for the rest of wall_ms
    kernel_ms           sum of the times of all kernels
    kernel_name, ms     name of a kernel, and its time in a step
    calls               number of its launches in a step
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from benchmarks.common.contenders import (
    DEFAULT,
    Contender,
    check_config,
    config_of_contender,
    make_contenders,
    make_inputs,
)
from benchmarks.common.json_config import read_json_config
from benchmarks.speed.step import Clock
from xlpre.common.cli_main import run_main
from xlpre.common.errors import InputError
from xlpre.training.deepspeed_engine import PRECISIONS

STEPS = 3
MIN_FRACTION = 0.005  # of the kernel time


def measure(name: str, contender: Contender) -> None:
    """Profile a contender, and print the JSON lines of the module docstring."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        for _ in range(STEPS):
            contender.step()
        torch.cuda.synchronize()
    kernels: dict[str, list[float]] = defaultdict(list)
    intervals = []
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation:
            kernels[event.name].append(event.time_range.elapsed_us())
            intervals.append((event.time_range.start, event.time_range.end))
    total = sum(sum(times) for times in kernels.values())
    busy_ms = round(covered(intervals) / STEPS / 1e3, 3)
    print(json.dumps({"profiled": name, "busy_ms": busy_ms, "kernel_ms": round(total / STEPS / 1e3, 3)}), flush=True)
    for kernel, times in sorted(kernels.items(), key=lambda item: -sum(item[1])):
        if sum(times) >= MIN_FRACTION * total:
            line = {"ms": round(sum(times) / STEPS / 1e3, 3), "calls": round(len(times) / STEPS, 1)}
            print(json.dumps({"kernel_name": kernel[:120], **line}), flush=True)


def covered(intervals: list[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    length, end_so_far = 0.0, float("-inf")
    for start, end in sorted(intervals):
        length += max(end - max(start, end_so_far), 0.0)
        end_so_far = max(end_so_far, end)
    return length


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="{}", help="JSON object, as in benchmarks/speed/step.py")
    parser.add_argument("--impl", default="xlpre", help="contender, as in benchmarks/speed/step.py")
    args = parser.parse_args()
    c = read_json_config(args.config, DEFAULT)
    check_config([args.impl], c)
    if c["device"] == "cpu":
        raise InputError("device=cpu is invalid: kernels are timed on a GPU. Set device=cuda.")
    contender = make_contenders([args.impl], c)[args.impl]
    contender.compile(config_of_contender(args.impl, c)["compile"])
    dtype = PRECISIONS[c["dtype"]]
    contender.train(dtype)
    contender.set_inputs(c, *make_inputs(c, dtype))
    clock = Clock(c)
    clock.time(contender, STEPS)
    wall_ms, cpu_ms = clock.time(contender, STEPS)
    print(json.dumps({"profiled": args.impl, "wall_ms": round(wall_ms, 3), "cpu_ms": round(cpu_ms, 3)}), flush=True)
    measure(args.impl, contender)


if __name__ == "__main__":
    run_main(main)
