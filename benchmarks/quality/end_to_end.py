"""From text to what pretraining is worth, by one command: vocabulary, store, pretraining, fine-tuning against new weights.

python benchmarks/quality/end_to_end.py --config configs/pretrain/small_1gpu.yaml --text 'texts/*.txt.gz' --glue GLUE --race RACE --out OUT

Runs the project's own commands one after another, each as one would type it, and copies into --out what is worth keeping: settings,
metrics, report and samples of the pretraining, the model folder (--keep-model), and what benchmarks/quality/downstream.py makes. Stopped at
any time, the same command goes on. Tasks are those whose folders are given.
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

KEPT = ("config.yaml", "metrics.jsonl", "samples.jsonl", "report.html", "loss.png")
TASKS = {"glue": ["glue/sst-2", "glue/qnli", "glue/cola", "glue/mrpc"], "race": ["race/middle"], "squad": ["squad/1.1"]}


def call(*command: str) -> None:
    """Run a command of the project; its failure is ours."""
    print("+", *command, flush=True)
    status = subprocess.run(command, check=False).returncode
    if status:
        raise ValueError(
            f"the command above ended with status {status}; what was done is kept, the same command goes on"
        )


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="of the pretraining")
    parser.add_argument("--text", required=True, help="text.source: files to learn from")
    for name in TASKS:
        parser.add_argument(f"--{name}", type=Path, help="the folder of its files")
    parser.add_argument("--rates", default="1e-4,3e-4,1e-3", help="learning rates of fine-tuning")
    parser.add_argument("--seeds", default="3", help="of fine-tuning")
    parser.add_argument("--jobs", default="", help="fine-tunings side by side")
    parser.add_argument("--keep-model", action="store_true", help="copy the model folder, too")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("words", nargs="*", metavar="key=value", help="settings of the pretraining")
    said = parser.parse_intermixed_args(argv)
    words = [f"text.source={said.text}", "text.max_chars=null", *said.words]
    config = load_config(PretrainConfig, said.config, words)
    words = ["--config", said.config, *words]
    if torch.cuda.device_count() == 0:
        os.environ["DS_ACCELERATOR"] = "cpu"
    python = sys.executable
    call(python, str(REPOSITORY / "pretrain/train_tokenizer.py"), *words)
    call(python, str(REPOSITORY / "pretrain/prepare.py"), *words)
    call(*deepspeed_launcher(max(1, torch.cuda.device_count())), str(REPOSITORY / "pretrain/run.py"), *words)
    run_dir = Path(config.run_dir)
    call(python, str(REPOSITORY / "pretrain/report.py"), str(run_dir))
    said.out.mkdir(parents=True, exist_ok=True)
    for name in KEPT:
        shutil.copy2(run_dir / name, said.out / name)
    if said.keep_model:
        shutil.copytree(run_dir / "model", said.out / "model", dirs_exist_ok=True)
    tasks = [task for name, several in TASKS.items() if getattr(said, name) for task in several]
    if tasks:
        folders = [word for name in TASKS if (folder := getattr(said, name)) for word in (f"--{name}", str(folder))]
        more = ["--jobs", said.jobs] if said.jobs else []
        sweep = ["--tasks", ",".join(tasks), "--rates", said.rates, "--seeds", said.seeds, *more]
        script, model = str(REPOSITORY / "benchmarks/quality/downstream.py"), f"pretrained={run_dir / 'model'}"
        call(python, script, "--models", model, *folders, *sweep, "--out", str(said.out / "downstream"))


if __name__ == "__main__":
    run_main(main)
