"""Measures of the rows of an ablation: losses and scores by row and seed, read from the results of its stages."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

from pretrain.tools.ablation.plan import Ablation
from pretrain.tools.ablation.stages import Evaluation, Finetuning, PairsEvaluation, Pretraining, Result
from pretrain.tools.paired_statistics import Difference, paired_difference
from xlpre.common.job_pool import read_failure

LOSS, PAIRS = "validation loss", "minimal pairs"  # measures in the metrics of a pretraining run
# values of an evaluation on text that are equal if two models predicted the same targets in the same way
TARGET_KEYS = ("objective", "mode", "partial_k", "seq_len", "n_targets", "n_tokens", "n_bytes")
MARGIN = 0.1  # nats; a model with a loss this far below the unigram baseline has learned from context
NOT_COMPARABLE = "not comparable"  # in place of a difference of losses of other targets or objectives
NOT_SCORES = ("loss", "error", "threshold")  # ends of the names of metrics that are not scores


@dataclass(frozen=True)
class RunResult:
    """Evaluations of one pretraining run.

    Attributes:
        seed: seed of the run.
        objective: name of its objective.
        evaluations: records of its metrics.jsonl with a validation loss.
        is_finished: whether the last evaluation was at the end of the run.
    """

    seed: int
    objective: str
    evaluations: Sequence[dict[str, Any]]
    is_finished: bool

    @classmethod
    def read(cls, run: Pretraining) -> RunResult | None:
        """Read the result of a run; None if it was not evaluated yet.

        Raises:
            InputError: the run has other settings than its row.
        """
        evaluations = run.evaluations()
        if not evaluations:
            return None
        last = evaluations[-1]
        is_over = run.config.train.is_over(last["step"], last["train_seconds"])
        return cls(run.seed, run.config.objective.name, evaluations, is_over)

    @property
    def last(self) -> dict[str, Any]:
        """Last evaluation."""
        return self.evaluations[-1]

    @property
    def loss(self) -> float:
        """Last validation loss in nats; infinite if it was not finite."""
        return finite_or_inf(self.last["val_loss"])

    @property
    def losses(self) -> dict[int, float]:
        """Validation losses by the number of window tokens read."""
        return {record["tokens"]: finite_or_inf(record["val_loss"]) for record in self.evaluations}

    @property
    def minimal_pairs(self) -> float | None:
        """Last accuracy on minimal pairs in percent; None if the run has none (`eval.minimal_pairs`)."""
        return self.last.get("val_minimal_pairs")

    @property
    def tokens_to_beat_unigram(self) -> float:
        """Millions of window tokens until the loss is `MARGIN` below the unigram baseline; infinite if it never is."""
        below = (x for x in self.evaluations if finite_or_inf(x["val_loss"]) < x["val_unigram_loss"] - MARGIN)
        return next((record["tokens"] / 1e6 for record in below), math.inf)


@dataclass
class Measure:
    """Values of a measure of all rows.

    Attributes:
        is_loss: True for a loss in nats, which is lower for better models; False for a score in percent.
        base_row: first row of the ablation, with which the others are compared.
        is_main: False for further metrics of a task, which the tables for reading leave out.
        values: values by row and seed. The value of a fine-tuning is the mean over its seeds.
        finetuned: scores of a fine-tuning by row, seed of the row, and seed of the fine-tuning.
        learning_rates: by row, the learning rate of the fine-tuning, if there were several.
        at_chance: by row, the seeds whose fine-tuning mostly stayed at chance.
        unfinished: by row, the seeds whose pretraining is not finished.
        not_comparable: rows whose loss cannot be compared with that of the first row: it is of other targets or another objective.
    """

    is_loss: bool
    base_row: str
    is_main: bool = True
    values: dict[str, dict[int, float]] = field(default_factory=dict)
    finetuned: dict[str, dict[int, dict[int, float]]] = field(default_factory=dict)
    learning_rates: dict[str, float] = field(default_factory=dict)
    at_chance: dict[str, set[int]] = field(default_factory=dict)
    unfinished: dict[str, set[int]] = field(default_factory=dict)
    not_comparable: set[str] = field(default_factory=set)

    @property
    def digits(self) -> int:
        """Decimals of a value in a table."""
        return 3 if self.is_loss else 1

    def difference(self, row: str) -> Difference | None:
        """Compare a row with the base by seed; None for the base, rows that cannot be compared, or rows without a common seed.

        With one common seed of the rows, the seeds of their fine-tuning are compared.
        """
        if row == self.base_row or row in self.not_comparable:
            return None
        values, base = self.values.get(row, {}), self.values.get(self.base_row, {})
        difference = paired_difference(values, base)
        if difference is None or difference.n_pairs > 1 or not self.finetuned:
            return difference
        seed = next(seed for seed in values if seed in base)
        of_finetuning = paired_difference(self.finetuned[row][seed], self.finetuned[self.base_row][seed])
        return of_finetuning and dataclasses.replace(of_finetuning, of_finetuning=True)

    def format(self, row: str) -> str:
        """Return the median of a row for a table; empty if it has no values."""
        values = self.values.get(row)
        if not values:
            return ""
        text = f"{median(values.values()):.{self.digits}f}"
        n_at_chance = len(self.at_chance.get(row, ()))
        return f"{text} ({n_at_chance} of {len(values)} at chance)" if n_at_chance else text

    def to_json(self, name: str, row: str) -> dict[str, Any]:
        """Return the values of a row by seed and their comparison with the base as JSON values."""
        difference = self.difference(row)
        record: dict[str, Any] = {
            "row": row,
            "base": self.base_row,
            "measure": name,
            "by_seed": {str(seed): finite_or_none(value) for seed, value in self.values[row].items()},
        }
        if row in self.finetuned:
            record["by_finetuning_seed"] = {
                str(seed): {str(each): score for each, score in scores.items()}
                for seed, scores in self.finetuned[row].items()
            }
        if row in self.learning_rates:
            record["learning_rate"] = self.learning_rates[row]
        record["seeds_at_chance"] = sorted(self.at_chance.get(row, ()))
        record["seeds_unfinished"] = sorted(self.unfinished.get(row, ()))
        record["difference"] = difference and difference.to_json()
        return record


def read_results(ablation: Ablation) -> dict[str, list[RunResult]]:
    """Read the results of all evaluated pretraining runs by row."""
    results: dict[str, list[RunResult]] = {row: [] for row in ablation.rows}
    for run in ablation.runs:
        if result := RunResult.read(run):
            results[run.row].append(result)
    return {row: row_results for row, row_results in results.items() if row_results}


def read_failures(ablation: Ablation) -> list[dict[str, str]]:
    """Return row, seed, stage and reason of each stage whose last start failed."""
    return [
        {"row": stage.row, "seed": str(stage.seed), "stage": getattr(stage, "key", "pretraining"), "failed": reason}
        for stage in ablation.stages
        if (reason := read_failure(stage.folder))
    ]


def read_measures(ablation: Ablation) -> dict[str, Measure]:
    """Read the measures of the rows by name: validation loss, minimal pairs, and the results of the stages after pretraining."""
    measures = _Measures(ablation.base_row)
    all_results = read_results(ablation)
    for row, results in all_results.items():
        for result in results:
            of_run = [measures.add(LOSS, True, row, result.seed, result.loss)]
            if result.minimal_pairs is not None:
                of_run.append(measures.add(PAIRS, False, row, result.seed, result.minimal_pairs))
            for measure in () if result.is_finished else of_run:
                measure.unfinished.setdefault(row, set()).add(result.seed)
        if not is_comparable(results, all_results.get(ablation.base_row, ())):
            measures[LOSS].not_comparable.add(row)
    text_targets: dict[str, tuple[Any, ...]] = {}  # of the first row, for each text
    rows = list(ablation.rows)
    for stage in sorted(ablation.stages, key=lambda stage: rows.index(stage.row)):
        if not isinstance(stage, Evaluation) or not (records := stage.read()):
            continue
        for record in records:
            if isinstance(stage, PairsEvaluation):
                measures.add(stage.key, False, stage.row, stage.seed, record["accuracy"])
                continue
            memory = f", memory {record['mem_len']}" if len(records) > 1 else ""
            name = f"{stage.key}, loss{memory}"
            measure = measures.add(name, True, stage.row, stage.seed, record["loss"])
            targets = tuple(record.get(key) for key in TARGET_KEYS)
            if stage.row == ablation.base_row:
                text_targets[name] = targets
            elif text_targets.get(name, targets) != targets:
                measure.not_comparable.add(stage.row)
    for task in dict.fromkeys(stage.key for stage in ablation.stages if isinstance(stage, Finetuning)):
        for row in ablation.rows:
            _add_task(
                measures, [s for s in ablation.stages if isinstance(s, Finetuning) and (s.row, s.key) == (row, task)]
            )
    return measures


class _Measures(dict[str, Measure]):
    """Measures by name.

    Args:
        base_row: first row of the ablation.
    """

    def __init__(self, base_row: str) -> None:
        super().__init__()
        self._base_row = base_row

    def add(self, name: str, is_loss: bool, row: str, seed: int, value: float) -> Measure:
        """Add a value, and return its measure."""
        measure = self.setdefault(name, Measure(is_loss, self._base_row))
        measure.values.setdefault(row, {})[seed] = value
        return measure


def _add_task(measures: _Measures, stages: Sequence[Finetuning]) -> None:
    """Add the metrics of one row on one task, with the learning rate whose mean score over all seeds is highest."""
    by_rate: dict[float | None, dict[int, dict[int, Result]]] = {}
    for stage in stages:
        if results := stage.read():
            by_rate.setdefault(stage.lr, {})[stage.seed] = results
    if not by_rate:
        return
    n_seeds = max(map(len, by_rate.values()))
    rate, by_seed = max(
        ((rate, by_seed) for rate, by_seed in by_rate.items() if len(by_seed) == n_seeds),
        key=lambda entry: mean(mean(r.score for r in results.values()) for results in entry[1].values()),
    )
    row, task = stages[0].row, stages[0].key
    first = next(iter(next(iter(by_seed.values())).values()))
    names = [first.main_metric, *(name for name in first.metrics if name != first.main_metric)]
    for metric in names:
        if metric.endswith(NOT_SCORES):
            continue
        split, _, short = metric.partition("/")
        is_main_split = split == first.main_metric.partition("/")[0]
        name = f"{task}, {short}" if is_main_split else f"{task}, {split} {short}"
        for seed, results in by_seed.items():
            scores = {each: 100 * result.metrics[metric] for each, result in results.items()}
            measure = measures.add(name, False, row, seed, mean(scores.values()))
            measure.is_main = metric == first.main_metric
            measure.finetuned.setdefault(row, {})[seed] = scores
            if measure.is_main and 2 * sum(result.is_at_chance for result in results.values()) > len(results):
                measure.at_chance.setdefault(row, set()).add(seed)
        if rate is not None:
            measure.learning_rates[row] = rate


def is_comparable(results: Sequence[RunResult], base: Sequence[RunResult]) -> bool:
    """Return True if the runs of a row have the objective and the targets of the base. Equal targets have equal unigram baselines.

    Without runs of the base, the result is True.
    """
    if not base:
        return True
    same_targets = abs(results[0].last["val_unigram_loss"] - base[0].last["val_unigram_loss"]) < 1e-6
    return same_targets and results[0].objective == base[0].objective


def median_loss(results: Sequence[RunResult]) -> float:
    """Return the median of the last validation losses."""
    return median(result.loss for result in results)


def main_measures(measures: Mapping[str, Measure]) -> dict[str, Measure]:
    """Return the measures without the further metrics of the tasks."""
    return {name: measure for name, measure in measures.items() if measure.is_main}


def finite_or_none(value: float | None) -> float | None:
    """Return None for values that are not finite."""
    return value if value is not None and math.isfinite(value) else None


def finite_or_inf(value: float | None) -> float:
    """Return infinity for None."""
    return math.inf if value is None else value
