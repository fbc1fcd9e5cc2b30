"""What benchmarks/gpu/report.py runs, in its order."""

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
MODELS = ("omegaconf", "safetensors", "sentencepiece", "transformers")
TRAINING = (*MODELS, "datasets", "deepspeed", "google_crc32c", "hjson", "pydantic")
ON_ALL_CORES = ["-n", "12"] if find_spec("xdist") else []
KERNEL_TESTS = tuple(
    f"tests/unit/model/kernels/triton/test_{name}.py" for name in ("attention", "dropout", "panels", "fused_ops")
)
WINDOWS_TINY = ["--rows", "1", "--heads", "2", "--width", "16"]
ROWS_TINY = ["--rows", "9", "--width", "24", "--dtype", "fp32", "--device", "cpu", "--repeats", "2", "--no-compiled"]
ONE_LAYER = {"rows": 1, "heads": 2, "width": 16, "window": 32, "memory": 16, "targets": 5}


class Part(NamedTuple):
    """Of the report.

    Attributes:
        name: of it.
        seconds: that it may take.
        words: of its command, after `python`.
        without: why it is left out, if it is.
        needs: packages that it imports besides torch.
    """

    name: str
    seconds: float
    words: list[str]
    without: str = ""
    needs: tuple[str, ...] = ()

    @property
    def left_out(self) -> str:
        """Why, if it is."""
        missing = [name for name in self.needs if find_spec(name) is None]
        return self.without or (f"not installed: {', '.join(missing)}; see the beginning of gpu.py" if missing else "")


def step(shape: dict[str, Any], rows: list[int], impl: str, *vs: str, turns: tuple[int, int] = (5, 3)) -> list[str]:
    """A command of step.py; `turns`: how many, and steps of each."""
    against = ["--vs", *vs] if vs else []
    sizes = ["--rows", *map(str, rows), "--rounds", str(turns[0]), "--steps", str(turns[1])]
    return ["step.py", "--config", json.dumps(shape), "--impl", impl, *against, *sizes]


def parts(folder: Path) -> list[Part]:
    """On a GPU, the most wanted first."""
    small = {**BASE, "n_layer": 2, "dropout": 0.0}
    train = ["pretraining.py", "--folder", str(folder), "--minutes", "0.6", "model.attention_backend=triton"]
    tests = [
        "-m",
        "pytest",
        "-q",
        "--tb=short",
        "-rf",
        "--noconftest",
        "-p",
        "no:cacheprovider",
        *ON_ALL_CORES,
        *KERNEL_TESTS,
    ]
    layers, whole = "xlpre:triton:layers", "xlpre:triton:whole"
    return [
        Part("ceilings", 60, ["gpu.py", "--ceilings"]),
        Part("tests", 120, tests, needs=("pytest", "hypothesis")),
        Part("attention bf16", 60, ["kernels.py", "--dropout", "0.1"]),
        Part("between bf16", 60, ["between.py"]),
        Part("step large layers", 90, step(LARGE, [32], layers, turns=(4, 3)), needs=MODELS),
        Part("step base layers", 60, step(BASE, [64], layers, turns=(4, 3)), needs=MODELS),
        Part("trial", 90, ["-m", "xlpre.model.kernels.selfcheck.selfcheck", "cuda", "bfloat16", "64"]),
        Part("step large", 100, step(LARGE, [16], "xlpre:triton", "xlpre:sdpa", "hf"), needs=MODELS),
        Part("step base", 90, step(BASE, [32], "xlpre:triton", "xlpre:sdpa", "hf"), needs=MODELS),
        Part("windows", 60, ["windows.py"]),
        Part("tiles", 100, ["tiles.py", "--seconds", "30"]),
        Part("pretraining", 200, train, needs=TRAINING),
        Part("attention fp32", 60, ["kernels.py", "--dropout", "0.1", "--dtype", "fp32", "--rows", "2", "--repeats", "3"]),
        Part("compiled is eager", 60, step(small, [4], layers, whole, "xlpre:triton", turns=(2, 1)), needs=MODELS),
        Part("step large compiled", 90, step(LARGE, [8, 16], layers, "xlpre:triton"), needs=MODELS),
        Part("step base compiled", 180, step(BASE, [16], layers, "xlpre:sdpa:layers", "hf-compile", whole), needs=MODELS),
        Part("rows base", 60, step(BASE, [4, 8, 16, 32, 64, 128], "xlpre:triton", turns=(3, 3)), needs=MODELS),
        Part("graphs base", 150, step(BASE, [4, 16], "xlpre:triton:reduce-overhead", layers), needs=MODELS),
        Part("attention 64 rows", 60, ["kernels.py", "--dropout", "0.1", "--rows", "64", "--backends", "sdpa", "triton"]),
        Part("step large whole", 240, step(LARGE, [8], layers, whole), needs=MODELS),
        Part("step large hf-compile", 300, step(LARGE, [8], layers, "hf-compile"), needs=MODELS),
    ]  # fmt: skip


def tiny_parts(folder: Path) -> list[Part]:
    """The same on a processor."""
    shape = [word for name, value in ONE_LAYER.items() for word in (f"--{name}", str(value))]
    shape += ["--device", "cpu", "--dtype", "fp32", "--repeats", "2"]
    interpreted = (
        "" if os.environ.get("TRITON_INTERPRET") == "1" else "triton's kernels need a GPU or TRITON_INTERPRET=1"
    )
    without = interpreted if find_spec("triton") else "the package triton is not installed"
    debug = str(REPOSITORY / "configs" / "pretrain" / "debug.yaml")
    small = [
        "text.max_chars=1000000",
        "tokenizer.vocab_size=1000",
        "train.global_batch_size=4",
        "train.steps=30",
        "train.hours=null",
    ]
    small += ["train.log_every=5", "train.save_every=10", "schedule.warmup_steps=5", "optim.lr=1e-3"]
    return [
        Part("ceilings", 60, ["gpu.py", "--ceilings"]),
        Part("attention", 60, ["kernels.py", "--dropout", "0.1", *shape]),
        Part("attention by triton", 60, ["kernels.py", "--dropout", "0.1", *shape, "--backends", "triton"], without),
        Part("between", 60, ["between.py", *ROWS_TINY], without),
        Part("windows", 60, ["windows.py", "--windows", "16", "32", "--backends", "sdpa", *WINDOWS_TINY]),
        Part("step", 60, step(TINY, [2, 4], "xlpre:cpu", "xlpre:sdpa", "hf", turns=(2, 1)), needs=MODELS),
        Part(
            "step compiled",
            240,
            step({**TINY, "n_layer": 1}, [2], "xlpre:sdpa:layers", "xlpre:sdpa", turns=(2, 1)),
            needs=MODELS,
        ),
        Part("tiles", 240, ["tiles.py", *shape, "--workers", "0", "--most", "2"], without),
        Part(
            "pretraining", 200, ["pretraining.py", "--folder", str(folder), "--config", debug, *small], needs=TRAINING
        ),
    ]
