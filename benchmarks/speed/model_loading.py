"""Seconds until the weights of a model folder are a model, those of reading its files not counted.

python benchmarks/speed/model_loading.py [--config '{"init": "local"}'] [--rounds 5]

The shape is XLNet-Base's with 32,000 pieces, but for what `--config` says. One JSON line: of the language model and of the backbone
that fine-tuning reads with, the seconds of each turn, of processor time and by the clock.
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


def timed(call: Callable[[], Any], rounds: int) -> dict[str, list[float]]:
    """Seconds of each turn, after one that is not counted."""
    found: dict[str, list[float]] = {"cpu_s": [], "wall_s": []}
    call()
    for _ in range(rounds):
        cpu, wall = time.process_time(), time.perf_counter()
        call()
        found["cpu_s"].append(round(time.process_time() - cpu, 3))
        found["wall_s"].append(round(time.perf_counter() - wall, 3))
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=json.loads, default={}, help="settings of the model, as JSON")
    parser.add_argument("--rounds", type=int, default=5)
    words = parser.parse_args(argv)
    shape = ModelConfig(**{"vocab_size": 32000, **words.config})
    weights = {
        name: torch.zeros(parameter.shape) for name, parameter in meta_model(shape, two_streams=True).named_parameters()
    }
    folder = ModelFolder(shape, weights, None, "permutation", {}, "xlpre")
    about = {"config": words.config, "n_parameters": sum(weight.numel() for weight in weights.values())}
    elementwise = {"model": timed(folder.model, words.rounds), "reader": timed(folder.encoder, words.rounds)}
    print(json.dumps({**about, **elementwise, "threads": torch.get_num_threads(), "torch": torch.__version__}))


if __name__ == "__main__":
    run_main(main)
