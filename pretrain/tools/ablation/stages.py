"""Stages of the rows of an ablation: pretraining, evaluation on minimal pairs and on text, and fine-tuning. Each is one command.

A stage is finished when its result exists and belongs to its settings and to the current weights of its model. The stages that read a
model save both in inputs.json, beside the result.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, ClassVar

from finetune.config import FinetuneConfig, load_finetune_config
from finetune.trainer.results import RESULT, Result, seed_folder
from pretrain.config import PretrainConfig, changed_settings
from pretrain.trainer.dry_run import open_inputs
from pretrain.trainer.inputs import is_finished, model_dir
from xlpre.common.errors import InputError
from xlpre.common.files import atomic_dir, compute_crc32c, lock_dir, write_text
from xlpre.common.messages import as_yaml
from xlpre.config.cli import ExplicitKeys
from xlpre.conversion.model_folder import resolve_model_dir
from xlpre.text.corpus import source_exists
from xlpre.training.config import OPERATIONAL_SETTINGS
from xlpre.training.metrics_writer import read_metrics

REPOSITORY = Path(__file__).parents[3]
INPUTS_FILE = "inputs.json"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt")
FREE_SETTINGS = {  # settings of a fine-tuning run that do not change its results
    *("name", "run_dir", "num_seeds", "model.attention_backend", "eval.batch_size"),
    *(f"train.{name}" for name in OPERATIONAL_SETTINGS),
}


@dataclass(frozen=True)
class Stage(ABC):
    """One command of a row with one seed.

    Attributes:
        row: name of the row.
        seed: seed of the row's run.
        folder: folder of the command, with its log and its result.
    """

    row: str
    seed: int
    folder: Path

    @property
    @abstractmethod
    def script(self) -> str:
        """Path of the command in the repository."""

    @property
    @abstractmethod
    def arguments(self) -> list[str]:
        """Arguments of the command."""

    @property
    def name(self) -> str:
        """Name of the stage in progress lines."""
        return f"row {self.row}, seed {self.seed}"

    @property
    def needs(self) -> Sequence[Path]:
        """Folders of the stages that must be finished before."""
        return ()

    def command_line(self, processes: int) -> list[str]:
        """Return program and arguments, with a launcher for several processes."""
        launcher = ["python"] if processes == 1 else ["torchrun", "--standalone", "--nproc_per_node", str(processes)]
        return [*launcher, os.path.relpath(REPOSITORY / self.script), *self.arguments]

    @abstractmethod
    def is_finished(self) -> bool:
        """Return True if the stage is finished."""

    def prepare(self) -> None:
        """Prepare the folder before the command starts."""
        return

    @abstractmethod
    def describe_result(self) -> str:
        """Return the result for a progress line."""


@dataclass(frozen=True)
class Pretraining(Stage):
    """Pretraining run of a row with one seed.

    Attributes:
        args: arguments of its command: --config, the base file, and overrides.
        config: settings of the run.
    """

    args: Sequence[str]
    config: PretrainConfig

    script = "pretrain/run.py"

    @property
    def arguments(self) -> list[str]:
        """Arguments of the command."""
        return list(self.args)

    @property
    def explicit_keys(self) -> ExplicitKeys:
        """Keys that the command sets."""
        return ExplicitKeys.read(self.args[1], self.args[2:])

    @property
    def model(self) -> str:
        """Model folder of the run."""
        return str(model_dir(self.config))

    def is_finished(self) -> bool:
        """Return True if the run is finished.

        Raises:
            InputError: the run has other settings than its row.
        """
        finished = is_finished(self.config, self.explicit_keys)
        self.check_settings(with_length=finished)  # an unfinished run may be continued to another length
        return finished

    def evaluations(self) -> list[dict[str, Any]]:
        """Return the records of metrics.jsonl with a validation loss.

        Raises:
            InputError: the run has other settings than its row.
        """
        self.check_settings()
        return [record for record in read_metrics(self.folder) if "val_loss" in record]

    def describe_result(self) -> str:
        """Return the last validation loss for a progress line; empty if the run was not evaluated."""
        if not (evaluations := self.evaluations()):
            return ""
        loss, baseline = (evaluations[-1][key] for key in ("val_loss", "val_unigram_loss"))
        return f"val loss {float('inf') if loss is None else loss:.3f} (unigram baseline {baseline:.3f})"

    def check_settings(self, with_length: bool = True) -> None:
        """Raise InputError if the run in the folder has other settings than its row.

        Args:
            with_length: also compare `train.steps` and `train.hours`.
        """
        for key, values in changed_settings(self.config, with_length).items():
            saved, current = map(as_yaml, values)
            raise InputError(
                f"row {self.row}: {key}={current} is invalid: {self.folder} was trained with {key}={saved}. "
                f"Set {key}={saved}, rename the row, or remove that folder."
            )

    def check_inputs(self) -> None:
        """Raise InputError if the run cannot start because of its text, its vocabulary, its model or its minimal pairs."""
        open_inputs(self.config, self.explicit_keys)

    def check_batch(self, processes: int) -> None:
        """Raise InputError if `processes` processes cannot share the batch."""
        try:
            self.config.train.batch_schedule(processes)
        except InputError as error:
            raise InputError(f"row {self.row} with --processes {processes}: {error}") from None


@dataclass(frozen=True)
class ModelStage(Stage, ABC):
    """Stage that reads a pretrained model.

    Attributes:
        key: name of the task, of the minimal pairs or of the text in the file.
        model: folder of the model.
        pretraining: folder of the pretraining that writes the model; None: the model exists already.
    """

    key: str
    model: str
    pretraining: Path | None

    @property
    def name(self) -> str:
        """Name of the stage in progress lines."""
        return f"{super().name}, {self.key}"

    @property
    def needs(self) -> Sequence[Path]:
        """Folders of the stages that must be finished before."""
        return () if self.pretraining is None else (self.pretraining,)

    @property
    @abstractmethod
    def settings(self) -> Any:
        """Settings that influence the result, as JSON values."""

    @property
    def reads_weights(self) -> bool:
        """True if the result depends on the weights of the model."""
        return True

    @property
    def inputs(self) -> dict[str, Any]:
        """Settings, and a checksum of the weights of the model."""
        return {"settings": self.settings, "weights": _weights_checksum(self.model) if self.reads_weights else None}

    def inputs_match(self) -> bool:
        """Return True if the folder belongs to the current inputs, or was not written by an ablation."""
        saved = self.folder / INPUTS_FILE
        return not saved.exists() or json.loads(saved.read_text("utf-8")) == self.inputs

    def save_inputs(self, folder: Path) -> None:
        """Write the inputs into `folder`."""
        write_text(folder / INPUTS_FILE, json.dumps(self.inputs, indent=1) + "\n")


@dataclass(frozen=True)
class Evaluation(ModelStage):
    """Evaluation of a model on minimal pairs or on held-out text.

    Attributes:
        cli_args: arguments of the command: files and options.
    """

    cli_args: Sequence[str]

    kind: ClassVar[str]  # `pairs` or `text`

    @property
    @abstractmethod
    def result_file(self) -> Path:
        """File with the result."""

    @property
    def inputs_to_check(self) -> Any:
        """Files that `check_inputs` reads."""
        return self.cli_args

    def check_inputs(self) -> None:
        """Raise InputError if a file or folder does not exist."""
        for path in getattr(_parse_cli_args(self.kind, self.cli_args), self.kind):
            if not source_exists(str(path)):
                raise InputError(f"{path} is invalid: there is no such file or folder. Correct the path.")

    def is_finished(self) -> bool:
        """Return True if the result is of the current arguments and weights."""
        return self.result_file.exists() and self.inputs_match()

    def prepare(self) -> None:
        """Remove the result of other arguments or weights, and save the inputs."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.result_file.unlink(missing_ok=True)
        self.save_inputs(self.folder)

    @property
    def settings(self) -> list[str]:
        """Command, files and options, without the folders of the model and of the result, which may be moved."""
        return [self.script, *self.cli_args]

    def read(self) -> list[dict[str, Any]]:
        """Return the records of the result; empty if the stage is not finished."""
        return json_records(self.result_file) if self.is_finished() else []


