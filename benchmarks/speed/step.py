r"""Compare time, memory and loss of a training step of xlpre with Hugging Face or with other settings.

python benchmarks/speed/step.py --config '{"n_layer": 4, "window": 512, "mem_len": 384, "reuse_len": 256, "rows": 2}' --vs hf
python benchmarks/speed/step.py --impl xlpre --config config.json --rss
python benchmarks/speed/step.py --impl xlpre:triton:layers --vs xlpre:triton xlpre:sdpa hf hf-compile --rows 8 16 --config \
    '{"device": "cuda", "dtype": "bf16", "optimizer": true, "n_layer": 12, "d_model": 768, "n_head": 12, "d_inner": 3072,
      "vocab_size": 32000, "window": 512, "mem_len": 384, "reuse_len": 256, "dropout": 0.1}'

A contender is `hf`, `hf-compile`, or `xlpre[:attention[:compile]]`, where `attention` is an attention backend and `compile` is
`whole`, `layers` or a mode of torch.compile. The contenders of one command take turns in one process, with equal weights and batches.

Before timing, each contender must agree with the last contender: the loss and the gradient of every parameter are compared in fp32,
eager and without dropout. On a GPU, if `dropout` is 0, each contender must also agree with the first: the norm of all gradients is
compared in `dtype` and compiled.

Prints one JSON line per contender and number of rows; on a GPU, also one after its first turn (`first`). If a contender fails, its line
has the reason, and the exit status is 1. An invalid configuration is refused with exit status 2.

    loss, first_step_s  loss of the first step in nats, and its time with compilation in seconds
    cpu_ms, wall_ms     median time of a step
    tokens_per_second, tflops   window tokens and model FLOPs per second of wall time
    times_as_fast_as    speed of the first contender relative to each other contender: median ratio over pairs of turns, of wall time on
                        a GPU, and on a CPU of processor time, which other programs affect least
    mfu                 model FLOPs per second as a fraction of the published peak of a GPU in 16 bits; null in fp32. See
                        pretrain/planning/flops.py
    step_mb             peak memory of a step minus the memory before it: of tensors on a GPU; of a separate process on a CPU (--rss)
    activation_mb       memory per row that the forward pass keeps for the backward pass (GPU only)
    gradient_norm       norm of all gradients of the first step (GPU only)

With CUDA graphs, step_mb and activation_mb are left out: the memory is allocated when the graphs are recorded.

If `optimizer` is true, a step includes fused AdamW. Weights, gradients and moments have the type `dtype`.
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
from benchmarks.common.contenders import (
    DEFAULT,
    Contender,
    check_config,
    config_of_contender,
    make_inputs,
    needed_flops,
)
from benchmarks.common.json_config import read_json_config
from pretrain.trainer.logger import peak_flops
from xlpre.common.cli_main import run_main
from xlpre.common.errors import InputError, check_minimum
from xlpre.training.deepspeed_engine import PRECISIONS

GRADIENT_NORM_TOLERANCE = 1e-2  # relative difference of the norm of all gradients, in the precision that is timed


class Clock:
    """Measures the time of training steps. On a GPU it waits until all kernels have finished."""

    def __init__(self, c: dict[str, Any]) -> None:
        self._on_gpu = c["device"] != "cpu"

    def synchronize(self) -> None:
        """Wait until the GPU has finished all kernels. Does nothing on a CPU."""
        if self._on_gpu:
            torch.cuda.synchronize()

    def time(self, contender: Contender, steps: int) -> tuple[float, float]:
        """Run `steps` training steps. Returns the mean wall time and the mean processor time of a step, in milliseconds."""
        self.synchronize()
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            contender.step()
        self.synchronize()
        return 1e3 * (time.perf_counter() - wall) / steps, 1e3 * (time.process_time() - cpu) / steps


def gradient_norm(contender: Contender) -> float:
    """Run a forward and a backward pass, and return the norm of all gradients."""
    contender.loss().backward()
    gradients = [p.grad for p in contender.model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients).item()
    contender.model.zero_grad(set_to_none=True)
    return norm


def first_steps(contender: Contender, c: dict[str, Any]) -> dict[str, Any]:
    """Run the first steps. Returns the loss and seconds of the first step (with compilation) and, on a GPU, memory and gradient norm."""
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
    step_bytes = torch.cuda.max_memory_allocated() - allocated
    loss = contender.loss()
    activation_bytes = torch.cuda.memory_allocated() - allocated
    del loss
    if not contender.has_cuda_graphs:
        line["step_mb"] = round(step_bytes / 2**20, 1)
        line["activation_mb"] = round(activation_bytes / 2**20 / c["rows"], 1)
    line["gradient_norm"] = round(gradient_norm(contender), 6)
    return line


def race(contenders: dict[str, Contender], c: dict[str, Any], rounds: int, steps: int) -> list[dict[str, Any]]:
    """Time contenders in turns, `rounds` times `steps` steps each. Returns the JSON line of each contender."""
    clock, running = Clock(c), dict(contenders)
    lines: dict[str, dict[str, Any]] = {}
    times: dict[str, list[tuple[float, float]]] = {}
    for name, contender in contenders.items():
        try:
            lines[name] = {"impl": name, **first_steps(contender, c)}
            check_gradient_norm(lines, name, c)
            times[name] = [clock.time(contender, steps)]
        except (Exception, KeyboardInterrupt):  # after an interrupt, the other contenders are still timed and printed
            lines[name] = {"impl": name, "failed": format_exception()}
            contender.model.zero_grad(set_to_none=True)
            del running[name]
        else:
            if c["device"] != "cpu":  # print now, because compiling the next contender may exceed the time limit
                first_line = {
                    **lines[name],
                    **speed(times[name], c),
                    "first": True,
                    "config": config_of_contender(name, c),
                }
                print(json.dumps(first_line), flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        for turn in range(1, rounds):
            for name, contender in list(running.items())[:: -1 if turn % 2 else 1]:
                gc.collect()
                times[name].append(clock.time(contender, steps))
    n_turns = min((len(times[name]) for name in running), default=0)
    for name in running:
        # the first turns are minutes apart if contenders are compiled; an interrupt may have left out a last turn
        times[name] = times[name][1:n_turns] if n_turns > 1 else times[name]
        lines[name] |= speed(times[name], c)
        first = next(iter(running))
        if name != first:
            which = int(c["device"] == "cpu")  # index of wall or processor time
            pairs = zip(times[name], times[first], strict=True)
            ratio = statistics.median(theirs[which] / ours[which] for theirs, ours in pairs)
            lines[first].setdefault("times_as_fast_as", {})[name] = round(ratio, 3)
    return list(lines.values())


def check_gradient_norm(lines: dict[str, dict[str, Any]], name: str, c: dict[str, Any]) -> None:
    """Raise InputError if the gradient norms of this and the first contender differ. Checks nothing with dropout or on a CPU."""
    norms = [line["gradient_norm"] for line in (*lines.values(), lines[name]) if "gradient_norm" in line]
    if norms and not c["dropout"] and not abs(norms[-1] - norms[0]) <= GRADIENT_NORM_TOLERANCE * norms[0]:
        raise InputError(
            f"gradients do not agree: their norm is {norms[-1]}, but that of the first contender is {norms[0]}"
        )


def speed(times: list[tuple[float, float]], c: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics of speed, given the wall time and processor time of a step in each turn, in milliseconds."""
    wall, cpu = (statistics.median(values) for values in zip(*times, strict=True))
    flops = needed_flops(c) / wall * 1e3
    peak = peak_flops(torch.device(c["device"]), PRECISIONS[c["dtype"]])
    return {
        "cpu_ms": round(cpu, 1),
        "wall_ms": round(wall, 2),
        "tokens_per_second": round(c["rows"] * c["window"] / wall * 1e3, 1),
        "tflops": round(flops / 1e12, 4),
        "mfu": round(flops / peak, 4) if peak else None,
    }


