"""What a training step (forward and backward, fp32) costs as one size grows at a time: processor time and peak memory.

python benchmarks/speed/scaling.py > lines.jsonl                     window, memory, rows, layers and width around a base
python benchmarks/speed/scaling.py --sweep window --attention cpu    one layer, one head, one row, causal, in windows of 512 to 8192 tokens
python benchmarks/speed/scaling.py --plot scale.png < lines.jsonl    draw what was measured

One JSON line a point, each measured in processes of its own (Linux). In turns with the base: `cpu_ms` and `times_base`, medians, the latter
of pairs. Alone: `step_mb`, what a step takes at its fullest moment above weights, gradients, batch and memory. Beside them, what the
formulas say: operations (pretrain/planning/flops.py), `gflop` executed with every score and `needed_gflop`, and both in proportion to the base's; and
`planned_mb`, tensors of a step whose attention is torch's (`sdpa`; pretrain/planning/activation_memory.py) and the memory for the next window.
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

from evaluation import causal_batch

from benchmarks.common.contenders import random_batch
from pretrain.config import PretrainConfig
from pretrain.planning.activation_memory import activation_memory
from pretrain.planning.flops import batch_shape, flops_by_part, flops_per_step
from xlpre.common.plots import new_figure, save_figure
from xlpre.data.window_layout import DataConfig
from xlpre.model.config import ModelConfig
from xlpre.model.language_model import LanguageModel
from xlpre.model.memory import Memory
from xlpre.objectives.objective import ObjectiveConfig

Point = dict[str, Any]
SWEEPS: dict[str, tuple[Point, dict[str, list[int]]]] = {  # a base, and what each size becomes
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
M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


def config_of(point: Point) -> PretrainConfig:
    """Permutation with half of the window reused, one token in six a target; or causal."""
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
    """A training step at a point."""

    def __init__(self, point: Point) -> None:
        torch.manual_seed(0)
        config, rows = config_of(point), point["rows"]
        self._model = LanguageModel(config.model, two_streams=not point["causal"])
        sizes = {"reuse_len": config.data.reuse_len, "partial_k": config.objective.partial_k, "seed": 0}
        tokens = torch.randint(point["vocab_size"], (rows, point["window"] + 1))
        self._batch = causal_batch(tokens, point["window"]) if point["causal"] else random_batch({**point, **sizes})
        hidden = torch.randn(point["n_layer"], rows, point["mem_len"], point["d_model"])
        self._memory = Memory(hidden, torch.full((rows,), point["mem_len"]))
        for parameter in self._model.parameters():
            parameter.grad = torch.full_like(parameter, 0.0)  # written to, so that it is there before

    def __call__(self) -> None:
        loss, _ = self._model(self._batch, self._memory)
        loss.backward()


def time_of(point: Point, base: Point, rounds: int) -> dict[str, float]:
    """Processor milliseconds, and how many times the base's."""
    steps, took = {"point": Step(point), "base": Step(base)}, {"point": [], "base": []}  # type: ignore[var-annotated]
    for number in range(rounds + 1):
        for name, step in steps.items():
            begun = time.process_time()
            step()
            if number:  # the first warms up
                took[name].append(1e3 * (time.process_time() - begun))
    times = statistics.median(p / b for p, b in zip(took["point"], took["base"], strict=True))
    return {"cpu_ms": round(statistics.median(took["point"]), 2), "times_base": round(times, 3)}


def memory_of(point: Point) -> dict[str, float]:
    """Megabytes of a step above what stood before."""

    def resident(what: str) -> int:
        return int(re.findall(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text("utf-8"))[0])

    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65536)  # larger tensors are handed back when they are gone
    step = Step(point)
    step()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak begins anew
    before = resident("VmRSS")
    step()
    return {"step_mb": round((resident("VmHWM") - before) / 1024, 2)}