@dataclass(frozen=True)
class PairsEvaluation(Evaluation):
    """Accuracy on minimal pairs."""

    script = "pretrain/score.py"
    kind = "pairs"

    @property
    def result_file(self) -> Path:
        """File with the result."""
        return self.folder / "pairs.json"

    @property
    def arguments(self) -> list[str]:
        """Arguments of the command."""
        return [self.model, "--pairs", *self.cli_args, "--out", str(self.result_file)]

    def command_line(self, processes: int) -> list[str]:
        """Return program and arguments; the command has one process."""
        return super().command_line(1)

    def describe_result(self) -> str:
        """Return the accuracy for a progress line."""
        return f"{self.read()[0]['accuracy']:.1f} % of the pairs"


@dataclass(frozen=True)
class TextEvaluation(Evaluation):
    """Loss on held-out text."""

    script = "pretrain/evaluate.py"
    kind = "text"

    @property
    def result_file(self) -> Path:
        """File with the result."""
        return self.folder / "text.jsonl"

    @property
    def arguments(self) -> list[str]:
        """Arguments of the command."""
        return [self.model, *self.cli_args, "--out", str(self.result_file)]

    def describe_result(self) -> str:
        """Return the losses for a progress line."""
        return ", ".join(f"loss {record['loss']:.3f} (memory {record['mem_len']})" for record in self.read())


