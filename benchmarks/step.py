"""A training step, forward and backward, of this project and of Hugging Face's XLNet: time, memory, loss.

python benchmarks/step.py --config '{"n_layer": 4, "window": 512, "mem_len": 384, "reuse_len": 256, "rows": 2}' --vs hf
python benchmarks/step.py --impl xlpre --config config.json --rss

One JSON line for each contender. With `--vs` they take turns in one process, on the same weights and the same batch, and their
losses must agree before anything is timed (unless dropout is on: then they are made to agree without it). `cpu_ms` is processor
time, which neighbours disturb least; ratios are medians of pairs. `--rss`: the memory of a step alone, from a process of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin slow each other down many times on shared cores

import numpy as np
import psutil
import torch

from xlpre.batch import Batch
from xlpre.data.draws import Draws
from xlpre.data.layout import Windows
from xlpre.exchange import hf
from xlpre.exchange.folder import put_weights
from xlpre.model.language_model import LanguageModel
from xlpre.model.memory import Memory
from xlpre.model.visibility import visible
from xlpre.objectives.loader import batch_of
from xlpre.objectives.objective import ObjectiveConfig
from xlpre.objectives.permutation import Permutation

DEFAULT = {
    "n_layer": 6,
    "d_model": 256,
    "n_head": 4,
    "d_inner": 1024,
    "vocab_size": 8000,
    "window": 128,
    "mem_len": 96,
    "reuse_len": 64,
    "rows": 8,
    "partial_k": 6,
    "dropout": 0.0,
    "attention": "auto",
    "threads": 1,
    "seed": 0,
}


def random_batch(c: dict[str, Any]) -> Batch:
    """Rows of random tokens, the second half of them reading backward (as Hugging Face's XLNet has it)."""
    rng = np.random.default_rng(c["seed"])
    B, T = c["rows"], c["window"]
    functional = np.zeros((B, T), bool)
    functional[:, [c["reuse_len"] + 5, T - 2, T - 1]] = True
    segments = np.where(np.arange(T) <= c["reuse_len"] + 5, 0, 1)
    segments[-1] = 2
    windows = Windows(
        ids=rng.integers(10, c["vocab_size"], (B, T)),
        segments=np.tile(segments, (B, 1)),
        functional=functional,
        following=np.full(B, 10),
        backward=np.arange(B) >= B // 2,
        remembers=np.full(B, 10**6),
        pair_label=np.ones(B, np.int64),
        reuse_len=c["reuse_len"],
    )
    words = np.ones(c["vocab_size"], bool)
    objective = Permutation(ObjectiveConfig(partial_k=c["partial_k"]), words)
    return batch_of(windows, objective.examples(windows, Draws(c["seed"], range(B), 0)))


class HuggingFace:
    """XLNetLMHeadModel, eager or compiled."""

    def __init__(self, c: dict[str, Any], batch: Batch, hidden: torch.Tensor, compiled: bool = False) -> None:
        from transformers import XLNetConfig, XLNetLMHeadModel

        torch.manual_seed(c["seed"])
        sizes = {name: c[name] for name in ("vocab_size", "d_model", "n_layer", "n_head", "d_inner", "dropout")}
        config = XLNetConfig(
            **sizes, ff_activation="gelu_new", bi_data=True, mem_len=c["mem_len"], reuse_len=c["reuse_len"]
        )
        self.model = XLNetLMHeadModel(config)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if name.endswith(("r_w_bias", "r_r_bias", "r_s_bias", "seg_embed")):
                    parameter.normal_(0, 0.2)  # so that every term counts
        self._run = torch.compile(self.model) if compiled else self.model
        self._inputs = {
            "input_ids": batch.input_ids,
            "perm_mask": (~visible(batch.query_rank, batch.key_rank)).float(),
            "target_mapping": torch.nn.functional.one_hot(batch.target_positions, c["window"]).float(),
            "token_type_ids": batch.segment_ids,
            "labels": batch.targets,
            "mems": list(hidden.transpose(1, 2)) if c["mem_len"] else None,
            "use_mems": True,
        }

    def step(self) -> float:
        """Its loss."""
        loss = self._run(**self._inputs).loss
        loss.backward()
        self.model.zero_grad(set_to_none=True)
        return loss.item()


class Xlpre:
    """This project's model with the weights of `theirs`."""

    def __init__(self, c: dict[str, Any], batch: Batch, hidden: torch.Tensor, theirs: torch.nn.Module) -> None:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs.save_pretrained(folder)
            shape, weights, _ = hf.read_model(Path(folder), json.loads((Path(folder) / "config.json").read_text()))
        free = {"mem_len": c["mem_len"], "dropout": c["dropout"], "dropatt": c["dropout"], "attention": c["attention"]}
        self.model = LanguageModel(dataclasses.replace(shape, **free), two_streams=True)
        put_weights(weights, self.model)
        self._batch, self._memory = batch, Memory(hidden, torch.full((c["rows"],), c["mem_len"]))

    def step(self) -> float:
        """Its loss."""
        loss, _ = self.model(self._batch, self._memory)
        loss.backward()
        self.model.zero_grad(set_to_none=True)
        return loss.item()


def contenders(names: list[str], c: dict[str, Any]) -> dict[str, Any]:
    """By name, on the same weights and batch, ready to train."""
    torch.set_num_threads(c["threads"])
    batch = random_batch(c)
    torch.manual_seed(c["seed"])
    hidden = torch.randn(c["n_layer"], c["rows"], c["mem_len"], c["d_model"])
    theirs = HuggingFace(c, batch, hidden, compiled="hf-compile" in names)
    found = {name: Xlpre(c, batch, hidden, theirs.model) if name == "xlpre" else theirs for name in names}
    for one in found.values():
        one.model.eval()
    losses = {name: one.step() for name, one in found.items()}
    if max(losses.values()) - min(losses.values()) > 1e-4:
        raise SystemExit(f"losses do not agree, so nothing is timed: {losses}")
    for one in found.values():
        one.model.train()
    return found


def memory_of_a_step(name: str, c: dict[str, Any]) -> float:
    """MB above what stood before, in this process."""
    one = contenders([name], c)[name]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="{}", help="JSON, or a file of it; what is left out is as in DEFAULT")
    parser.add_argument("--impl", default="xlpre", choices=["xlpre", "hf", "hf-compile"])
    parser.add_argument("--vs", choices=["xlpre", "hf", "hf-compile"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rss", action="store_true")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    words = parser.parse_args()
    given = Path(words.config).read_text() if Path(words.config).is_file() else words.config
    c = {**DEFAULT, **json.loads(given)}
    if words.alone:
        print(json.dumps(memory_of_a_step(words.impl, c)))
        return
    names = [words.impl, *([words.vs] if words.vs else [])]
    found = contenders(names, c)
    loss = {name: one.step() for name, one in found.items()}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    wall: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(words.rounds):
        for name, one in found.items():
            gc.collect()
            begun, used = time.perf_counter(), time.process_time()
            one.step()
            cpu[name].append(time.process_time() - used)
            wall[name].append(time.perf_counter() - begun)
    for name in names:
        line = {
            "impl": name,
            "loss": round(loss[name], 6),
            "cpu_ms": round(1e3 * statistics.median(cpu[name]), 1),
            "wall_ms": round(1e3 * statistics.median(wall[name]), 1),
            "tokens_per_second": round(c["rows"] * c["window"] / statistics.median(wall[name]), 1),
        }
        if words.vs and name == words.impl:
            pairs = zip(cpu[words.vs], cpu[name], strict=True)
            line["times_as_fast"] = round(statistics.median(theirs / ours for theirs, ours in pairs), 3)
        if words.rss:
            again = [sys.executable, __file__, "--config", json.dumps(c), "--impl", name, "--alone"]
            alone = subprocess.run(
                again, capture_output=True, text=True, check=True, env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
            )
            line["step_mb"] = round(json.loads(alone.stdout.splitlines()[-1]), 1)
        print(json.dumps({**line, "config": c, "torch": torch.__version__}), flush=True)


if __name__ == "__main__":
    main()
