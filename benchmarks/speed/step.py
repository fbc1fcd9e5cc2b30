r"""Time, memory and loss of a training step of xlpre, compared with Hugging Face or with other settings.

python benchmarks/speed/step.py --config '{"n_layer": 4, "window": 512, "mem_len": 384, "reuse_len": 256, "rows": 2}' --vs hf
python benchmarks/speed/step.py --impl xlpre --config config.json --rss
python benchmarks/speed/step.py --impl xlpre:triton:layers --vs xlpre:triton xlpre:sdpa hf hf-compile --rows 8 16 --config \
    '{"device": "cuda", "dtype": "bf16", "optimizer": true, "n_layer": 12, "d_model": 768, "n_head": 12, "d_inner": 3072,
      "vocab_size": 32000, "window": 512, "mem_len": 384, "reuse_len": 256, "dropout": 0.1}'

A contender is `hf`, `hf-compile`, or `xlpre[:attention[:compile]]`, where compile is `whole`, `layers` or a mode of torch.compile. The
contenders of one command take turns in one process, with equal weights and batches.

Before timing, contenders must agree with the last one: loss and gradient of every parameter, in fp32, eager, without dropout. On a GPU
without dropout, the norm of all gradients in `dtype`, compiled, must also agree with the first contender.

One JSON line per contender and number of rows. A contender that fails has the reason in its line, and the exit status is 1.

    cpu_ms, wall_ms     median time of a step
    times_as_fast_as    speed of the first contender relative to each other one: median over pairs of turns, of processor time (which
                        other programs affect least) on a CPU and of wall time on a GPU
    mfu                 fraction of the peak that the manufacturer publishes; see pretrain/planning/flops.py
    step_mb             peak memory of a step above the memory before it: tensors on a GPU; with --rss, a separate process on a CPU
    activation_mb       memory per row that the forward pass keeps for the backward pass

With `optimizer`, a step includes fused AdamW, and weights, gradients and moments all have type `dtype`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads slow each other down severely on shared cores

from pathlib import Path

import psutil
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from benchmarks.common.agreement import agreeing_contenders, format_exception
from benchmarks.common.contenders import DEFAULT, Contender, config_of_contender, make_inputs, needed_flops
from benchmarks.common.json_config import read_json_config
from xlpre.data.window_layout import DataConfig
from xlpre.training.deepspeed_engine import PRECISIONS
from xlpre.training.device_specs import find_device_spec

GRADIENT_NORM_TOLERANCE = 1e-2  # relative, of the norm of all gradients, in the precision that is timed


class Clock:
    """Timer of training steps that waits for the device."""

    def __init__(self, c: dict[str, Any]) -> None:
        self._on_gpu = c["device"] != "cpu"

    def synchronize(self) -> None:
        """Wait until the device has finished."""
        if self._on_gpu:
            torch.cuda.synchronize()

    def time(self, contender: Contender, steps: int) -> tuple[float, float]:
        """Run steps. Returns the mean wall time and processor time of a step, in milliseconds."""
        self.synchronize()
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            contender.step()
        self.synchronize()
        return 1e3 * (time.perf_counter() - wall) / steps, 1e3 * (time.process_time() - cpu) / steps


def gradient_norm(contender: Contender) -> float:
    """Return the norm of all gradients of a backward pass."""
    contender.loss().backward()
    gradients = [p.grad for p in contender.model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients).item()
    contender.model.zero_grad(set_to_none=True)
    return norm


def first_steps(contender: Contender, c: dict[str, Any]) -> dict[str, Any]:
    """Run the first steps. Returns loss and duration (with compilation) of the first one and, on a GPU, memory and gradient norm."""
    contender.set_inputs(c, *make_inputs(c, PRECISIONS[c["dtype"]]))
    start = time.perf_counter()
    line: dict[str, Any] = {"loss": round(contender.step().item(), 6)}
    line["first_step_s"] = round(time.perf_counter() - start, 1)
    if c["device"] == "cpu":
        return line
    contender.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    allocated = torch.cuda.memory_allocated()
    contender.step()
    line["step_mb"] = round((torch.cuda.max_memory_allocated() - allocated) / 2**20, 1)
    loss = contender.loss()
    line["activation_mb"] = round((torch.cuda.memory_allocated() - allocated) / 2**20 / c["rows"], 1)
    del loss
    line["gradient_norm"] = round(gradient_norm(contender), 6)
    return line


def race(contenders: dict[str, Contender], c: dict[str, Any], rounds: int, steps: int) -> list[dict[str, Any]]:
    """Time contenders in turns. Returns a line for each."""
    clock, running = Clock(c), dict(contenders)
    lines: dict[str, dict[str, Any]] = {}
    times: dict[str, list[tuple[float, float]]] = {}
    for name, contender in contenders.items():
        try:
            lines[name] = {"impl": name, **first_steps(contender, c)}
            check_gradient_norm(lines, name, c)
            times[name] = [clock.time(contender, steps)]
        except (Exception, KeyboardInterrupt):  # on an interrupt, the results so far are printed
            lines[name] = {"impl": name, "failed": format_exception()}
            contender.model.zero_grad(set_to_none=True)
            del running[name]
        else:
            if c["device"] != "cpu":  # compiling the next contender may exceed the time limit
                print(json.dumps({**lines[name], **speed(times[name], c), "first": True, "config": c}), flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        for _ in range(rounds - 1):
            for name, contender in running.items():
                gc.collect()
                times[name].append(clock.time(contender, steps))
    for name in running:
        lines[name] |= speed(times[name], c)
        first = next(iter(running))
        if name != first:
            which = int(c["device"] == "cpu")  # index of wall or processor time
            pairs = zip(times[name], times[first], strict=False)
            ratio = statistics.median(theirs[which] / ours[which] for theirs, ours in pairs)
            lines[first].setdefault("times_as_fast_as", {})[name] = round(ratio, 3)
    return list(lines.values())


def check_gradient_norm(lines: dict[str, dict[str, Any]], name: str, c: dict[str, Any]) -> None:
    """Raise ValueError if the gradient norm differs from the first contender's. Nothing is checked with dropout or on a CPU."""
    norms = [line["gradient_norm"] for line in (*lines.values(), lines[name]) if "gradient_norm" in line]
    if norms and not c["dropout"] and not abs(norms[-1] - norms[0]) <= GRADIENT_NORM_TOLERANCE * norms[0]:
        raise ValueError(f"the norm of all gradients is {norms[-1]}, but {norms[0]} for the first contender")


