"""Results of single runs, the summary of several seeds (median, spread, runs at chance level), and merged GLUE submissions."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from finetune.tasks.glue import SUBMISSION_ROWS, zip_files
from xlpre.common.errors import InputError
from xlpre.common.files import write_text
from xlpre.training.lr_schedule import format_lr
from xlpre.training.metrics_writer import format_duration

FORMAT = 5  # version of checkpoints and results, which changes with parameter names, manifest fields and content of the batches
RESULT = "result.json"  # in the folder of a run
BEST = "best"  # model folder with the weights that are the result, in the folder of a run
# the trivial predictor that the chance threshold stands for, by the name of the metric
CHANCE_BASELINES = {
    "accuracy": "always predicting one class",
    "matthews": "random guessing",
    "pearson": "random guessing",
    "spearman": "random guessing",
    "ndcg": "a random order",
}


def chance_baseline(metric: str) -> str:
    """Return the name of the trivial predictor for a metric, such as dev/accuracy or ndcg@10."""
    return CHANCE_BASELINES.get(metric.rpartition("/")[2].partition("@")[0], "a trivial baseline")


@dataclass(frozen=True)
class Result:
    """Result of a run with one seed.

    Attributes:
        name: the setting `name`.
        task: name of the task.
        seed: seed of the run.
        main_metric: name of the metric that selects the best weights, as SPLIT/METRIC.
        metrics: all metrics of the selected weights, by SPLIT/METRIC.
        chance_threshold: value that the main metric must exceed to show that the model learned anything.
        model_step: step of the selected weights.
        lr: peak learning rate.
        steps: optimizer steps of the run.
        train_seconds: training time, without start-up and final evaluation.
    """

    name: str
    task: str
    seed: int
    main_metric: str
    metrics: Mapping[str, float]
    chance_threshold: float
    model_step: int
    lr: float
    steps: int
    train_seconds: float

    @property
    def score(self) -> float:
        """Value of the main metric."""
        return self.metrics[self.main_metric]

    @property
    def is_at_chance(self) -> bool:
        """True if the score does not exceed the chance threshold."""
        return self.score <= self.chance_threshold

    def write(self, path: Path, manifest: Mapping[str, Any]) -> None:
        """Write the result and the manifest of its run."""
        write_text(path, json.dumps({**dataclasses.asdict(self), "manifest": manifest}, indent=1))

    @classmethod
    def read(cls, path: Path) -> Result:
        """Read a result.

        Raises:
            InputError: the file is damaged, or was written by another version.
        """
        try:
            content = json.loads(path.read_text("utf-8"))
            if content.get("manifest", {}).get("format") == FORMAT:
                return cls(**{field.name: content[field.name] for field in dataclasses.fields(cls)})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(
                f"{path} is not a valid result: {error!r}. Remove it, and repeat the command that wrote it."
            ) from None
        raise InputError(
            f"{path} was written by another version of xlpre. Use that version, or give the fine-tuning another name."
        )

    @staticmethod
    def read_manifest(path: Path) -> dict[str, Any]:
        """Return the manifest of the run."""
        manifest: dict[str, Any] = json.loads(path.read_text("utf-8"))["manifest"]
        return manifest


@dataclass(frozen=True)
class Summary:
    """Summary of the runs of all seeds.

    Attributes:
        name: the setting `name`.
        task: name of the task.
        main_metric: name of the metric that selects the best weights.
        medians: median of each metric over the runs, by SPLIT/METRIC.
        scores: value of the main metric of each run.
        chance_threshold: value that the main metric must exceed to show that the model learned anything.
        n_at_chance: number of runs whose score does not exceed the chance threshold.
        lr: peak learning rate of the runs.
        steps: median number of optimizer steps.
        train_seconds: median training time of a run.
    """

    name: str
    task: str
    main_metric: str
    medians: Mapping[str, float]
    scores: Sequence[float]
    chance_threshold: float
    n_at_chance: int
    lr: float
    steps: int
    train_seconds: float

    def describe(self) -> str:
        """Return one line for the console."""
        scores = np.array(self.scores)
        value = f"{scores[0]:.4f}"
        if len(scores) > 1:
            value = (
                f"median {np.median(scores):.4f} of {len(scores)} runs (min {scores.min():.4f}, max {scores.max():.4f}, "
                f"std {scores.std(ddof=1):.4f})"
            )
        at_chance = ""
        if self.n_at_chance:
            at_chance = (
                f", {self.n_at_chance} of {len(scores)} runs at chance level (at most {self.chance_threshold:.4f})"
            )
        return f"result of {self.task}: {self.main_metric} {value}{at_chance}"

    def chance_warning(self) -> str:
        """Return a warning with a remedy if runs ended at chance level; empty if none did."""
        if not self.n_at_chance:
            return ""
        metric = self.main_metric.rpartition("/")[2]
        baseline = chance_baseline(metric)
        remedy = (
            f"Try another learning rate than optim.lr={format_lr(self.lr)} (small models often need 3e-4 to 1e-3; large models "
            "sometimes fail with one seed and not with others), more steps, or weights that were pretrained for longer."
        )
        chance = f"{self.chance_threshold:.3f} or less counts as chance"
        return f"{metric} {min(self.scores):.3f} is no better than {baseline} ({chance}). {remedy}"

    def to_row(self) -> dict[str, Any]:
        """Return a table row."""
        scores = np.array(self.scores)
        others = {name: value for name, value in self.medians.items() if name != self.main_metric}
        return {
            "name": self.name,
            "task": self.task,
            "metric": self.main_metric,
            "median": f"{np.median(scores):.4f}",
            "min": f"{scores.min():.4f}",
            "max": f"{scores.max():.4f}",
            "std": f"{scores.std(ddof=1):.4f}" if len(scores) > 1 else "",
            "runs": len(scores),
            "at chance": self.n_at_chance,
            "chance threshold": f"{self.chance_threshold:.4f}",
            "learning rate": format_lr(self.lr),
            "steps": self.steps,
            "time per run": format_duration(self.train_seconds),
            "medians of other metrics": ", ".join(f"{name} {value:.4f}" for name, value in others.items()),
        }


def summarize(results: Sequence[Result]) -> Summary:
    """Summarize the runs of all seeds."""
    first = results[0]
    return Summary(
        name=first.name,
        task=first.task,
        main_metric=first.main_metric,
        medians={name: float(np.median([result.metrics[name] for result in results])) for name in first.metrics},
        scores=[result.score for result in results],
        chance_threshold=first.chance_threshold,
        n_at_chance=sum(result.is_at_chance for result in results),
        lr=first.lr,
        steps=int(np.median([result.steps for result in results])),
        train_seconds=float(np.median([result.train_seconds for result in results])),
    )


def seed_folder(run_dir: str | Path, seed: int) -> Path:
    """Return the folder of the run with this seed."""
    return Path(run_dir) / f"seed_{seed}"


def result_paths(run_dir: Path) -> list[Path]:
    """Return the results in a run folder, in the order of the seeds. Other folders, such as a copy of that of a seed, do not count."""
    seeds = {path: path.parent.name.removeprefix("seed_") for path in run_dir.glob(f"seed_*/{RESULT}")}
    return sorted((path for path, seed in seeds.items() if seed.isdecimal()), key=lambda path: int(seeds[path]))


def read_run(run_dir: Path) -> Summary:
    """Read and summarize the runs in a folder.

    Raises:
        InputError: the folder has no result.
    """
    paths = result_paths(run_dir)
    if not paths:
        raise InputError(
            f"{run_dir} is invalid: it has no seed_*/{RESULT}. Give the folder of a finished fine-tuning run."
        )
    return summarize([Result.read(path) for path in paths])


def is_finished(run_dir: Path) -> bool:
    """Return True if the folder has the result of at least one seed."""
    return bool(result_paths(run_dir))


def merge_glue_submissions(run_dirs: Sequence[Path], target: Path) -> list[str]:
    """Write the official prediction files of several runs into one zip file.

    Args:
        run_dirs: folders of finished runs on GLUE tasks.
        target: the zip file.

    Returns:
        Names of the files that a complete submission has, but these runs do not.

    Predictions for other files than those of GLUE are left out.

    Raises:
        InputError: two runs have predictions for the same task, a file is incomplete, or there are no predictions.
    """
    files: dict[str, Path] = {}
    for path in (path for run_dir in run_dirs for path in sorted((run_dir / "predictions").glob("*.tsv"))):
        if path.name not in SUBMISSION_ROWS:
            continue
        if path.name in files:
            raise InputError(
                f"{path} and {files[path.name]} are predictions for the same task. Name only one of the runs."
            )
        n_rows = path.read_text("utf-8").count("\n") - 1
        if n_rows != SUBMISSION_ROWS[path.name]:
            raise InputError(
                f"{path} has {n_rows:,} predictions, but a submission needs {SUBMISSION_ROWS[path.name]:,}. Predict the whole test file."
            )
        files[path.name] = path
    if not files:
        raise InputError(
            f"{', '.join(map(str, run_dirs))}: no predictions for a test file of GLUE. Name folders of GLUE runs."
        )
    zip_files(list(files.values()), target)
    return sorted(SUBMISSION_ROWS.keys() - files.keys())
