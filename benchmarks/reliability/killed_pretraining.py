"""A pretraining by the real commands, killed once and gone on with: whether its loss falls, and how fast it reads.

python benchmarks/reliability/killed_pretraining.py --minutes 1 --config configs/pretrain/xlnet_base.yaml model.attention_backend=triton

In a temporary folder, or in --folder: a vocabulary and a store of the docstrings of the installed packages (--prepare stops there), then
`deepspeed pretrain/run.py`, all of its processes killed with SIGKILL as soon as a checkpoint is complete, then the same command again to
its end, which --minutes of training decide, or train.steps. One JSON line for each start, from the run's own metrics.jsonl (what was
made before the kill and not saved is made again), and one for the whole. Status 1 unless the loss fell and the second start went on from
the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from benchmarks.common.processes import CPU_ENVIRONMENT, REPOSITORY, make_environment, kill_tree
from xlpre.training import checkpoint
from xlpre.training.distributed import deepspeed_launcher
from xlpre.training.metrics import read_metrics

QUIET = {"PYTHONWARNINGS": "ignore", **({} if torch.cuda.is_available() else CPU_ENVIRONMENT)}
SETTINGS = {
    "text.source": "docstrings",
    "text.max_chars": 12_000_000,
    "text.val_fraction": 0.02,
    "tokenizer.vocab_size": 8000,
    "optim.lr": 3e-4,
    "schedule.warmup_steps": 100,
    "train.steps": 100_000,
    "train.global_batch_size": 32,
    "train.log_every": 10,
    "train.save_every": 100,
    "eval.every": 100_000,  # at the start and at the end
}


def prepare(words: list[str]) -> None:
    """Vocabulary and store; what is there already stays."""
    for script in ("train_tokenizer", "prepare"):
        command = [sys.executable, REPOSITORY / "pretrain" / f"{script}.py", *words]
        subprocess.run(command, env=make_environment(**QUIET), stdout=sys.stderr, check=True)


def start(words: list[str]) -> subprocess.Popen[bytes]:
    """`deepspeed pretrain/run.py`, on one device."""
    command = [*deepspeed_launcher(1), str(REPOSITORY / "pretrain" / "run.py"), *words]
    return subprocess.Popen(command, env=make_environment(**QUIET), stdout=sys.stderr)


def until_saved(process: subprocess.Popen[bytes], run_dir: Path) -> int:
    """Wait for a checkpoint; its step."""
    while not (saved := checkpoint.list_complete(run_dir / "checkpoints")):
        if process.poll() is not None:
            raise SystemExit(f"the training ended with status {process.returncode} before it saved")
        time.sleep(0.05)
    return int(checkpoint.read_manifest(saved[-1])["step"])


def summary(what: str, lines: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Of lines of metrics: from the second on, for the first has the warm-up in it."""
    made = [line for line in lines if "loss" in line]
    middle = made[1:] or made
    median = {key: statistics.median(line[key] for line in middle) for key in ("tokens_per_second", "flops_per_second")}
    mfu = [line["mfu"] for line in middle if line["mfu"] is not None]
    return {
        "what": what,
        "first_step": made[0]["step"],
        "last_step": made[-1]["step"],
        "first_loss": round(made[0]["loss"], 4),
        "last_loss": round(made[-1]["loss"], 4),
        "tokens_per_second": round(median["tokens_per_second"]),
        "tflops": round(median["flops_per_second"] / 1e12, 4),
        "mfu": round(statistics.median(mfu), 4) if mfu else None,
        "memory_gb": round(made[-1]["peak_memory_bytes"] / 1e9, 2),
        "wall_seconds": round(seconds, 1),
    }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(REPOSITORY / "configs" / "pretrain" / "xlnet_base.yaml"))
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--folder", type=Path, help="a new one, which is kept, or one that --prepare made")
    parser.add_argument("--prepare", action="store_true")
    parser.add_argument("words", nargs="*", help="key=value of the training")
    given = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        places = {
            "tokenizer.path": folder / "spiece.model",
            "data.store_dir": folder / "store",
            "run_dir": folder / "run",
        }
        settings = {**SETTINGS, **places, "train.hours": given.minutes / 60}
        words = ["--config", given.config, *(f"{key}={value}" for key, value in settings.items()), *given.words]
        if not (folder / "store" / "meta.json").exists():
            prepare(words)
        if given.prepare:
            return
        since, process = time.monotonic(), start(words)
        try:
            saved = until_saved(process, folder / "run")
            kill_tree(process)
            process.wait()
            first = summary("until it was killed", read_metrics(folder / "run"), time.monotonic() - since)
            print(json.dumps({**first, "killed_after_checkpoint": saved}), flush=True)
            again, process = time.monotonic(), start(words)
            status = process.wait()
        finally:
            if process.poll() is None:
                kill_tree(process)
        lines = read_metrics(folder / "run")
        if status or not any(line["step"] > saved for line in lines):
            raise SystemExit(f"the second start ended with status {status} and made no update")
    after = [line for line in lines if line["step"] > saved]
    print(json.dumps(summary("gone on with", after, time.monotonic() - again)), flush=True)
    held_out = [line["val_loss"] for line in lines if "val_loss" in line]
    whole = {**summary("whole", lines, time.monotonic() - since), "val_loss": [round(x, 4) for x in held_out]}
    steps = [line["step"] for line in lines if "loss" in line]
    gapless = all(later - earlier == steps[1] - steps[0] for earlier, later in zip(steps, steps[1:-1], strict=False))
    passed = gapless and whole["last_loss"] < whole["first_loss"] and held_out[-1] < held_out[0]
    print(json.dumps({**whole, "no_step_missing": gapless, "passed": passed, "words": given.words}), flush=True)
    sys.exit(not passed)


if __name__ == "__main__":
    main()