def speed(times: list[tuple[float, float]], c: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics of speed for (wall, processor) times of steps in milliseconds."""
    wall, cpu = (statistics.median(values) for values in zip(*times, strict=True))
    flops = needed_flops(c) / wall * 1e3
    device = find_device_spec(torch.cuda.get_device_name()) if c["device"] != "cpu" else None
    return {
        "cpu_ms": round(cpu, 1),
        "wall_ms": round(wall, 2),
        "tokens_per_second": round(c["rows"] * c["window"] / wall * 1e3, 1),
        "tflops": round(flops / 1e12, 4),
        "mfu": round(flops / device.flops, 4) if device else None,
    }


def step_memory(name: str, c: dict[str, Any]) -> float:
    """Return the peak resident memory of a step above the memory before it, in MiB, in this process."""
    contender = agreeing_contenders([name], c)[0][name]
    first_steps(contender, c)
    gc.collect()
    process, peak, running = psutil.Process(), [0], [True]
    before = process.memory_info().rss

    def watch() -> None:
        while running:
            peak[0] = max(peak[0], process.memory_info().rss)
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    contender.step(), contender.step()
    running.clear()
    watcher.join()
    return (peak[0] - before) / 2**20


def step_memory_in_subprocess(name: str, c: dict[str, Any]) -> float:
    """Return `step_memory` of a separate process."""
    command = [sys.executable, __file__, "--config", json.dumps(c), "--impl", name, "--alone"]
    variables = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=variables)
    return round(json.loads(result.stdout.splitlines()[-1]), 1)


def read_config(text: str) -> dict[str, Any]:
    """Return the benchmark configuration of `--config`. Exit with an error if its sizes are invalid for training."""
    c = read_json_config(text, DEFAULT)
    try:
        DataConfig(seq_len=c["window"], reuse_len=c["reuse_len"])
    except ValueError as error:
        raise SystemExit(f"--config: {error}") from None
    return c


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--config", default="{}", help="JSON, or a file with it; defaults are in benchmarks/common/contenders.py"
    )
    parser.add_argument("--impl", default="xlpre", help="first contender")
    parser.add_argument("--vs", nargs="+", default=[], help="other contenders")
    parser.add_argument("--rows", nargs="+", type=int, help="numbers of rows to measure (default: that of --config)")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each contender")
    parser.add_argument("--steps", type=int, default=1, help="steps per turn")
    parser.add_argument("--rss", action="store_true", help="measure the memory of a step in a separate process")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    c = read_config(args.config)
    if args.alone:
        print(json.dumps(step_memory(args.impl, c)))
        return
    names = [args.impl, *args.vs]
    sizes, has_failed = args.rows or [c["rows"]], False
    contenders, failures = agreeing_contenders(names, {**c, "rows": min(sizes)})
    lines: list[dict[str, Any]] = [{"impl": name, "failed": reason} for name, reason in failures.items()]
    for rows in sizes:
        config = {**c, "rows": rows}
        lines += race(contenders, config, args.rounds, args.steps)
        for line in lines:
            if args.rss and "failed" not in line:
                line["step_mb"] = step_memory_in_subprocess(line["impl"], config)
            line |= {"config": config_of_contender(line["impl"], config), "torch": torch.__version__}
            print(json.dumps(line), flush=True)
            has_failed |= "failed" in line
        lines = []
    sys.exit(has_failed)


if __name__ == "__main__":
    main()
