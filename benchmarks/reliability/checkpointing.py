"""Measure the cost of checkpoints: how long training waits for one, how long its writing takes, and how much that slows steps down.

python benchmarks/reliability/checkpointing.py --out reports/reliability/saving.jsonl

Trains in one process on a CPU, and prints one JSON line per model:

    waits_s                 median seconds that training waits for a checkpoint
    lasts_s                 median seconds from the start of a checkpoint until it is written
    step_s                  median seconds of a step while no checkpoint is written
    step_while_writing_s    median seconds of a step while a checkpoint is written
    fraction                share of the training time that is lost to waiting and slower steps, with a checkpoint every `--minutes`
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from pretrain.config import PretrainConfig
from pretrain.tools.preparation import make_store, make_tokenizer
from pretrain.trainer.trainer import Trainer
from xlpre.batch import Batch
from xlpre.common.tables import to_jsonl
from xlpre.config.loader import load_config

WINDOW = ["data.seq_len=128", "data.reuse_len=64", "model.mem_len=96", "train.global_batch_size=2", "eval.batch_size=1"]
MODELS = {
    "13 M": ["model.n_layer=6", "model.d_model=256", "model.n_head=4", "model.d_inner=1024"],
    "117 M (Base)": ["model.n_layer=12", "model.d_model=768", "model.n_head=12", "model.d_inner=3072"],
}
TINY = ["model.n_layer=2", "model.d_model=16", "model.n_head=2", "model.d_inner=32"]


@dataclass
class Timings:
    """Times of a training run with checkpoints, in seconds.

    Attributes:
        n_parameters: number of parameters of the model.
        n_bytes: size of a checkpoint in bytes.
        steps: time of each step during which no checkpoint was written.
        steps_while_writing: time of each step during which a checkpoint was written.
        waits: time that training waited for each checkpoint.
        lasts: time from the start of each checkpoint until it was written.
    """

    n_parameters: int = 0
    n_bytes: int = 0
    steps: list[float] = field(default_factory=list)
    steps_while_writing: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    lasts: list[float] = field(default_factory=list)


def time_step(trainer: Trainer, batches: Iterator[Batch]) -> float:
    """Train one step. Returns its seconds."""
    start = time.perf_counter()
    trainer.begin_step()
    batch = next(batches)
    loss, memory = trainer.engine(batch, trainer.memories[0])
    trainer.engine.backward(loss)
    trainer.engine.step()
    trainer.store_memory(0, batch, memory)
    trainer.end_step()
    return time.perf_counter() - start


def measure(settings: Sequence[str], n_checkpoints: int, steps_between: int) -> Timings:
    """Train a model and write `n_checkpoints` checkpoints, with `steps_between` steps before each. Return the times."""
    trainer, timings = Trainer(load_config(PretrainConfig, None, settings)), Timings()
    batches = trainer.batches()
    for _ in range(3):  # warm-up
        time_step(trainer, batches)
    for _ in range(n_checkpoints):
        timings.steps += [time_step(trainer, batches) for _ in range(steps_between)]
        start = time.perf_counter()
        trainer.save()
        timings.waits.append(time.perf_counter() - start)
        while trainer.writer.in_progress:
            timings.steps_while_writing.append(time_step(trainer, batches))
        timings.lasts.append(time.perf_counter() - start)
    checkpoint = next((trainer.run_dir / "checkpoints").iterdir())
    timings.n_bytes = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
    timings.n_parameters = sum(parameter.numel() for parameter in trainer.engine.module.parameters())
    batches.close()
    trainer.close()
    return timings


def result_line(model: str, timings: Timings, minutes: float) -> dict[str, Any]:
    """Return the JSON line of a model, with `fraction` for a checkpoint every `minutes`."""
    step = statistics.median(timings.steps)
    slowdown = sum(timings.steps_while_writing) - len(timings.steps_while_writing) * step
    cost = statistics.mean(timings.waits) + slowdown / len(timings.waits)
    return {
        "model": model,
        "parameters": timings.n_parameters,
        "checkpoint_mb": round(timings.n_bytes / 1e6, 1),
        "waits_s": round(statistics.median(timings.waits), 4),
        "lasts_s": round(statistics.median(timings.lasts), 3),
        "step_s": round(step, 4),
        "step_while_writing_s": round(statistics.median(timings.steps_while_writing), 4),
        "fraction": round(cost / (minutes * 60), 5),
        "every_minutes": minutes,
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10, help="minutes between checkpoints, for `fraction`")
    parser.add_argument("--checkpoints", type=int, default=5, help="number of checkpoints to write")
    parser.add_argument("--tiny", action="store_true", help="use a tiny model, to test this script")
    parser.add_argument("--out", type=Path, help="file for the JSON lines")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        common = [f"tokenizer.path={folder}/t.model", f"data.store_dir={folder}/store"]
        size = 300 if args.tiny else 32000
        common += [f"tokenizer.vocab_size={size}", "tokenizer.train_chars=20000000"]
        source = load_config(PretrainConfig, None, [*common, f"text.max_chars={300_000 if args.tiny else 20_000_000}"])
        make_tokenizer(source)
        make_store(source)
        lines = []
        for name, shape in ({"tiny": TINY} if args.tiny else MODELS).items():
            run_dir = f"run_dir={folder}/{name.split()[0]}"
            settings = [*common, *WINDOW, *shape, run_dir, "train.keep_last_checkpoints=1"]
            timings = measure(settings, args.checkpoints, steps_between=10)
            lines.append(result_line(name, timings, args.minutes))
            print(json.dumps(lines[-1]), flush=True)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(to_jsonl(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
