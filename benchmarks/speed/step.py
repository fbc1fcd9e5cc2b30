r"""A training step of this project's model, beside Hugging Face's or beside itself with other settings: time, memory, loss.

python benchmarks/speed/step.py --config '{"n_layer": 4, "window": 512, "mem_len": 384, "reuse_len": 256, "rows": 2}' --vs hf
python benchmarks/speed/step.py --impl xlpre --config config.json --rss
python benchmarks/speed/step.py --impl xlpre:triton:layers --vs xlpre:triton xlpre:sdpa hf hf-compile --rows 8 16 --config \
    '{"device": "cuda", "dtype": "bf16", "optimizer": true, "n_layer": 12, "d_model": 768, "n_head": 12, "d_inner": 3072,
      "vocab_size": 32000, "window": 512, "mem_len": 384, "reuse_len": 256, "dropout": 0.1}'

A contender is `hf`, `hf-compile`, or `xlpre[:attention[:compile]]`, compile being `whole`, `layers` or a mode of torch.compile. Those of
one command take turns in one process, on the same weights and the same batch. None is timed whose loss and gradient of any parameter, in
fp32, without dropout and before anything is compiled, are not those of the last one; and on a GPU, without dropout, none whose norm of
all gradients in `dtype`, compiled, is not that of the first. One JSON line for each contender and number of rows; one that fails says why
in its line, and the others go on; then the status is 1. Ratios are medians of pairs, of `cpu_ms`, processor time, which neighbours
disturb least, or on a GPU of wall time. `mfu` is of the maker's peak, by the formula of pretrain/planning/flops.py. `step_mb` is the peak of a step
above what stood before it: of tensors on a GPU; with `--rss`, of a process of its own on a CPU. `activation_mb` is what a row leaves for
the backward pass. With `optimizer`, a step includes AdamW (fused), and weights, gradients and moments are all in `dtype`.
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

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin slow each other down many times on shared cores

from pathlib import Path

import psutil
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from benchmarks.common.agreement import agreeing_contenders, format_exception
from benchmarks.common.contenders import DEFAULT, Contender, data_of, list_settings, needed_flops
from benchmarks.common.json_config import read_json_config
from xlpre.data.window_layout import DataConfig
from xlpre.training.deepspeed_engine import PRECISIONS
from xlpre.training.device_specs import find_device_spec

NEAR_NORM = 1e-2  # of all gradients, in the precision that is timed


class Clock:
    """Milliseconds of steps, on a device that works on its own."""

    def __init__(self, c: dict[str, Any]) -> None:
        self._on_gpu = c["device"] != "cpu"

    def wait(self) -> None:
        """Until the device is done."""
        if self._on_gpu:
            torch.cuda.synchronize()

    def time(self, one: Contender, steps: int) -> tuple[float, float]:
        """Of a step, one of several in a row: on the wall, and of the processor."""
        self.wait()
        begun, used = time.perf_counter(), time.process_time()
        for _ in range(steps):
            one.step()
        self.wait()
        return 1e3 * (time.perf_counter() - begun) / steps, 1e3 * (time.process_time() - used) / steps


def norm_of_gradients(one: Contender) -> float:
    """Of all; they are not kept."""
    one.loss().backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in one.model.parameters() if p.grad is not None]).item()
    one.model.zero_grad(set_to_none=True)
    return norm


def begin(one: Contender, c: dict[str, Any]) -> dict[str, Any]:
    """The loss of a first step, how long it took, being compiled perhaps, and what a step takes of a GPU's memory."""
    one.feed(c, *data_of(c, PRECISIONS[c["dtype"]]))
    since = time.perf_counter()
    line: dict[str, Any] = {"loss": round(one.step().item(), 6)}
    line["first_step_s"] = round(time.perf_counter() - since, 1)
    if c["device"] == "cpu":
        return line
    one.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    stood = torch.cuda.memory_allocated()
    one.step()
    line["step_mb"] = round((torch.cuda.max_memory_allocated() - stood) / 2**20, 1)
    loss = one.loss()
    line["activation_mb"] = round((torch.cuda.memory_allocated() - stood) / 2**20 / c["rows"], 1)
    del loss
    line["gradient_norm"] = round(norm_of_gradients(one), 6)
    return line