def foretold(point: Point, base: Point) -> dict[str, float]:
    """What the formulas say."""
    counts: dict[str, list[float]] = {"gflop": [], "needed_gflop": []}
    for one in (point, base):
        config = config_of(one)
        shape = batch_shape(config, one["rows"])
        counts["gflop"].append(sum(flops_by_part(config.model, shape).values()) / 1e9)
        counts["needed_gflop"].append(flops_per_step(config.model, shape) / 1e9)
    config = config_of(point)
    by_torch = dataclasses.replace(config.model, attention_backend="sdpa")  # what plans foretell: `cpu` looks at data
    found = activation_memory(by_torch, batch_shape(config, point["rows"]), torch.float32, gpu=False)
    next_memory = 4 * point["n_layer"] * point["rows"] * point["mem_len"] * point["d_model"]
    return {
        **{name: round(mine, 4) for name, (mine, _) in counts.items()},
        **{f"{name}_of_base": round(mine / of_base, 3) for name, (mine, of_base) in counts.items()},
        "planned_mb": round((found.peak + next_memory) / 2**20, 2),
    }


def alone(work: Callable[..., dict[str, float]], *given: object) -> dict[str, float]:
    """What `work` finds in a process of its own; here no tensor is computed, so that it begins as if none had been."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(work, given)


def draw(lines: list[dict[str, Any]], path: Path) -> None:
    """Time and memory against each size, with what the formulas say."""
    sweeps = list(dict.fromkeys((line["size"], line["attention"]) for line in lines))
    figure = new_figure(3.2 * len(sweeps) + 1, 6.4)
    axes = figure.subplots(2, len(sweeps), squeeze=False)
    for column, (size, attention) in enumerate(sweeps):
        points = [line for line in lines if (line["size"], line["attention"]) == (size, attention)]
        at = [line["value"] for line in points]
        base_ms = statistics.median(line["cpu_ms"] / line["times_base"] for line in points)
        time_axis, memory_axis = axes[:, column]
        time_axis.plot(at, [base_ms * line["times_base"] for line in points], "o-", label="measured")
        for name, style in (("gflop", "--"), ("needed_gflop", ":")):
            label = f"base x {name.replace('_', ' ')}"
            time_axis.plot(at, [base_ms * line[f"{name}_of_base"] for line in points], style, label=label)
        memory_axis.plot(at, [line["step_mb"] for line in points], "o-", label="measured")
        memory_axis.plot(at, [line["planned_mb"] for line in points], "--", label="planned (sdpa)")
        for axis, unit in ((time_axis, "processor ms a step"), (memory_axis, "MB of a step")):
            if min(at):  # a memory of none is on no logarithmic axis
                axis.set_xscale("log", base=2)
                axis.set_yscale("log", base=2)
            axis.set_xticks(at, [str(value) for value in at], rotation=45)
            axis.minorticks_off()
            axis.set(xlabel=size, title=f"attention={attention}", ylabel=unit if column == 0 else "")
            axis.yaxis.set_major_formatter("{x:g}")
    axes[0, 0].legend(fontsize="small")
    axes[1, 0].legend(fontsize="small")
    save_figure(figure, path, dpi=110)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", choices=SWEEPS, default="step")
    parser.add_argument("--attention", default="auto", help="model.attention_backend")
    parser.add_argument("--base", type=json.loads, default={}, help="JSON: sizes of the base that are others")
    parser.add_argument("--values", type=json.loads, help="JSON: lists of what each size becomes, in place of all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--plot", type=Path, help="draw the lines of standard input to this file; nothing is measured")
    words = parser.parse_args()
    if words.plot:
        draw([json.loads(line) for line in sys.stdin], words.plot)
        return
    torch.set_num_threads(1)
    base, values = SWEEPS[words.sweep]
    base = {**base, **words.base, "attention": words.attention}
    for size, becomes in (words.values or values).items():
        for value in becomes:
            point = {**base, size: value}
            line = {"size": size, "value": value, "attention": words.attention}
            line |= alone(time_of, point, base, words.rounds)
            line |= alone(memory_of, point)
            line |= alone(foretold, point, base)
            print(json.dumps({**line, "base": base, "torch": torch.__version__}), flush=True)


if __name__ == "__main__":
    main()
