"""Ablation: a file of settings and rows of overrides, the runs of each row, and their comparison.

docs/evaluation.md describes the file and the comparison.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from pretrain.config import PretrainConfig, changed_settings
from pretrain.tools.paired_statistics import CONFIDENCE, Difference, paired_difference
from pretrain.trainer.inputs import RunInputs, is_finished
from xlpre.common.files import write_text
from xlpre.common.plots import COLOURS, new_axes, save_figure
from xlpre.common.tables import to_csv, to_jsonl, to_markdown, to_text
from xlpre.config.cli import ExplicitKeys
from xlpre.config.loader import load_config
from xlpre.training.metrics_writer import read_metrics

ROW_KEYS = ("name", "run_dir", "seed")  # settings that pretrain/ablate.py sets for each run
OUTPUT_FILES = ("table.md", "table.csv", "results.jsonl", "losses.png", "differences.png")
HIDDEN_COLUMNS = {  # columns that are not printed on a terminal
    "settings",
    "million tokens read",
    "difference at equal tokens",
    "smallest detectable difference",
    "unigram baseline",
    "million tokens to beat the baseline",
}
MARGIN = 0.1  # nats; a model with a loss this far below the unigram baseline has learned from context


@dataclass(frozen=True)
class AblationConfig:
    """Comparison of pretraining runs.

    Attributes:
        base: path of the settings file of all runs, relative to the folder of the ablation file.
        common: overrides of every row.
        num_seeds: number of runs of each row, with the seeds 1, 2, ...
        rows: overrides of each row by its name. All other rows are compared with the first one.
        published: published results of rows, by the name of the measure and then of the row. They are shown beside the results here.
    """

    base: str = ""
    common: list[str] = field(default_factory=list)
    num_seeds: int = 1
    rows: dict[str, list[str]] = field(default_factory=dict)
    published: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.base or not self.rows or self.num_seeds < 1:
            raise ValueError(
                "the ablation is invalid: it must have `base:` (a settings file), `rows:` (lists of overrides by name), and "
                "num_seeds of at least 1. Add what is missing."
            )
        for row in self.rows:
            if row in ("", ".", "..") or "/" in row:
                raise ValueError(
                    f"row {row!r} is invalid: the name of a row becomes the name of a folder, so it must not be empty, '.' or '..', or "
                    "contain a slash. Rename it."
                )
        for measure, values in self.published.items():
            if unknown := [row for row in values if row not in self.rows]:
                raise ValueError(
                    f"published: {measure}: {unknown[0]} is invalid: there is no such row. Name one of {', '.join(self.rows)}."
                )
        for origin, overrides in {"common": self.common, **{f"row {row}": self.rows[row] for row in self.rows}}.items():
            for override in overrides:
                if (key := override.partition("=")[0]) in ROW_KEYS:
                    raise ValueError(
                        f"{origin}: {override} is invalid: pretrain/ablate.py sets {key} for each run. Leave it out."
                    )


@dataclass(frozen=True)
class Run:
    """One pretraining run of an ablation: the settings of a row with one seed.

    Attributes:
        row: name of the row.
        seed: seed of the run.
        args: arguments of its command: --config, the base file, and overrides.
        config: settings of the run.
    """

    row: str
    seed: int
    args: Sequence[str]
    config: PretrainConfig

    @property
    def name(self) -> str:
        """Name of the run in progress lines."""
        return f"row {self.row}, seed {self.seed}"

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return Path(self.config.run_dir)

    @property
    def explicit_keys(self) -> ExplicitKeys:
        """Keys that the command sets."""
        return ExplicitKeys.read(self.args[1], self.args[2:])

    def is_finished(self) -> bool:
        """Return True if the run is finished.

        Raises:
            ValueError: the run has other settings than its row.
        """
        if not is_finished(self.config, self.explicit_keys):
            return False
        self.check_settings()
        return True

    def describe_result(self) -> str:
        """Return the last validation loss for a progress line; empty if the run was not evaluated."""
        if not (result := RunResult.read(self)):
            return ""
        return f"val loss {result.loss:.3f} (unigram baseline {result.last['val_unigram_loss']:.3f})"

    def check_settings(self) -> None:
        """Raise ValueError if the run in the folder has other settings than its row."""
        for key, (saved, present) in changed_settings(self.config).items():
            raise ValueError(
                f"row {self.row}: {key}={present} is invalid: {self.folder} was trained with {key}={saved}. "
                f"Set {key}={saved}, rename the row, or remove that folder."
            )

    def check_inputs(self) -> None:
        """Raise ValueError if the run cannot start because of its text, its vocabulary or its model."""
        try:
            RunInputs(self.config, self.explicit_keys)
        except ValueError as error:
            raise ValueError(f"row {self.row}: {error}") from None

    def check_batch(self, processes: int) -> None:
        """Raise ValueError if `processes` processes cannot share the batch."""
        try:
            self.config.train.batch_schedule(processes)
        except ValueError as error:
            raise ValueError(f"row {self.row} with --processes {processes}: {error}") from None


class Ablation:
    """All runs of an ablation file.

    Args:
        path: the file.
        overrides: more overrides, for every row.
        rows: names of the rows to include; empty: all.
        num_seeds: number of runs of each row; None: as in the file.

    Attributes:
        path: the file.
        name: name of the file without suffix, and of the folder in `runs/` that holds all runs.
        rows: overrides of each row by its name.
        published: see AblationConfig.
        runs: all runs, ordered by seed and then by row.

    Raises:
        ValueError: the file is not an ablation, a row does not exist, or a setting is invalid.
    """

    def __init__(
        self, path: Path, overrides: Sequence[str] = (), rows: Sequence[str] = (), num_seeds: int | None = None
    ) -> None:
        config = load_config(AblationConfig, path)
        for row in rows:
            if row not in config.rows:
                raise ValueError(
                    f"--rows {row} is invalid: {path} has the rows {', '.join(config.rows)}. Give one of them."
                )
        self.path, self.name, self.base = path, path.stem, Path(os.path.normpath(path.parent / config.base))
        self.rows = {row: changes for row, changes in config.rows.items() if row in (rows or config.rows)}
        self._common, self._overrides = config.common, overrides
        self.published = config.published
        self.num_seeds = config.num_seeds if num_seeds is None else num_seeds
        if self.num_seeds < 1:
            raise ValueError(
                f"--seeds {self.num_seeds} is invalid: it must be at least 1. Leave it out to use num_seeds of the file."
            )
        self.runs = [self._run(row, seed) for seed in range(1, self.num_seeds + 1) for row in self.rows]

    @property
    def folder(self) -> Path:
        """Folder of all runs and of the comparison."""
        return Path("runs") / self.name

    def _run(self, row: str, seed: int) -> Run:
        overrides = [*self._common, *self._overrides, *self.rows[row]]
        try:
            config = load_config(PretrainConfig, self.base, overrides)
        except ValueError as error:
            raise ValueError(f"{self._blame(row, str(error))}: {error}") from None
        name, folder = f"{self.name}_{row}_{seed}", self.folder / row / f"seed_{seed}"
        # the defaults of both settings contain the name of the run, but all runs share these folders
        inputs = [f"data.store_dir={config.data.store_dir}", f"tokenizer.path={config.tokenizer.path}"]
        args = ["--config", str(self.base), *inputs, *overrides]
        args += [f"name={name}", f"run_dir={folder}", f"seed={seed}"]
        return Run(row, seed, args, load_config(PretrainConfig, self.base, args[2:]))

    def _blame(self, row: str, message: str) -> str:
        """Return the part of the settings of a row that causes the error `message`."""
        parts = {f"base {self.base}": (), "common": self._common, "the command line": self._overrides}
        overrides: list[str] = []
        for part, of_part in parts.items():
            overrides += of_part
            try:
                load_config(PretrainConfig, self.base, overrides)
            except ValueError as error:
                if str(error) == message:
                    return part
        return f"row {row}"


@dataclass(frozen=True)
class RunResult:
    """Evaluations of one run.

    Attributes:
        seed: seed of the run.
        evaluations: records of its metrics.jsonl with a validation loss.
    """

    seed: int
    evaluations: Sequence[dict[str, Any]]

    @classmethod
    def read(cls, run: Run) -> RunResult | None:
        """Read the result of a run; None if it was not evaluated yet.

        Raises:
            ValueError: the run has other settings than its row.
        """
        run.check_settings()
        evaluations = [record for record in read_metrics(run.folder) if "val_loss" in record]
        return cls(run.seed, evaluations) if evaluations else None

    @property
    def last(self) -> dict[str, Any]:
        """Last evaluation."""
        return self.evaluations[-1]

    @property
    def loss(self) -> float:
        """Last validation loss in nats; infinite if it was not finite."""
        return _finite_or_inf(self.last["val_loss"])

    @property
    def losses(self) -> dict[int, float]:
        """Validation losses by the number of window tokens read."""
        return {record["tokens"]: _finite_or_inf(record["val_loss"]) for record in self.evaluations}

    @property
    def minimal_pairs(self) -> float | None:
        """Last accuracy on minimal pairs in percent; None if the run has none (`eval.minimal_pairs`)."""
        return self.last.get("val_minimal_pairs")

    @property
    def tokens_to_beat_unigram(self) -> float:
        """Millions of window tokens until the loss is `MARGIN` below the unigram baseline; infinite if it never is."""
        below = (x for x in self.evaluations if _finite_or_inf(x["val_loss"]) < x["val_unigram_loss"] - MARGIN)
        return next((record["tokens"] / 1e6 for record in below), math.inf)


def read_results(ablation: Ablation) -> dict[str, list[RunResult]]:
    """Read the results of all evaluated runs by row."""
    results: dict[str, list[RunResult]] = {row: [] for row in ablation.rows}
    for run in ablation.runs:
        if result := RunResult.read(run):
            results[run.row].append(result)
    return {row: row_results for row, row_results in results.items() if row_results}


def build_table(ablation: Ablation) -> list[dict[str, str]]:
    """Compare each evaluated row with the first one.

    Rows are compared at the end, and at the last number of window tokens at which all runs of both rows were evaluated.

    Returns:
        One dict per row, with cells by column name.

    Raises:
        ValueError: no run was evaluated yet.
    """
    results = read_results(ablation)
    if not results:
        raise ValueError(f"{ablation.folder} is invalid: it contains no evaluated run. Start the runs with --run.")
    (base_row, base), *_ = (
        results.items()
    )  # if no run of the first row is evaluated yet, the next evaluated row takes its place
    table = []
    has_minimal_pairs = any(r.minimal_pairs is not None for row_results in results.values() for r in row_results)
    for row, row_results in results.items():
        losses, lasts = sorted(result.loss for result in row_results), [result.last for result in row_results]
        beats_at = [result.tokens_to_beat_unigram for result in row_results]
        comparable = _is_comparable(row_results, base)
        common_tokens = max(set.intersection(*(set(result.losses) for result in (*row_results, *base))))
        final_difference = _median_loss(row_results) - _median_loss(base)
        row_loss, base_loss = (median(r.losses[common_tokens] for r in group) for group in (row_results, base))
        by_seed = difference_by_seed(row_results, base, "loss")
        pairs = difference_by_seed(row_results, base, "minimal_pairs")
        table.append(
            {
                "row": row,
                "settings": " ".join(ablation.rows[row]) or "none",
                "runs": str(len(row_results)),
                "million tokens read": f"{median(x['tokens'] for x in lasts) / 1e6:.2f}",
                "training minutes": f"{median(x['train_seconds'] for x in lasts) / 60:.1f}",
                "validation loss": f"{median(losses):.3f}",
                "lowest to highest": f"{losses[0]:.3f} to {losses[-1]:.3f}" if len(losses) > 1 else "",
                f"difference to {base_row}": _format_difference(final_difference) if comparable else "other targets",
                "difference at equal tokens": (
                    f"{_format_difference(row_loss - base_loss)} ({common_tokens / 1e6:.2f} M)" if comparable else ""
                ),
                "by seed (95 % interval)": _format_interval(by_seed, 3) if row != base_row else "",
                "smallest detectable difference": _format_detectable(by_seed, 3) if row != base_row else "",
                **(
                    {
                        "minimal pairs": f"{median(r.minimal_pairs or 0.0 for r in row_results):.1f} %",
                        "minimal pairs, difference": _format_interval(pairs, 1) if row != base_row else "",
                    }
                    if has_minimal_pairs
                    else {}
                ),
                "unigram baseline": f"{lasts[0]['val_unigram_loss']:.3f}",
                "million tokens to beat the baseline": _format_range(
                    [x for x in beats_at if x < math.inf], len(beats_at)
                ),
                "bits per byte": f"{median(_finite_or_inf(x['val_bpb']) for x in lasts):.3f}",
                "accuracy": f"{median(x['val_accuracy'] for x in lasts) * 100:.1f} %",
                **{f"published: {measure}": str(values.get(row, "")) for measure, values in ablation.published.items()},
            }
        )
    return table


def difference_by_seed(results: Sequence[RunResult], base: Sequence[RunResult], measure: str) -> Difference | None:
    """Compare a row with the base by seed; None if they have no seed in common, other targets, or no such measure.

    Args:
        results: results of the row.
        base: results of the base.
        measure: `loss` or `minimal_pairs`.
    """
    if measure == "loss" and not _is_comparable(results, base):
        return None
    values, base_values = (
        {result.seed: float(value) for result in group if (value := getattr(result, measure)) is not None}
        for group in (results, base)
    )
    return paired_difference(values, base_values)


def to_records(results: dict[str, list[RunResult]]) -> list[dict[str, Any]]:
    """Return the measures of each row, by seed and compared with the first row, as JSON values."""
    base = next(iter(results.values()))
    records = []
    for row, row_results in results.items():
        for measure in ("loss", "minimal_pairs"):
            values = {str(result.seed): getattr(result, measure) for result in row_results}
            if all(value is None for value in values.values()):
                continue
            difference = difference_by_seed(row_results, base, measure)
            records.append(
                {
                    "row": row,
                    "measure": measure,
                    "by_seed": {seed: _finite_or_none(value) for seed, value in values.items()},
                    "difference": difference and difference.to_json(),
                }
            )
    return records


def describe_table(table: Sequence[dict[str, str]]) -> str:
    """Return the notes below a table: definitions of its columns, and a warning if differences may be seed noise."""
    notes = (
        "Numbers are medians over the runs of a row. Validation loss and unigram baseline are in nats per target; lower is better.\n"
        f"A row beats the baseline when its loss is {MARGIN} below it. Tokens are window tokens."
    )
    if all(row["runs"] == "1" for row in table):
        notes += "\nOne run per row: differences cannot be distinguished from seed noise; use --seeds 3."
    else:
        notes += (
            f"\nBy seed: mean difference between runs with the same seed, and its {CONFIDENCE:.0%} interval (bootstrap), within noise "
            "if it contains 0.\nThis number of seeds finds the smallest detectable difference with a probability of 80 %."
        )
    return notes


def write_comparison(ablation: Ablation, is_subset: bool = False) -> None:
    """Write table.md, table.csv and losses.png into the folder of the ablation, and print the most important columns.

    Args:
        ablation: the ablation.
        is_subset: True if only some rows are included: the files are then named subset_table.md and so on.
    """
    table, prefix = build_table(ablation), "subset_" * is_subset
    notes, files = describe_table(table), {name: ablation.folder / f"{prefix}{name}" for name in OUTPUT_FILES}
    write_text(files["table.md"], f"{to_markdown(table)}\n{notes}\n")
    write_text(files["table.csv"], to_csv(table))
    results = read_results(ablation)
    write_text(files["results.jsonl"], to_jsonl(to_records(results)))
    save_figure(draw_losses(results), files["losses.png"])
    if figure := draw_differences(results):
        save_figure(figure, files["differences.png"])
    print(to_text([{name: cell for name, cell in row.items() if not _is_hidden(name)} for row in table]))
    print(f"{notes}\nAll columns: {files['table.md']}, {files['table.csv']}. Picture: {files['losses.png']}.")


def _is_hidden(column: str) -> bool:
    """Return True if a column is not printed on a terminal."""
    return column in HIDDEN_COLUMNS or column.startswith("published: ")


def draw_losses(results: dict[str, list[RunResult]]) -> Any:
    """Draw the last validation loss of every run: a line of dots per row, sorted by the median, which is written beside it.

    Rows that were evaluated on other targets than the first row have hollow dots. Dots beyond the axis are triangles at its end.
    """
    base_row, base = next(iter(results.items()))
    baseline = base[0].last["val_unigram_loss"]
    rows = sorted(results, key=lambda row: _median_loss(results[row]), reverse=True)  # the best row at the top
    losses = [result.loss for row_results in results.values() for result in row_results if result.loss < math.inf]
    near = [loss for loss in losses if loss < baseline + 2 * MARGIN] or losses or [baseline]
    low, high = min(near), max(near)
    margin = max(0.08 * (high - low), MARGIN - (high - low) / 2)  # an axis of at least 2 MARGIN
    figure, (axes,) = new_axes(8, 1.4 + 0.32 * len(rows))
    for y, row in enumerate(rows):
        fill = "full" if _is_comparable(results[row], base) else "none"
        for result in results[row]:
            marker = "o" if result.loss <= high else ">"
            axes.plot(min(result.loss, high + margin), y, marker, color=COLOURS[0], fillstyle=fill, clip_on=False)
        text = f"{_median_loss(results[row]):.3f}"
        axes.text(1.03, y, text, transform=axes.get_yaxis_transform(), va="center", fontsize=9)
    axes.axvline(_median_loss(base), color=COLOURS[0], linewidth=1, label=f"median of {base_row}")
    if low - margin <= baseline <= high + margin:
        axes.axvline(baseline, color="#b4442c", linestyle="--", linewidth=1, label="unigram baseline")
    is_other = [not _is_comparable(results[row], base) for row in rows]
    axes.set_yticks(
        range(len(rows)),
        [f"{row} (other targets)" if other else row for row, other in zip(rows, is_other, strict=True)],
    )
    axes.set(xlim=(low - margin, high + margin), ylim=(-0.6, len(rows) - 0.4))
    axes.ticklabel_format(axis="x", useOffset=False)
    axes.set(xlabel="last validation loss, nats per target (at the right: median of the runs)", ylabel="row")
    axes.grid(axis="both", color="#e3e7ee")
    figure.legend(loc="outside upper right", frameon=False, fontsize=8, ncols=2)
    return figure


def draw_differences(results: dict[str, list[RunResult]]) -> Any:
    """Draw the difference of each row to the first one by seed, with intervals. Return None if no row has two seeds of the base."""
    base_row, base = next(iter(results.items()))
    measures = {"loss": "difference in validation loss, nats", "minimal_pairs": "difference in minimal pairs, percent"}
    differences = {
        measure: {
            row: difference
            for row, row_results in results.items()
            if row != base_row
            and (difference := difference_by_seed(row_results, base, measure))
            and difference.has_interval
        }
        for measure in measures
    }
    shown = [measure for measure in measures if differences[measure]]
    if not shown:
        return None
    figure, all_axes = new_axes(4 + 4 * len(shown), 1.4 + 0.32 * max(map(len, differences.values())), len(shown))
    for axes, measure in zip(all_axes, shown, strict=True):
        rows = sorted(differences[measure], key=lambda row: differences[measure][row].mean, reverse=measure == "loss")
        for y, row in enumerate(rows):
            each = differences[measure][row]
            colour = "#9aa3ad" if each.is_noise else COLOURS[0]
            axes.plot([each.low, each.high], [y, y], color=colour, linewidth=1.5)
            axes.plot(each.mean, y, "o", color=colour)
        axes.axvline(0, color="#333333", linewidth=0.8)
        axes.set_yticks(range(len(rows)), rows)
        axes.set(xlabel=f"{measures[measure]} to {base_row}", ylim=(-0.6, len(rows) - 0.4))
    figure.suptitle(f"mean over seeds, {CONFIDENCE:.0%} intervals; grey: within noise", fontsize=9)
    return figure


def _is_comparable(results: Sequence[RunResult], base: Sequence[RunResult]) -> bool:
    """Return True if the runs of two rows were evaluated on the same targets: their unigram baselines are equal."""
    return abs(results[0].last["val_unigram_loss"] - base[0].last["val_unigram_loss"]) < 1e-6


def _median_loss(results: Sequence[RunResult]) -> float:
    return median(result.loss for result in results)


def _format_difference(difference: float) -> str:
    """Return a difference with its sign, or without a sign if it is zero after rounding."""
    text = f"{difference:+.3f}"
    return text if float(text) else text[1:]


def _format_range(values: Sequence[float], n_runs: int) -> str:
    if not values:
        return "never"
    text = f"{min(values):.2f}" + (f" to {max(values):.2f}" if max(values) > min(values) else "")
    return text if len(values) == n_runs else f"{text} ({n_runs - len(values)} never)"


def _format_interval(difference: Difference | None, digits: int) -> str:
    """Return the mean difference with its interval, and whether it is noise; "" without an interval."""
    if difference is None or not difference.has_interval:
        return ""
    low, mean, high = (f"{value:+.{digits}f}" for value in (difference.low, difference.mean, difference.high))
    return f"{mean} ({low} to {high})" + (", within noise" if difference.is_noise else "")


def _format_detectable(difference: Difference | None, digits: int) -> str:
    return f"{difference.detectable:.{digits}f}" if difference and difference.has_interval else ""


def _finite_or_none(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _finite_or_inf(value: float | None) -> float:
    return math.inf if value is None else value
