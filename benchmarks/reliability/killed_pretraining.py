"""Kill a pretraining run once and resume it, with the project's commands. Checks that the loss falls, and measures throughput.

python benchmarks/reliability/killed_pretraining.py --minutes 1 --config configs/pretrain/xlnet_base.yaml model.attention_backend=triton

Works in a temporary folder or in --folder. Trains a tokenizer and writes a store of the docstrings of installed packages (with
--prepare, the command stops here). Starts `deepspeed pretrain/run.py`, and kills all its processes with SIGKILL as soon as a checkpoint
is complete. Then starts the same command again, until --minutes of training or train.steps are reached. Prints one JSON line per start
and one for the whole run, computed from metrics.jsonl. The exit status is 1 unless the loss fell, the second start resumed from the
checkpoint, and no step is missing.
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

from benchmarks.common.processes import CPU_ENVIRONMENT, REPOSITORY, kill_tree, make_environment
from xlpre.training import checkpoint
from xlpre.training.distributed import deepspeed_launcher
from xlpre.training.metrics_writer import read_metrics

VARIABLES = {"PYTHONWARNINGS": "ignore", **({} if torch.cuda.is_available() else CPU_ENVIRONMENT)}
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
    "eval.every": 100_000,  # never, so that only the start and the end are evaluated
}


def prepare(args: list[str]) -> None:
    """Train the tokenizer and write the store."""
    for script in ("train_tokenizer", "prepare"):
        command = [sys.executable, REPOSITORY / "pretrain" / f"{script}.py", *args]
        subprocess.run(command, env=make_environment(**VARIABLES), stdout=sys.stderr, check=True)


def start(args: list[str]) -> subprocess.Popen[bytes]:
    """Start `deepspeed pretrain/run.py` on one device."""
    command = [*deepspeed_launcher(1), str(REPOSITORY / "pretrain" / "run.py"), *args]
    return subprocess.Popen(command, env=make_environment(**VARIABLES), stdout=sys.stderr)


def wait_for_checkpoint(process: subprocess.Popen[bytes], run_dir: Path) -> int:
    """Wait until the training has written a complete checkpoint. Returns the step of the checkpoint."""
    while not (saved := checkpoint.list_complete(run_dir / checkpoint.CHECKPOINTS_DIR)):
        if process.poll() is not None:
            raise SystemExit(
                f"The training ended with status {process.returncode} before it had written a checkpoint. Its output is above."
            )
        time.sleep(0.05)
    return int(checkpoint.read_manifest(saved[-1])["step"])


def summarize(phase: str, lines: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Return the JSON line of a phase: its first and last loss, and its median speed without the first line (the warm-up).

    Args:
        phase: name of the phase.
        lines: lines of metrics.jsonl.
        seconds: wall time of the phase.
    """
    lines = [line for line in lines if "loss" in line]
    warm = lines[1:] or lines
    tokens_per_second, flops_per_second = (
        statistics.median(line[key] for line in warm) for key in ("tokens_per_second", "flops_per_second")
    )
    mfu = [line["mfu"] for line in warm if line["mfu"] is not None]
    return {
        "phase": phase,
        "first_step": lines[0]["step"],
        "last_step": lines[-1]["step"],
        "first_loss": round(lines[0]["loss"], 4),
        "last_loss": round(lines[-1]["loss"], 4),
        "tokens_per_second": round(tokens_per_second),
        "tflops": round(flops_per_second / 1e12, 4),
        "mfu": round(statistics.median(mfu), 4) if mfu else None,
        "memory_gb": round(lines[-1]["peak_memory_bytes"] / 1e9, 2),
        "wall_seconds": round(seconds, 1),
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(REPOSITORY / "configs" / "pretrain" / "xlnet_base.yaml"))
    parser.add_argument("--minutes", type=float, default=1.0, help="minutes of training")
    parser.add_argument(
        "--folder", type=Path, help="folder to work in, which is kept: a new one, or one that --prepare has written"
    )
    parser.add_argument("--prepare", action="store_true", help="only train the tokenizer and write the store")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings of the training run")
    args = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        paths = {
            "tokenizer.path": folder / "spiece.model",
            "data.store_dir": folder / "store",
            "run_dir": folder / "run",
        }
        settings = {**SETTINGS, **paths, "train.hours": args.minutes / 60}
        command_args = ["--config", args.config, *(f"{key}={value}" for key, value in settings.items()), *args.settings]
        if not (folder / "store" / "meta.json").exists():
            prepare(command_args)
        if args.prepare:
            return
        first_start, process = time.monotonic(), start(command_args)
        try:
            saved_step = wait_for_checkpoint(process, folder / "run")
            kill_tree(process)
            process.wait()
            before_kill = summarize("before kill", read_metrics(folder / "run"), time.monotonic() - first_start)
            print(json.dumps({**before_kill, "killed_after_checkpoint": saved_step}), flush=True)
            second_start, process = time.monotonic(), start(command_args)
            status = process.wait()
        finally:
            if process.poll() is None:
                kill_tree(process)
        lines = read_metrics(folder / "run")
        resumed = [line for line in lines if line["step"] > saved_step]
        if status or not resumed:
            raise SystemExit(
                f"The second start ended with status {status} and wrote {len(resumed)} lines of metrics. Its output is above."
            )
    print(json.dumps(summarize("resumed", resumed, time.monotonic() - second_start)), flush=True)
    val_losses = [line["val_loss"] for line in lines if "val_loss" in line]
    total = {
        **summarize("total", lines, time.monotonic() - first_start),
        "val_loss": [round(loss, 4) for loss in val_losses],
    }
    steps = [line["step"] for line in lines if "loss" in line]
    # all lines of metrics are equally many steps apart, except the last line
    is_complete = all(
        later - earlier == steps[1] - steps[0] for earlier, later in zip(steps, steps[1:-1], strict=False)
    )
    passed = is_complete and total["last_loss"] < total["first_loss"] and val_losses[-1] < val_losses[0]
    print(
        json.dumps({**total, "no_step_missing": is_complete, "passed": passed, "settings": args.settings}), flush=True
    )
    sys.exit(not passed)


if __name__ == "__main__":
    main()
