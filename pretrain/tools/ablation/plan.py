"""The file of an ablation, and the stages of its rows.

docs/ablations.md describes the file.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pretrain.config import PretrainConfig
from pretrain.tools.ablation.stages import (
    Evaluation,
    Finetuning,
    PairsEvaluation,
    Pretraining,
    Stage,
    TextEvaluation,
    check_cli_args,
)
from xlpre.common.errors import InputError, check_minimum
from xlpre.config.loader import keys_in_file, keys_in_override, load_config

ROW_KEYS = ("name", "run_dir", "seed")  # settings that pretrain/ablate.py sets for each run
TASK_KEYS = (*ROW_KEYS, "num_seeds")  # likewise, of each fine-tuning
SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class FinetuneStages:
    """Fine-tuning of each row.

    Attributes:
        base: path of a settings file of fine-tuning, relative to the folder of the ablation file.
        common: overrides of every task.
        seeds: number of fine-tuning runs of each pretrained model, with the seeds 1, 2, ...
        learning_rates: values of `optim.lr`. Each is tried, and each row is compared at the one with its highest mean score. []: only that
            of the settings.
        tasks: overrides of each task by its name in the table. A path as the first entry replaces `base`.
    """

    base: str = ""
    common: list[str] = field(default_factory=list)
    seeds: int = 1
    learning_rates: list[float] = field(default_factory=list)
    tasks: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class EvaluateStages:
    """Evaluation of each row.

    Attributes:
        pairs: by name in the table, files of minimal pairs and options of pretrain/score.py.
        text: by name in the table, held-out texts and options of pretrain/evaluate.py.
    """

    pairs: dict[str, str] = field(default_factory=dict)
    text: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class AblationConfig:
    """Comparison of models: pretraining, evaluation and fine-tuning of each row.

    Attributes:
        base: path of the settings file of pretraining, relative to the folder of the ablation file.
        model: in place of `base`, folder of a pretrained model. Overrides are then settings of fine-tuning.
        common: overrides of every row.
        num_seeds: number of runs of each row, with the seeds 1, 2, ...
        rows: overrides of each row by its name. All other rows are compared with the first one.
        finetune: tasks to fine-tune each row on.
        evaluate: minimal pairs and texts to evaluate each row on.
        published: published results of rows, by the name of the measure and then of the row. They are shown beside the results here.
    """

    base: str = ""
    model: str = ""
    common: list[str] = field(default_factory=list)
    num_seeds: int = 1
    rows: dict[str, list[str]] = field(default_factory=dict)
    finetune: FinetuneStages = field(default_factory=FinetuneStages)
    evaluate: EvaluateStages = field(default_factory=EvaluateStages)
    published: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if bool(self.base) == bool(self.model) or not self.rows or self.num_seeds < 1:
            raise InputError(
                "the ablation is invalid: it must have `base:` (a settings file) or `model:` (the folder of a model), `rows:` (lists of "
                "overrides by name), and num_seeds of at least 1. Add what is missing."
            )
        if self.model and not self.finetune.tasks:
            raise InputError(
                f"model={self.model} is invalid without finetune.tasks: the rows are fine-tuned from it. Add tasks, or set base."
            )
        rates = self.finetune.learning_rates
        if len(set(rates)) < len(rates):
            raise InputError(f"finetune.learning_rates={rates} is invalid: a value occurs twice. Remove one of them.")
        if self.finetune.seeds < 1 or (self.model and self.finetune.seeds > 1):
            rule = "1 with `model:`, whose seeds are num_seeds" if self.model else "at least 1"
            raise InputError(f"finetune.seeds={self.finetune.seeds} is invalid: it must be {rule}.")
        self._check_names()
        self._check_keys()

    def _check_names(self) -> None:
        """Raise InputError if a name cannot be that of a folder, or two stages have the same name."""
        stages = [*self.finetune.tasks, *self.evaluate.pairs, *self.evaluate.text]
        for kind, names in (("row", list(self.rows)), ("stage", stages)):
            for name in names:
                if name in ("", ".", "..") or "/" in name:
                    raise InputError(
                        f"{kind} {name!r} is invalid: the name of a {kind} becomes the name of a folder, so it must not be empty, '.' or "
                        "'..', or contain a slash. Rename it."
                    )
        for name in stages:
            if stages.count(name) > 1:
                raise InputError(
                    f"{name!r} is invalid: two of finetune.tasks, evaluate.pairs and evaluate.text have it. Rename one."
                )
        for measure, values in self.published.items():
            if unknown := [row for row in values if row not in self.rows]:
                raise InputError(
                    f"published: {measure}: {unknown[0]} is invalid: there is no such row. Name one of {', '.join(self.rows)}."
                )

    @property
    def row_keys(self) -> Sequence[str]:
        """Settings of a row that the command sets."""
        return ROW_KEYS if self.base else (*TASK_KEYS, *["optim.lr"] * bool(self.finetune.learning_rates))

    def _check_keys(self) -> None:
        """Raise InputError if an override sets what the command sets."""
        row_keys = self.row_keys
        parts: dict[str, tuple[Sequence[str], Sequence[str]]] = {
            "common": (self.common, row_keys),
            **{f"row {row}": (self.rows[row], row_keys) for row in self.rows},
        }
        task_keys = (*TASK_KEYS, "init_from", *["optim.lr"] * bool(self.finetune.learning_rates))
        parts["finetune.common"] = (self.finetune.common, task_keys)
        parts |= {f"finetune.tasks.{task}": (words, task_keys) for task, words in self.finetune.tasks.items()}
        for origin, (overrides, keys) in parts.items():
            _check_overrides(f"{origin}: ", overrides, keys)


def _check_overrides(origin: str, overrides: Sequence[str], keys: Sequence[str]) -> None:
    """Raise InputError if an override sets one of `keys`, which the command sets."""
    for override in overrides:
        if (key := override.partition("=")[0]) in keys:
            raise InputError(
                f"{origin}{override} is invalid: pretrain/ablate.py sets {key} for each run. Leave it out."
            )


class Ablation:
    """All stages of an ablation file.

    Args:
        path: the file.
        overrides: more overrides, for every row.
        rows: names of the rows to include; empty: all.
        num_seeds: number of runs of each row; None: as in the file.
        only_pretraining: leave out all other stages.

    Attributes:
        path: the file.
        name: name of the file without suffix, and of the folder in `runs/` that holds all runs.
        rows: overrides of each row by its name.
        published: see AblationConfig.
        runs: all pretraining runs, ordered by seed and then by row.
        stages: all stages in an order in which they can run: for each seed, the pretraining of every row, then what follows it.

    Raises:
        InputError: the file is not an ablation, a row does not exist, or a setting is invalid.
    """

    def __init__(
        self,
        path: Path,
        overrides: Sequence[str] = (),
        rows: Sequence[str] = (),
        num_seeds: int | None = None,
        only_pretraining: bool = False,
    ) -> None:
        if not any(key in ("base", "model", "rows") or key.startswith("rows.") for key in keys_in_file(path)):
            raise InputError(f"{path} is invalid: it is not an ablation, which has `rows:`. See configs/ablations.")
        self._config = config = load_config(AblationConfig, path)
        for row in rows:
            if row not in config.rows:
                raise InputError(
                    f"--rows={row} is invalid: {path} has the rows {', '.join(config.rows)}. Give one of them."
                )
        _check_overrides("", overrides, config.row_keys)
        self.path, self.name, self.base = path, path.stem, Path(_resolve(path, config.base))
        self.rows = {row: changes for row, changes in config.rows.items() if row in (rows or config.rows)}
        for row, changes in self.rows.items():
            self._check_text(row, changes)
        self.published = config.published
        self._common, self._overrides = config.common, overrides
        self.num_seeds = config.num_seeds if num_seeds is None else num_seeds
        check_minimum("--seeds", self.num_seeds, 1, "Leave it out to use num_seeds of the file.")
        self.seeds = range(1, self.num_seeds + 1)
        if only_pretraining and config.model:
            raise InputError(
                f"--only-pretraining is invalid with model={config.model} in {path}: nothing is pretrained. Leave it out."
            )
        self._cli_args = {
            name: check_cli_args(f"{path}: evaluate.{kind}.{name}", kind, text)
            for kind, texts in (("pairs", config.evaluate.pairs), ("text", config.evaluate.text))
            for name, text in texts.items()
        }
        self.runs = [self._run(row, seed) for seed in self.seeds for row in self.rows] if config.base else []
        self.stages: list[Stage] = []
        for seed in self.seeds:
            runs = {run.row: run for run in self.runs if run.seed == seed}
            self.stages += runs.values()
            for row in () if only_pretraining else self.rows:
                self.stages += self._following(row, seed, runs.get(row))

    @property
    def base_row(self) -> str:
        """First row, with which the others are compared."""
        return next(iter(self.rows))

    @property
    def folder(self) -> Path:
        """Folder of all runs and of the comparison."""
        return Path("runs") / self.name

    @property
    def last_seed(self) -> int:
        """Largest seed of the existing run folders; 0 if none exist."""
        names = [path.name.removeprefix("seed_") for row in self.rows for path in (self.folder / row).glob("seed_*")]
        return max((int(name) for name in names if name.isdecimal()), default=0)

    @property
    def ignored_overrides(self) -> str:
        """Notes that name the settings on the command line that rows set themselves, one per line; usually empty."""
        notes = []
        for override in self._overrides:
            key = override.partition("=")[0]
            rows = [row for row, changes in self.rows.items() if any(key in keys_in_override(x) for x in changes)]
            if rows:
                notes.append(
                    f"note: {override} does not apply to the rows that set {key} themselves: {', '.join(rows)}."
                )
        return "\n".join(notes)

    def check_inputs(self) -> None:
        """Raise InputError with all problems of the inputs of the stages: texts, vocabularies, models and examples."""
        checked: list[Pretraining | Evaluation | Finetuning] = [
            *self.runs[: len(self.rows)]
        ]  # other seeds have the same inputs
        inputs: list[Any] = []  # of the checked stages after pretraining
        for stage in self.stages:
            if isinstance(stage, Evaluation | Finetuning):
                read = stage.inputs_to_check
                if read not in inputs:
                    inputs.append(read)
                    checked.append(stage)
        problems: dict[str, list[str]] = {}
        for stage in checked:
            try:
                stage.check_inputs()
            except InputError as error:
                origin = f"row {stage.row}" if isinstance(stage, Pretraining) else _key(stage)
                problems.setdefault(str(error), []).append(origin)
        if problems:
            raise InputError("\n".join(f"{', '.join(origins)}: {problem}" for problem, origins in problems.items()))

    def _check_text(self, row: str, changes: Sequence[str]) -> None:
        """Raise InputError if a row sets how text is read or encoded, but reads the token store of the other rows."""
        keys = {key: change for change in changes for key in keys_in_override(change)}
        for key, change in keys.items():
            if key.startswith(("text.", "tokenizer.")) and key != "tokenizer.path" and "data.store_dir" not in keys:
                raise InputError(
                    f"{self.path}: row {row}: {change} is invalid: it has no effect on the token store of the other rows, which this row "
                    "reads, too. Prepare another store with it, and set data.store_dir and tokenizer.path in the row."
                )

    def _run(self, row: str, seed: int) -> Pretraining:
        overrides = [*self._common, *self._overrides, *self.rows[row]]
        try:
            config = load_config(PretrainConfig, self.base, overrides)
        except InputError as error:
            raise InputError(f"{self._blame(row, str(error))}: {error}") from None
        name, folder = f"{self.name}_{row}_{seed}", self._row_folder(row, seed)
        # the defaults of both settings contain the name of the run, but all runs share these folders
        inputs = [f"data.store_dir={config.data.store_dir}", f"tokenizer.path={config.tokenizer.path}"]
        args = ["--config", str(self.base), *inputs, *overrides]
        args += [f"name={name}", f"run_dir={folder}", f"seed={seed}"]
        return Pretraining(row, seed, folder, args, load_config(PretrainConfig, self.base, args[2:]))

    def _following(self, row: str, seed: int, run: Pretraining | None) -> Sequence[Evaluation | Finetuning]:
        """Return the stages of a row that read its model. Random weights are not evaluated, and a given model only once."""
        config, folder = self._config, self._row_folder(row, seed)
        changes = [] if run else [*self._common, *self._overrides, *self.rows[row]]
        model, pretraining = (run.model, run.folder) if run else (config.model, None)
        tunings: list[Finetuning] = []
        seeds = range(1, config.finetune.seeds + 1) if run else [seed]
        rates: Sequence[float | None] = config.finetune.learning_rates or [None]
        for task, rate in itertools.product(config.finetune.tasks, rates):
            file, settings = self._task_settings(task, config.finetune.tasks[task])
            of_task = [*config.finetune.common, *settings, *changes]
            task_folder = folder / "finetune" / task
            if rate is not None:
                of_task.append(f"optim.lr={rate!r}")
                task_folder = task_folder.with_name(f"{task}_lr_{rate:g}")
            stage = Finetuning(row, seed, task_folder, task, model, pretraining, file, of_task, seeds, rate)
            try:
                if stage.config.task is None:
                    raise InputError("it has no task. Add task=NAME, such as task=glue/mrpc.")
            except InputError as error:
                raise InputError(f"{self.path}: finetune.tasks.{task}, row {row}: {error}") from None
            # a row or the command line may set another model
            tunings.append(stage if run else dataclasses.replace(stage, model=str(stage.config.init_from)))
        if not run:
            model = tunings[0].model
            if tunings[0].config.from_scratch or seed != self.seeds[0]:
                return tunings
        evaluations: list[Evaluation | Finetuning] = [
            kind(row, seed, folder / "evaluate" / name, name, model, pretraining, self._cli_args[name])
            for names, kind in ((config.evaluate.pairs, PairsEvaluation), (config.evaluate.text, TextEvaluation))
            for name in names
        ]
        return evaluations + tunings

    def _task_settings(self, task: str, words: Sequence[str]) -> tuple[str, Sequence[str]]:
        """Return the settings file and the overrides of a task."""
        has_file = bool(words) and words[0].endswith(SUFFIXES) and "=" not in words[0]
        file = words[0] if has_file else self._config.finetune.base
        if not file:
            raise InputError(
                f"{self.path}: finetune.tasks.{task} is invalid: it has no settings file. Set finetune.base, or write the path of a "
                "file as the first entry."
            )
        return _resolve(self.path, file), words[1:] if has_file else words

    def _row_folder(self, row: str, seed: int) -> Path:
        return self.folder / row / f"seed_{seed}"

    def _blame(self, row: str, message: str) -> str:
        """Return the part of the settings of a row that causes the error `message`."""
        parts = {f"base {self.base}": (), "common": self._common, "the command line": self._overrides}
        overrides: list[str] = []
        for part, of_part in parts.items():
            overrides += of_part
            try:
                load_config(PretrainConfig, self.base, overrides)
            except InputError as error:
                if str(error) == message:
                    return part
        return f"row {row}"


def _resolve(path: Path, other: str) -> str:
    """Return the path of a file that is named in the file `path`, relative to the working directory."""
    return os.path.relpath(path.parent.resolve() / other)


def _key(stage: Evaluation | Finetuning) -> str:
    """Return the key of a stage in the file."""
    return f"evaluate.{stage.kind}.{stage.key}" if isinstance(stage, Evaluation) else f"finetune.tasks.{stage.key}"
