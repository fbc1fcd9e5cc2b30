"""Pretrain from raw text in one command: vocabulary, token store, training, report and predictions.

Stages that are finished are skipped, so the same command continues where it stopped. Training uses all GPUs, or one process with all
CPU cores. The model and the report are in runs/NAME.

Examples:
  make quickstart
  python pretrain/quickstart.py --config configs/pretrain/quickstart.yaml
  python pretrain/quickstart.py --config configs/pretrain/quickstart.yaml name=mine text.source='my_texts/*.txt' text.max_chars=null

See README.md for the same stages as single commands, and docs/small_data.md for other presets.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from pretrain.config import PretrainConfig
from pretrain.tools.preparation import make_store, make_tokenizer
from pretrain.trainer.config_warnings import check_has_preset
from xlpre.common.cli_main import run_main
from xlpre.common.errors import InputError, check_minimum
from xlpre.common.job_pool import stop_on_signal
from xlpre.config.cli import ExplicitKeys, SettingsParser

PAIRS = Path(__file__).parents[1] / "configs" / "minimal_pairs" / "docstrings.jsonl"

COMMON = (
    "name",
    "text.source",
    "text.max_chars",
    "tokenizer.vocab_size",
    "data.seq_len",
    "model.n_layer",
    "model.d_model",
    "model.mem_len",
    "optim.lr",
    "train.steps",
    "train.hours",
    "train.global_batch_size",
    "eval.every",
)


def build_parser() -> SettingsParser[PretrainConfig]:
    """Return the parser of the command line."""
    parser = SettingsParser(PretrainConfig, __doc__, COMMON)
    parser.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="number of training processes; by default one per GPU, or one with all CPU cores",
    )
    return parser


def pairs_of_docstrings(config: PretrainConfig) -> list[str]:
    """Return an override that lets a model of docstrings judge minimal pairs at each evaluation; [] for other text."""
    if list(config.text.sources) != ["docstrings"] or config.eval.minimal_pairs:
        return []
    return [f"eval.minimal_pairs=[{os.path.relpath(PAIRS)}]"]


def train(config: PretrainConfig, explicit_keys: ExplicitKeys, args: Sequence[str], n_processes: int | None) -> None:
    """Run `deepspeed pretrain/run.py`.

    Args:
        config: settings of the run.
        explicit_keys: keys that the user set.
        args: arguments for `pretrain/run.py`.
        n_processes: number of processes. None: the largest number of GPUs that divides the batch evenly, or one process without a GPU.
    """
    import torch

    from pretrain.trainer.inputs import describe_finished, is_finished
    from xlpre.training.distributed import deepspeed_launcher, device_type
    from xlpre.training.shutdown import PARENT_PID_VARIABLE

    if is_finished(config, explicit_keys):
        print(f"{describe_finished(config)}. To train again, set another name.")
        return
    if n_processes is None:
        # on a CPU, one process with all cores is faster than several: they would wait for each other
        available = torch.cuda.device_count() if device_type() == "cuda" else 1
        n_processes = max(n for n in range(1, available + 1) if _divides_batch(config, n))
    command = [*deepspeed_launcher(n_processes), os.path.relpath(Path(__file__).with_name("run.py")), *args]
    print("+", shlex.join(command), flush=True)
    environment = {**os.environ, "PYTHONWARNINGS": "ignore::FutureWarning", PARENT_PID_VARIABLE: str(os.getpid())}
    if device_type() == "cpu":
        environment["DS_ACCELERATOR"] = "cpu"
    terminated: set[int] = set()
    with stop_on_signal() as signals:
        child = subprocess.Popen(command, env=environment, start_new_session=True)
        while child.poll() is None:
            if signals:
                _terminate_training(child.pid, terminated)
            time.sleep(0.2)
    if child.returncode and not signals:
        raise InputError(
            f"the training exited with status {child.returncode}; see its message above. "
            "The same command resumes from the latest checkpoint."
        )


def show_samples(config: PretrainConfig) -> None:
    """Print the predictions for blanks of the last evaluation."""
    from pretrain.trainer.samples import read_samples
    from xlpre.inference.cloze import ClozeResult, format_result

    record = read_samples(Path(config.run_dir))[-1]
    if not record["results"]:
        print(
            "No blanks were predicted: the objective is causal, or no sentence of the validation text has a word that is a single "
            "token. In the second case, set eval.sentences to sentences with ____."
        )
        return
    origin = "the sentences of eval.sentences" if config.eval.sentences else "validation text"
    print(f"\npredictions for blanks in {origin} at step {record['step']:,}:\n")
    for result in record["results"]:
        print(format_result(ClozeResult(**result)))
    fill = os.path.relpath(Path(__file__).with_name("fill.py"))
    command = ["python", fill, config.run_dir, record["results"][0]["text"]]
    print(f"\nTry: {shlex.join(command)}")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    config, explicit_keys, args = build_parser().parse_config(argv)
    check_minimum("--processes", args.processes, 1, "Leave it out.")
    check_has_preset(explicit_keys)
    start = time.monotonic()
    make_tokenizer(config)
    make_store(config)
    file = ["--config", args.config] if args.config else []
    train(config, explicit_keys, [*file, *args.overrides, *pairs_of_docstrings(config)], args.processes)

    from pretrain.tools.report_page import write_report
    from pretrain.trainer.inputs import is_finished

    if not is_finished(config, explicit_keys):
        print("stopped. The same command resumes.")
        return
    report = write_report(Path(config.run_dir))
    print(f"{time.monotonic() - start:.0f} s. The model is in {config.run_dir}/model, the report in {report}.")
    show_samples(config)
    show_minimal_pairs(config)


def show_minimal_pairs(config: PretrainConfig) -> None:
    """Print the accuracy on minimal pairs before and after training."""
    from xlpre.training.metrics_writer import read_metrics

    accuracies = [
        record["val_minimal_pairs"] for record in read_metrics(Path(config.run_dir)) if "val_minimal_pairs" in record
    ]
    if not accuracies:
        return
    score = os.path.relpath(Path(__file__).with_name("score.py"))
    files, pairs = config.eval.minimal_pairs, "the pairs"
    if not files:
        files, pairs = [os.path.relpath(PAIRS)], "pairs such as 'It does not read.' / 'It does not reads.'"
    command = ["python", score, config.run_dir, "--pairs", *files]
    print(
        f"\nminimal pairs: the model prefers the correct sentence in {accuracies[-1]:.0f} % of {pairs} "
        f"(before training {accuracies[0]:.0f} %, chance 50 %).\nTry: {shlex.join(command)}"
    )


def _divides_batch(config: PretrainConfig, n_processes: int) -> bool:
    """Return True if the global batch can be divided among `n_processes`. Always True for one process: training then prints the error."""
    try:
        config.train.batch_schedule(n_processes)
    except InputError:
        return n_processes == 1
    return True


def _terminate_training(launcher: int, terminated: set[int]) -> None:
    """Send SIGTERM once to each training process. The launcher gets none: it would kill the processes, or leave them running."""
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(launcher).children(recursive=True):
            is_training = any(argument.startswith("--local_rank") for argument in process.cmdline())
            if process.pid not in terminated and is_training:
                terminated.add(process.pid)
                process.terminate()


if __name__ == "__main__":
    run_main(main)