def step_memory(name: str, c: dict[str, Any]) -> float:
    """Run a step in this process. Return its peak resident memory minus the memory before it, in MiB."""
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


def step_memory_in_subprocess(name: str, c: dict[str, Any]) -> dict[str, Any]:
    """Start a separate process that runs `step_memory`. Return its result as `step_mb`, or the end of its errors as `failed_rss`."""
    command = [sys.executable, __file__, "--config", json.dumps(c), "--impl", name, "--alone"]
    variables = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    result = subprocess.run(command, capture_output=True, text=True, env=variables)
    if result.returncode:
        return {"failed_rss": f"exit status {result.returncode}: {result.stderr[-1000:]}"}
    return {"step_mb": round(json.loads(result.stdout.splitlines()[-1]), 1)}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--config",
        default="{}",
        help="JSON object, or a file with one; benchmarks/common/contenders.py has the defaults",
    )
    parser.add_argument("--impl", default="xlpre", help="first contender")
    parser.add_argument("--vs", nargs="+", default=[], help="other contenders")
    parser.add_argument(
        "--rows", nargs="+", type=int, help="numbers of rows of the batch to measure (default: `rows` of --config)"
    )
    parser.add_argument("--rounds", type=int, default=9, help="turns of each contender")
    parser.add_argument("--steps", type=int, default=1, help="steps per turn")
    parser.add_argument("--rss", action="store_true", help="measure the memory of a step in a separate process")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    c, names = read_json_config(args.config, DEFAULT), [args.impl, *args.vs]
    sizes, has_failed = args.rows or [c["rows"]], False
    for option in ("rounds", "steps"):
        check_minimum(f"--{option}", getattr(args, option), 1)
    for rows in sizes:
        check_config(names, {**c, "rows": rows})
    if args.rss and c["device"] != "cpu":
        raise InputError("--rss is invalid with device=cuda: step_mb is measured without it. Leave it out.")
    if args.alone:
        print(json.dumps(step_memory(args.impl, c)))
        return
    contenders, failures = agreeing_contenders(names, {**c, "rows": min(sizes)})
    lines: list[dict[str, Any]] = [{"impl": name, "failed": reason} for name, reason in failures.items()]
    for rows in sizes:
        config = {**c, "rows": rows}
        lines += race(contenders, config, args.rounds, args.steps)
        for line in lines:
            if args.rss and "failed" not in line:
                line |= step_memory_in_subprocess(line["impl"], config)
            line |= {"config": config_of_contender(line["impl"], config), "torch": torch.__version__}
            print(json.dumps(line), flush=True)
            has_failed |= "failed" in line or "failed_rss" in line
        lines = []
    sys.exit(has_failed)


if __name__ == "__main__":
    run_main(main)
