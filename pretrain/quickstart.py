"""From raw text to a pretrained model: vocabulary, store, pretraining, report, filled blanks; what is done is not done again.

python pretrain/quickstart.py --config configs/pretrain/quickstart.yaml text.source='my_texts/*.txt' name=mine
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pretrain  # noqa: F401  before torch

# isort: split
import psutil
import torch

from pretrain.config import PretrainConfig
from pretrain.fill import ClozeResult, show
from pretrain.tools.preparation import make_store, make_tokenizer
from pretrain.tools.report_page import write_report
from pretrain.trainer.inputs import finished, is_finished
from pretrain.trainer.samples import read_samples
from xlpre.common.cli_main import run_main
from xlpre.common.job_pool import stop_on_signal
from xlpre.config.cli import parse_config, read_explicit_keys
from xlpre.training.distributed import deepspeed_launcher
from xlpre.training.shutdown import STARTED_BY


def train(config: PretrainConfig, words: list[str]) -> None:
    """Start `deepspeed pretrain/run.py` with the same words, on all GPUs or two CPU processes."""
    if is_finished(config, read_explicit_keys({}, words)):
        print(f"{finished(config)}; give the run another name to begin anew")
        return
    available = torch.cuda.device_count() or min(2, os.cpu_count() or 1)
    rows = config.train.global_batch_size // config.train.accumulation
    processes = max(n for n in range(1, available + 1) if rows % n == 0)
    command = [*deepspeed_launcher(processes), os.path.relpath(Path(__file__).with_name("run.py")), *words]
    print("+", shlex.join(command), flush=True)
    environment = {**os.environ, "PYTHONWARNINGS": "ignore::FutureWarning", STARTED_BY: str(os.getpid())}
    if not torch.cuda.is_available():
        environment["DS_ACCELERATOR"] = "cpu"
    told: set[int] = set()
    with stop_on_signal() as asked:
        child = subprocess.Popen(command, env=environment, start_new_session=True)
        while child.poll() is None:
            if asked:
                _stop(child.pid, told)
            time.sleep(0.2)
    if child.returncode and not asked:
        raise ValueError(
            f"the training above ended with status {child.returncode}; the same command goes on from its last checkpoint"
        )


def _stop(launcher: int, told: set[int]) -> None:
    """Ask each training process once to save and stop, as soon as it is there; the launcher, asked itself, would leave or kill them."""
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(launcher).children(recursive=True):
            if process.pid not in told and any(word.startswith("--local_rank") for word in process.cmdline()):
                told.add(process.pid)
                process.terminate()


def show_samples(config: PretrainConfig) -> None:
    """Print what the model fills into blanks at the end."""
    samples = read_samples(Path(config.run_dir))
    filled = samples[-1]["filled"]
    if not filled:
        print("no held-out sentence has a whole word that is one piece; give sentences with ____ as eval.sentences")
        return
    print(f"\nblanks in held-out text, as filled in at step {samples[-1]['step']:,}:\n")
    for one in filled:
        print(show(ClozeResult(**one)))
    command = [
        "python",
        os.path.relpath(Path(__file__).with_name("fill.py")),
        f"{config.run_dir}/model",
        filled[0]["text"],
    ]
    print(f"\nTry: {shlex.join(command)}")


def main() -> None:
    """The command."""
    words = sys.argv[1:]
    config = parse_config(PretrainConfig, __doc__ or "", words)
    started = time.monotonic()
    make_tokenizer(config)
    make_store(config)
    train(config, words)
    if not is_finished(config, read_explicit_keys({}, words)):
        print("stopped; the same command goes on from there")
        return
    page = write_report(Path(config.run_dir))
    print(f"{time.monotonic() - started:.0f} s. The model is in {config.run_dir}/model, the story in {page}.")
    show_samples(config)


if __name__ == "__main__":
    run_main(main)
