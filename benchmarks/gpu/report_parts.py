"""The parts that benchmarks/gpu/report.py runs, in the order in which it runs them."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common.processes import REPOSITORY

BASE = {
    "n_layer": 12,
    "d_model": 768,
    "n_head": 12,
    "d_inner": 3072,
    "vocab_size": 32000,
    "window": 512,
    "mem_len": 384,
}
BASE |= {"reuse_len": 256, "dropout": 0.1, "device": "cuda", "dtype": "bf16", "optimizer": True, "threads": 8}
LARGE = {**BASE, "n_layer": 24, "d_model": 1024, "n_head": 16, "d_inner": 4096}
TINY = {"n_layer": 2, "d_model": 32, "n_head": 2, "d_inner": 64, "vocab_size": 100, "window": 32, "mem_len": 16}
TINY |= {"reuse_len": 16, "dropout": 0.1, "optimizer": True}
MODEL_PACKAGES = ("omegaconf", "safetensors", "sentencepiece", "transformers")
TRAINING_PACKAGES = (*MODEL_PACKAGES, "datasets", "deepspeed", "google_crc32c", "hjson", "pydantic")
XDIST = ["-n", "12"] if find_spec("xdist") else []
KERNEL_TESTS = tuple(
    f"tests/unit/model/kernels/triton/test_{name}.py" for name in ("attention", "dropout", "panels", "fused_ops")
)
PYTEST = ["-m", "pytest", "-q", "--tb=short", "-rf", "-p", "no:cacheprovider", *XDIST]
GRAPH_TESTS = "tests/unit/pretrain/test_cuda_graphs.py"
REPORT = "gpu/report.py"
ATTENTION, FUSED_OPS, TILES, WINDOWS = "speed/attention.py", "gpu/fused_ops.py", "gpu/tiles.py", "gpu/window_length.py"
PRETRAINING, KERNEL_TIMES = "reliability/killed_pretraining.py", "gpu/kernel_times.py"
TINY_WINDOWS = ["--windows", "16", "32", "--backends", "sdpa", "--rows", "1", "--heads", "2", "--width", "16"]
TINY_FUSED = ["--rows", "9", "--width", "24", "--dtype", "fp32", "--device", "cpu", "--repeats", "2", "--no-compiled"]
TINY_ATTENTION = {"rows": 1, "heads": 2, "width": 16, "window": 32, "memory": 16, "targets": 5}


class Part(NamedTuple):
    """A part of the report.

    Attributes:
        name: name of the part, as in --only.
        seconds: time limit in seconds.
        args: arguments of `python`; the path of a script is relative to benchmarks/.
        skip_reason: reason to skip the part, other than missing packages; empty if the part runs.
        packages: packages that the part imports besides torch.
    """

    name: str
    seconds: float
    args: list[str]
    skip_reason: str = ""
    packages: tuple[str, ...] = ()

    @property
    def skipped(self) -> str:
        """Reason to skip the part, which may be missing packages; empty if the part runs."""
        missing = [name for name in self.packages if find_spec(name) is None]
        return self.skip_reason or (f"not installed: {', '.join(missing)}; see `report.py --help`" if missing else "")


def step(shape: dict[str, Any], rows: list[int], impl: str, *vs: str, rounds: int = 5, steps: int = 3) -> list[str]:
    """Return the arguments of `python` that run benchmarks/speed/step.py: time a contender, and the contenders `vs`, with one shape."""
    contenders = ["--impl", impl, *(["--vs", *vs] if vs else [])]
    sizes = ["--rows", *map(str, rows), "--rounds", str(rounds), "--steps", str(steps)]
    return ["speed/step.py", "--config", json.dumps(shape), *contenders, *sizes]


def parts(folder: Path) -> list[Part]:
    """Return the parts that run on a GPU, the most important first. Those of pretraining write into `folder`."""
    small = {**BASE, "n_layer": 2, "dropout": 0.0}

    def train(name: str, *settings: str) -> list[str]:
        return [
            PRETRAINING,
            "--folder",
            str(folder / name),
            "--minutes",
            "0.6",
            "model.attention_backend=triton",
            *settings,
        ]

    layers, whole, graphs = "xlpre:triton:layers", "xlpre:triton:whole", "xlpre:triton:layers+graphs"
    models, attention = MODEL_PACKAGES, [ATTENTION, "--dropout", "0.1"]
    return [
        Part("ceilings", 60, [REPORT, "--ceilings"]),
        Part("tests", 120, [*PYTEST, "--noconftest", *KERNEL_TESTS], packages=("pytest", "hypothesis")),
        Part("tests of graphs", 60, [*PYTEST, "--noconftest", GRAPH_TESTS], packages=("pytest", *TRAINING_PACKAGES)),
        Part("tests of commands", 240, [*PYTEST, "tests/gpu"], packages=("pytest", "hypothesis", *TRAINING_PACKAGES)),
        Part("attention bf16", 60, attention),
        Part("fused ops bf16", 60, [FUSED_OPS]),
        Part("step large layers", 90, step(LARGE, [32], layers, rounds=4), packages=models),
        Part("step base layers", 60, step(BASE, [64], layers, rounds=4), packages=models),
        Part("selfcheck", 90, ["-m", "xlpre.model.kernels.selfcheck.selfcheck", "cuda", "bfloat16", "64"]),
        Part("step large", 150, step(LARGE, [16], graphs, layers, "xlpre:triton", "xlpre:sdpa", "hf"), packages=models),
        Part("step base", 120, step(BASE, [32], graphs, layers, "xlpre:triton", "xlpre:sdpa", "hf"), packages=models),
        Part("pretraining", 200, train("eager", "train.cuda_graphs=false"), packages=TRAINING_PACKAGES),
        Part("pretraining graphs", 200, train("graphs", "train.cuda_graphs=true"), packages=TRAINING_PACKAGES),
        Part("kernels large", 60, [KERNEL_TIMES, "--impl", layers, "--config", json.dumps({**LARGE, "rows": 16})], packages=models),
        Part("windows", 60, [WINDOWS]),
        Part("tiles", 100, [TILES, "--seconds", "30"]),
        Part("attention fp32", 60, [*attention, "--dtype", "fp32", "--rows", "2", "--repeats", "3"]),
        Part("compiled is eager", 60, step(small, [4], layers, whole, "xlpre:triton", rounds=2, steps=1), packages=models),
        Part("step large compiled", 90, step(LARGE, [8], layers, "xlpre:triton"), packages=models),
        Part("step base compiled", 180, step(BASE, [16], layers, "xlpre:sdpa:layers", "hf-compile", whole), packages=models),
        Part("rows base", 60, step(BASE, [4, 8, 16, 32, 64, 128], "xlpre:triton", rounds=3), packages=models),
        Part("rows base graphs", 60, step(BASE, [4, 16, 64], graphs, rounds=3), packages=models),
        Part("attention 64 rows", 60, [*attention, "--rows", "64", "--backends", "sdpa", "triton"]),
        Part("step large whole", 240, step(LARGE, [8], layers, whole), packages=models),
        Part("step large hf-compile", 300, step(LARGE, [8], layers, "hf-compile"), packages=models),
    ]  # fmt: skip


def tiny_parts(folder: Path) -> list[Part]:
    """Return the parts that --tiny runs on a CPU. The pretraining part writes into `folder`."""
    shape = [argument for name, value in TINY_ATTENTION.items() for argument in (f"--{name}", str(value))]
    shape += ["--device", "cpu", "--dtype", "fp32", "--repeats", "2"]
    if not find_spec("triton"):
        no_triton = "the package triton is not installed"
    elif os.environ.get("TRITON_INTERPRET") != "1":
        no_triton = "Triton's kernels need a GPU, or TRITON_INTERPRET=1 on a CPU"
    else:
        no_triton = ""
    debug = str(REPOSITORY / "configs" / "pretrain" / "debug.yaml")
    settings = ["text.max_chars=1000000", "tokenizer.vocab_size=1000", "train.global_batch_size=4", "train.steps=30"]
    settings += [
        "train.hours=null",
        "train.log_every=5",
        "train.save_every=10",
        "schedule.warmup_steps=5",
        "optim.lr=1e-3",
    ]
    train = [PRETRAINING, "--folder", str(folder), "--config", debug, *settings]
    attention = [ATTENTION, "--dropout", "0.1", *shape]
    one_layer = {**TINY, "n_layer": 1}
    compiled = step(one_layer, [2], "xlpre:sdpa:layers", "xlpre:sdpa", rounds=2, steps=1)
    eager = step(TINY, [2, 4], "xlpre:cpu", "xlpre:sdpa", "hf", rounds=2, steps=1)
    return [
        Part("ceilings", 60, [REPORT, "--ceilings"]),
        Part("attention", 60, attention),
        Part("attention by triton", 60, [*attention, "--backends", "triton"], no_triton),
        Part("fused ops", 60, [FUSED_OPS, *TINY_FUSED], no_triton),
        Part("windows", 60, [WINDOWS, *TINY_WINDOWS]),
        Part("step", 60, eager, packages=MODEL_PACKAGES),
        Part("step compiled", 240, compiled, packages=MODEL_PACKAGES),
        Part("tiles", 240, [TILES, *shape, "--workers", "0", "--max-tiles", "2"], no_triton),
        Part("pretraining", 200, train, packages=TRAINING_PACKAGES),
    ]
