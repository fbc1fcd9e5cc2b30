"""Measure how time and memory of a training step (forward and backward, fp32, CPU) grow with one size of the model or batch.

python benchmarks/speed/scaling.py > lines.jsonl                     change one of window, memory, rows, layers and width
python benchmarks/speed/scaling.py --sweep window --attention cpu    512 to 8192 tokens; one layer, head and row; causal
python benchmarks/speed/scaling.py --plot scale.png < lines.jsonl    plot the lines

A sweep starts from a base (a set of sizes) and changes one size at a time. Prints one JSON line per value of a size, measured in separate
processes (Linux only):

    cpu_ms, times_base      median processor time of a step, and its ratio to that of the base (median over pairs of turns)
    step_mb                 peak memory of a step, minus that of weights, gradients, batch and recurrent memory
    gflop, needed_gflop     FLOPs with all scores, and model FLOPs (pretrain/planning/flops.py); *_of_base: relative to the base
    planned_mb              memory of a step with sdpa that the planner predicts (pretrain/planning/activation_memory.py), and of the
                            recurrent memory that the step returns
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import gc
import json
import multiprocessing
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from benchmarks.common.contenders import random_batch
from pretrain.config import PretrainConfig
from pretrain.planning.activation_memory import activation_memory
from pretrain.planning.flops import batch_shape, flops_by_part, flops_per_step
from xlpre.common.plots import new_figure, save_figure
from xlpre.data.window_layout import DataConfig
from xlpre.inference.context_losses import next_token_batch
from xlpre.model.config import ModelConfig
from xlpre.model.language_model import LanguageModel
from xlpre.model.memory import Memory
from xlpre.objectives.objective import ObjectiveConfig

Point = dict[str, Any]
SWEEPS: dict[str, tuple[Point, dict[str, list[int]]]] = {  # for each sweep, the base and the values of each size
    "step": (
        {"window": 256, "mem_len": 192, "rows": 2, "n_layer": 4, "d_model": 256, "vocab_size": 4000, "causal": False},
        {
            "window": [64, 128, 256, 512, 1024],
            "mem_len": [0, 96, 192, 384, 768],
            "rows": [1, 2, 4, 8],
            "n_layer": [1, 2, 4, 8],
            "d_model": [64, 128, 256, 512],
        },
    ),
    "window": (
        {"window": 512, "mem_len": 0, "rows": 1, "n_layer": 1, "d_model": 64, "vocab_size": 64, "causal": True},
        {"window": [512, 1024, 2048, 4096, 8192]},
    ),
}
D_HEAD = 64
M_MMAP_THRESHOLD = -3  # constant of glibc's malloc.h


def make_config(point: Point) -> PretrainConfig:
    """Return the settings of a point, which is a set of sizes.

    The objective is causal, or permutation with half of the window reused and one target in six tokens.
    """
    width, window = point["d_model"], point["window"]
    model = ModelConfig(
        **{name: point[name] for name in ("vocab_size", "n_layer", "d_model", "mem_len")},
        attention_backend=point["attention"],
        n_head=max(1, width // D_HEAD),
        d_inner=4 * width,
        dropout=0.0,
        dropatt=0.0,
    )
    data = DataConfig(store_dir="none", seq_len=window, reuse_len=window if point["causal"] else window // 2)
    return PretrainConfig(
        model=model, data=data, objective=ObjectiveConfig("causal" if point["causal"] else "permutation")
    )


class Step:
    """A training step of a model and a batch with the sizes of a point. Call it to run forward and backward."""

    def __init__(self, point: Point) -> None:
        torch.manual_seed(0)
        config, rows = make_config(point), point["rows"]
        self._model = LanguageModel(config.model, two_streams=not point["causal"])
        sizes = {"reuse_len": config.data.reuse_len, "partial_k": config.objective.partial_k, "seed": 0}
        tokens = torch.randint(point["vocab_size"], (rows, point["window"] + 1))
        self._batch = next_token_batch(tokens, point["window"]) if point["causal"] else random_batch({**point, **sizes})
        hidden = torch.randn(point["n_layer"], rows, point["mem_len"], point["d_model"])
        self._memory = Memory(hidden, torch.full((rows,), point["mem_len"]))
        for parameter in self._model.parameters():
            parameter.grad = torch.full_like(
                parameter, 0.0
            )  # full_like writes to the memory, so that its pages are resident

    def __call__(self) -> None:
        loss, _ = self._model(self._batch, self._memory)
        loss.backward()


def measure_time(point: Point, base: Point, rounds: int) -> dict[str, float]:
    """Run steps of the point and of the base in turns. Return the processor time in milliseconds, and relative to the base."""
    steps = {"point": Step(point), "base": Step(base)}
    times: dict[str, list[float]] = {"point": [], "base": []}
    for number in range(rounds + 1):
        for name, step in steps.items():
            start = time.process_time()
            step()
            if number:  # the first round is the warm-up
                times[name].append(1e3 * (time.process_time() - start))
    ratio = statistics.median(p / b for p, b in zip(times["point"], times["base"], strict=True))
    return {"cpu_ms": round(statistics.median(times["point"]), 2), "times_base": round(ratio, 3)}


def measure_memory(point: Point) -> dict[str, float]:
    """Run a step in this process. Return its peak memory minus the memory before it, in MiB."""

    def resident_kb(field: str) -> int:
        return int(re.findall(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text("utf-8"))[0])

    ctypes.CDLL(None).mallopt(
        M_MMAP_THRESHOLD, 65536
    )  # larger tensors return their memory to the system when they are freed
    step = Step(point)
    step()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets VmHWM
    before = resident_kb("VmRSS")
    step()
    return {"step_mb": round((resident_kb("VmHWM") - before) / 1024, 2)}


def predict(point: Point, base: Point) -> dict[str, float]:
    """Return FLOPs and memory of a step as pretrain/planning predicts them."""
    counts: dict[str, list[float]] = {"gflop": [], "needed_gflop": []}
    for sizes in (point, base):
        config = make_config(sizes)
        shape = batch_shape(config, sizes["rows"])
        counts["gflop"].append(sum(flops_by_part(config.model, shape).values()) / 1e9)
        counts["needed_gflop"].append(flops_per_step(config.model, shape) / 1e9)
    config = make_config(point)
    model = dataclasses.replace(config.model, attention_backend="sdpa")  # the memory of `cpu` depends on the data
    planned = activation_memory(model, batch_shape(config, point["rows"]), torch.float32, gpu=False)
    next_memory = 4 * point["n_layer"] * point["rows"] * point["mem_len"] * point["d_model"]
    return {
        **{name: round(of_point, 4) for name, (of_point, _) in counts.items()},
        **{f"{name}_of_base": round(of_point / of_base, 3) for name, (of_point, of_base) in counts.items()},
        "planned_mb": round((planned.peak + next_memory) / 2**20, 2),
    }


def run_in_subprocess(function: Callable[..., dict[str, float]], *args: object) -> dict[str, float]:
    """Call `function` in a forked process. This process computes no tensors, so the fork starts without any."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(function, args)


