"""Time to build a model from the weights of a model folder, without reading its files.

python benchmarks/speed/model_loading.py [--config '{"init_scheme": "local"}'] [--rounds 5]

The shape is that of XLNet-Base with a vocabulary of 32,000; `--config` changes it. Prints one JSON line with the processor time and the
wall time of each round in seconds, for the language model (`model`) and for the backbone without the query stream (`encoder`).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from xlpre.common.cli_main import run_main
from xlpre.conversion.model_folder import ModelFolder
from xlpre.model.config import ModelConfig
from xlpre.model.language_model import meta_model


def time_calls(function: Callable[[], Any], rounds: int) -> dict[str, list[float]]:
    """Call a function `rounds` times after a warm-up. Return the processor time and the wall time of each call, in seconds."""
    times: dict[str, list[float]] = {"cpu_s": [], "wall_s": []}
    function()
    for _ in range(rounds):
        cpu, wall = time.process_time(), time.perf_counter()
        function()
        times["cpu_s"].append(round(time.process_time() - cpu, 3))
        times["wall_s"].append(round(time.perf_counter() - wall, 3))
    return times


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=json.loads, default={}, help="model settings, as JSON")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(argv)
    shape = ModelConfig(**{"vocab_size": 32000, **args.config})
    parameters = meta_model(shape, two_streams=True).named_parameters()
    weights = {name: torch.zeros(parameter.shape) for name, parameter in parameters}
    folder = ModelFolder(shape, weights, None, "permutation", {}, "xlpre")
    line = {
        "config": args.config,
        "n_parameters": sum(weight.numel() for weight in weights.values()),
        "model": time_calls(folder.model, args.rounds),
        "encoder": time_calls(folder.encoder, args.rounds),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    print(json.dumps(line))


if __name__ == "__main__":
    run_main(main)
