"""Measure the gain of pretraining, from raw text: tokenizer, store, pretraining, and fine-tuning against random weights.

python benchmarks/quality/end_to_end.py --config configs/pretrain/small_1gpu.yaml --text 'texts/*.txt.gz' --glue GLUE --race RACE --out OUT

Runs the commands of the project one after another. --out receives the settings, metrics, report and samples of the pretraining run, the
model folder (with --keep-model), and the results of benchmarks/quality/downstream.py for the data sets whose folders are given. If the
command is stopped, start it again with the same arguments to resume.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from benchmarks.common.processes import REPOSITORY
from pretrain.config import PretrainConfig
from xlpre.common.cli_main import run_main
from xlpre.config.loader import load_config
from xlpre.training.distributed import deepspeed_launcher

COPIED = ("config.yaml", "metrics.jsonl", "samples.jsonl", "report.html", "loss.png")
TASKS = {"glue": ["glue/sst-2", "glue/qnli", "glue/cola", "glue/mrpc"], "race": ["race/middle"], "squad": ["squad/1.1"]}


def run_command(*command: str) -> None:
    """Print a command and run it. Raises ValueError if its exit status is not 0."""
    print("+", *command, flush=True)
    status = subprocess.run(command, check=False).returncode
    if status:
        raise ValueError(f"the command above ended with status {status}. Run the same command again to resume.")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="config file of the pretraining run")
    parser.add_argument("--text", required=True, help="files to pretrain on: text.source of the pretraining run")
    for name in TASKS:
        parser.add_argument(f"--{name}", type=Path, help=f"folder of {name}")
    parser.add_argument("--rates", default="1e-4,3e-4,1e-3", help="learning rates of fine-tuning, A,B,C")
    parser.add_argument("--seeds", default="3", help="number of seeds of fine-tuning")
    parser.add_argument("--jobs", default="", help="fine-tuning runs at a time")
    parser.add_argument("--keep-model", action="store_true", help="also copy the model folder")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings of the pretraining run")
    args = parser.parse_intermixed_args(argv)
    settings = [f"text.source={args.text}", "text.max_chars=null", *args.settings]
    config = load_config(PretrainConfig, args.config, settings)
    pretrain_args = ["--config", args.config, *settings]
    if torch.cuda.device_count() == 0:
        os.environ["DS_ACCELERATOR"] = "cpu"
    python = sys.executable
    run_command(python, str(REPOSITORY / "pretrain/train_tokenizer.py"), *pretrain_args)
    run_command(python, str(REPOSITORY / "pretrain/prepare.py"), *pretrain_args)
    run_command(
        *deepspeed_launcher(max(1, torch.cuda.device_count())), str(REPOSITORY / "pretrain/run.py"), *pretrain_args
    )
    run_dir = Path(config.run_dir)
    run_command(python, str(REPOSITORY / "pretrain/report.py"), str(run_dir))
    args.out.mkdir(parents=True, exist_ok=True)
    for name in COPIED:
        shutil.copy2(run_dir / name, args.out / name)
    if args.keep_model:
        shutil.copytree(run_dir / "model", args.out / "model", dirs_exist_ok=True)
    tasks = [task for name, of_family in TASKS.items() if getattr(args, name) for task in of_family]
    if tasks:
        folders = [
            argument for name in TASKS if (folder := getattr(args, name)) for argument in (f"--{name}", str(folder))
        ]
        jobs = ["--jobs", args.jobs] if args.jobs else []
        sweep = ["--tasks", ",".join(tasks), "--rates", args.rates, "--seeds", args.seeds, *jobs]
        script, model = str(REPOSITORY / "benchmarks/quality/downstream.py"), f"pretrained={run_dir / 'model'}"
        run_command(python, script, "--models", model, *folders, *sweep, "--out", str(args.out / "downstream"))


if __name__ == "__main__":
    run_main(main)