@dataclass(frozen=True)
class Finetuning(ModelStage):
    """Fine-tuning of a model on a task.

    Attributes:
        file: settings file of the task.
        overrides: settings that override the file.
        seeds: seeds of the fine-tuning.
        lr: learning rate, which is one of several; None: that of the settings.
    """

    file: str
    overrides: Sequence[str]
    seeds: Sequence[int]
    lr: float | None = None

    script = "finetune/run.py"

    @property
    def name(self) -> str:
        """Name of the stage in progress lines."""
        return super().name if self.lr is None else f"{super().name}, optim.lr={self.lr:g}"

    @property
    def arguments(self) -> list[str]:
        """Arguments of the command."""
        run = [f"name={self.row}_{self.key}_{self.seed}", f"run_dir={self.folder}", f"seed={self.seeds[0]}"]
        return ["--config", self.file, f"init_from={self.model}", *self.overrides, *run, f"num_seeds={len(self.seeds)}"]

    @cached_property
    def config(self) -> FinetuneConfig:
        """Settings of the fine-tuning."""
        return load_finetune_config(self.file, self.arguments[2:])

    @property
    def inputs_to_check(self) -> Any:
        """Task, data, and the model if it exists already, which `check_inputs` reads."""
        return self.config.task, self.config.data, self.model if self.pretraining is None else None

    def check_inputs(self) -> None:
        """Raise InputError if the run cannot start because of its examples or its model."""
        from finetune.trainer.inputs import read_examples

        if self.pretraining is None and not resolve_model_dir(self.model).exists():
            raise InputError(f"init_from={self.model} is invalid: there is no such folder. Correct the path.")
        read_examples(self.config)

    def is_finished(self) -> bool:
        """Return True if all seeds have a result of the current settings and weights, and the summary is written."""
        return (self.folder / "table.csv").exists() and len(self.read()) == len(self.seeds)

    def read(self) -> dict[int, Result]:
        """Return the results of the finished seeds."""
        if not self.inputs_match():
            return {}
        paths = {seed: seed_folder(self.folder, seed) / RESULT for seed in self.seeds}
        return {seed: Result.read(path) for seed, path in paths.items() if path.exists()}

    def describe_result(self) -> str:
        """Return the scores for a progress line."""
        results = self.read().values()
        scores = ", ".join(f"{100 * result.score:.1f}" for result in results)
        return f"{next(iter(results)).main_metric} {scores} %"

    def prepare(self) -> None:
        """Remove a run with other settings or other pretrained weights, and save the inputs of a new run."""
        if not self.inputs_match():
            # if a fine-tuning is running in the folder, the command will refuse to start
            with suppress(InputError), lock_dir(self.folder, ""), atomic_dir(self.folder) as folder:
                self.save_inputs(folder)
        elif not (self.folder / "config.yaml").exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            self.save_inputs(self.folder)

    @property
    def reads_weights(self) -> bool:
        """False if the model is trained from scratch."""
        return not self.config.from_scratch

    @property
    def settings(self) -> dict[str, Any]:
        """Settings by key, without those that do not change the results."""
        settings = json.loads(json.dumps(dataclasses.asdict(self.config)))
        del settings["task_overrides"]  # they are part of the other values
        if self.reads_weights:
            # the checksum of the weights identifies the model, also when its folder was moved
            del settings["init_from"]
        return {key: value for key, value in _flatten(settings).items() if key not in FREE_SETTINGS}


def _weights_checksum(model: str) -> str | None:
    """Return a checksum of the files with the weights of a model; None if the model does not exist."""
    try:
        path = resolve_model_dir(model)
    except InputError:  # a run that has not saved a model yet
        return None
    folder = path.iterdir() if path.is_dir() else [path]
    files = [file for file in sorted(folder) if file.suffix in WEIGHT_SUFFIXES or ".ckpt" in file.name]
    versions = [(file, file.stat()) for file in files if file.exists()]
    checksums = [_checksum(file, version.st_mtime_ns, version.st_size) for file, version in versions]
    return "-".join(f"{checksum:08x}" for checksum in checksums) or None


@cache
def _checksum(path: Path, modified_ns: int, size: int) -> int:
    """Return the checksum of a file. Time and size identify a version of it, which is read once."""
    return compute_crc32c(path)


def json_records(path: Path) -> list[dict[str, Any]]:
    """Read a JSON object, or JSON lines."""
    text = path.read_text("utf-8")
    return [json.loads(text)] if text.startswith("{\n") else [json.loads(line) for line in text.splitlines()]


def check_cli_args(origin: str, kind: str, text: str) -> list[str]:
    """Return the command-line arguments of an evaluation.

    Args:
        origin: key of the evaluation, for error messages.
        kind: `pairs` or `text`.
        text: files and options, as on the command line of pretrain/score.py --pairs or pretrain/evaluate.py.

    Raises:
        InputError: the command would refuse them.
    """
    try:
        cli_args = shlex.split(text)
        args = _parse_cli_args(kind, cli_args)
        for option in ("out", "picture", "json", "tokens", "compare"):
            if getattr(args, option, None):
                raise InputError(f"--{option} is invalid: the ablation collects the results itself. Leave it out.")
    except ValueError as error:
        raise InputError(f"{origin}: {error}") from None
    return cli_args


def _parse_cli_args(kind: str, cli_args: Sequence[str]) -> argparse.Namespace:
    """Parse and check the command-line arguments of an evaluation as its command does."""
    from pretrain import evaluate, score

    command = score if kind == "pairs" else evaluate
    args = command.build_parser().parse(["MODEL", *(["--pairs"] if kind == "pairs" else []), *cli_args])
    command.check_options(args)
    return args


def _flatten(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the settings by dotted key."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