def plot(lines: list[dict[str, Any]], path: Path) -> None:
    """Plot measured and predicted time and memory against each size."""
    sweeps = list(dict.fromkeys((line["size"], line["attention"]) for line in lines))
    figure = new_figure(3.2 * len(sweeps) + 1, 6.4)
    axes = figure.subplots(2, len(sweeps), squeeze=False)
    for column, (size, attention) in enumerate(sweeps):
        points = [line for line in lines if (line["size"], line["attention"]) == (size, attention)]
        values = [line["value"] for line in points]
        base_ms = statistics.median(line["cpu_ms"] / line["times_base"] for line in points)
        time_axis, memory_axis = axes[:, column]
        time_axis.plot(values, [base_ms * line["times_base"] for line in points], "o-", label="measured")
        for name, style in (("gflop", "--"), ("needed_gflop", ":")):
            label = f"base x {name.replace('_', ' ')}"
            time_axis.plot(values, [base_ms * line[f"{name}_of_base"] for line in points], style, label=label)
        memory_axis.plot(values, [line["step_mb"] for line in points], "o-", label="measured")
        memory_axis.plot(values, [line["planned_mb"] for line in points], "--", label="planned (sdpa)")
        for axis, unit in ((time_axis, "processor ms per step"), (memory_axis, "MiB per step")):
            if min(values):  # no value is 0, which a logarithmic axis cannot show
                axis.set_xscale("log", base=2)
                axis.set_yscale("log", base=2)
            axis.set_xticks(values, [str(value) for value in values], rotation=45)
            axis.minorticks_off()
            axis.set(xlabel=size, title=f"attention={attention}", ylabel=unit if column == 0 else "")
            axis.yaxis.set_major_formatter("{x:g}")
    axes[0, 0].legend(fontsize="small")
    axes[1, 0].legend(fontsize="small")
    save_figure(figure, path, dpi=110)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", choices=SWEEPS, default="step", help="which base and sizes to measure")
    parser.add_argument("--attention", default="auto", help="model.attention_backend")
    parser.add_argument("--base", type=json.loads, default={}, help="JSON: sizes of the base to change")
    parser.add_argument(
        "--values", type=json.loads, help="JSON: lists of values by size, instead of those of the sweep"
    )
    parser.add_argument("--rounds", type=int, default=5, help="steps to time")
    parser.add_argument("--plot", type=Path, help="only plot the lines of standard input to this file")
    args = parser.parse_args()
    if args.plot:
        plot([json.loads(line) for line in sys.stdin], args.plot)
        return
    torch.set_num_threads(1)
    base, values = SWEEPS[args.sweep]
    base = {**base, **args.base, "attention": args.attention}
    for size, values_of_size in (args.values or values).items():
        for value in values_of_size:
            point = {**base, size: value}
            line = {"size": size, "value": value, "attention": args.attention}
            line |= run_in_subprocess(measure_time, point, base, args.rounds)
            line |= run_in_subprocess(measure_memory, point)
            line |= run_in_subprocess(predict, point, base)
            print(json.dumps({**line, "base": base, "torch": torch.__version__}), flush=True)


if __name__ == "__main__":
    main()