def race(found: dict[str, Contender], c: dict[str, Any], rounds: int, steps: int) -> list[dict[str, Any]]:
    """A line for each; they take turns."""
    clock, lines, running = Clock(c), {}, dict(found)  # type: Clock, dict[str, dict[str, Any]], dict[str, Contender]
    took: dict[str, list[tuple[float, float]]] = {}
    for name, one in found.items():
        try:
            lines[name] = {"impl": name, **begin(one, c)}
            check_gradients(lines, name, c)
            took[name] = [clock.time(one, steps)]
        except (Exception, KeyboardInterrupt):  # asked to stop, it says what is known of those before
            lines[name] = {"impl": name, "failed": format_exception()}
            one.model.zero_grad(set_to_none=True)
            del running[name]
        else:
            if c["device"] != "cpu":  # the next may be compiled for longer than there is time
                print(json.dumps({**lines[name], **speeds(took[name], c), "first": True, "config": c}), flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        for _ in range(rounds - 1):
            for name, one in running.items():
                gc.collect()
                took[name].append(clock.time(one, steps))
    for name in running:
        lines[name] |= speeds(took[name], c)
        first = next(iter(running))
        if name != first:
            which = int(c["device"] == "cpu")  # processor time, or the wall's
            pairs = zip(took[name], took[first], strict=False)
            lines[first].setdefault("times_as_fast_as", {})[name] = round(
                statistics.median(theirs[which] / ours[which] for theirs, ours in pairs), 3
            )
    return list(lines.values())


def check_gradients(lines: dict[str, dict[str, Any]], name: str, c: dict[str, Any]) -> None:
    """Raise ValueError if the gradient of one is not that of the first; nothing is known of it where dropout is drawn, or on a CPU."""
    norms = [line["gradient_norm"] for line in (*lines.values(), lines[name]) if "gradient_norm" in line]
    if norms and not c["dropout"] and not abs(norms[-1] - norms[0]) <= NEAR_NORM * norms[0]:
        raise ValueError(f"the norm of its gradients is {norms[-1]}, and that of the first {norms[0]}")


def speeds(took: list[tuple[float, float]], c: dict[str, Any]) -> dict[str, Any]:
    """What the times of steps mean."""
    wall, cpu = (statistics.median(times) for times in zip(*took, strict=True))
    flops = needed_flops(c) / wall * 1e3
    known = find_device_spec(torch.cuda.get_device_name()) if c["device"] != "cpu" else None
    return {
        "cpu_ms": round(cpu, 1),
        "wall_ms": round(wall, 2),
        "tokens_per_second": round(c["rows"] * c["window"] / wall * 1e3, 1),
        "tflops": round(flops / 1e12, 4),
        "mfu": round(flops / known.flops, 4) if known else None,
    }


def memory_of_a_step(name: str, c: dict[str, Any]) -> float:
    """MB above what stood before, in this process."""
    one = agreeing_contenders([name], c)[0][name]
    begin(one, c)
    gc.collect()
    process, most, running = psutil.Process(), [0], [True]
    before = process.memory_info().rss

    def watch() -> None:
        while running:
            most[0] = max(most[0], process.memory_info().rss)
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    one.step(), one.step()
    running.clear()
    watcher.join()
    return (most[0] - before) / 2**20


def memory_alone(name: str, c: dict[str, Any]) -> float:
    """The same, of a process of its own."""
    again = [sys.executable, __file__, "--config", json.dumps(c), "--impl", name, "--alone"]
    make_environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    alone = subprocess.run(again, capture_output=True, text=True, check=True, env=make_environment)
    return round(json.loads(alone.stdout.splitlines()[-1]), 1)


def configuration(given: str) -> dict[str, Any]:
    """That of JSON, or of a file of it, if a training could have it."""
    c = read_json_config(given, DEFAULT)
    try:
        DataConfig(seq_len=c["window"], reuse_len=c["reuse_len"])
    except ValueError as error:
        raise SystemExit(f"--config: {error}") from None
    return c


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--config", default="{}", help="JSON, or a file of it; what is left out is as in contenders.DEFAULT"
    )
    parser.add_argument("--impl", default="xlpre")
    parser.add_argument("--vs", nargs="+", default=[])
    parser.add_argument("--rows", nargs="+", type=int, help="micro-batches, one after the other; else that of --config")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=1, help="of a turn")
    parser.add_argument("--rss", action="store_true")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    words = parser.parse_args()
    c = configuration(words.config)
    if words.alone:
        print(json.dumps(memory_of_a_step(words.impl, c)))
        return
    names = [words.impl, *words.vs]
    sizes, bad = words.rows or [c["rows"]], False
    found, failed = agreeing_contenders(names, {**c, "rows": min(sizes)})
    lines: list[dict[str, Any]] = [{"impl": name, "failed": reason} for name, reason in failed.items()]
    for rows in sizes:
        now = {**c, "rows": rows}
        lines += race(found, now, words.rounds, words.steps)
        for line in lines:
            if words.rss and "failed" not in line:
                line["step_mb"] = memory_alone(line["impl"], now)
            print(
                json.dumps({**line, "config": list_settings(line["impl"], now), "torch": torch.__version__}), flush=True
            )
            bad |= "failed" in line
        lines = []
    sys.exit(bad)


if __name__ == "__main__":
    main()
