"""Comparison of the rows of an ablation: tables, JSON lines and pictures. docs/evaluation.md describes them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

from pretrain.tools.ablation.plan import Ablation
from pretrain.tools.ablation.stages import Evaluation, Finetuning, PairsEvaluation, Pretraining
from pretrain.tools.paired_statistics import CONFIDENCE, Difference, paired_difference
from xlpre.common.files import write_text
from xlpre.common.plots import COLOURS, new_axes, save_figure
from xlpre.common.tables import to_csv, to_jsonl, to_markdown, to_text

OUTPUT_FILES = ("table.md", "table.csv", "results.jsonl", "losses.png", "differences.png")
HIDDEN_COLUMNS = {  # columns that are not printed on a terminal
    "settings",
    "million tokens read",
    "difference at equal tokens",
    "smallest detectable difference",
    "unigram baseline",
    "million tokens to beat the baseline",
}
LOSS, PAIRS = "validation loss", "minimal pairs"  # measures in the metrics of a pretraining run
# values of an evaluation on text that are equal if two models predicted the same targets in the same way
TARGET_KEYS = ("objective", "mode", "partial_k", "seq_len", "n_targets", "n_tokens", "n_bytes")
MARGIN = 0.1  # nats; a model with a loss this far below the unigram baseline has learned from context


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
    def read(cls, run: Pretraining) -> RunResult | None:
        """Read the result of a run; None if it was not evaluated yet.

        Raises:
            ValueError: the run has other settings than its row.
        """
        evaluations = run.evaluations()
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
    measures = read_measures(ablation)
    for row, row_results in results.items():
        losses, lasts = sorted(result.loss for result in row_results), [result.last for result in row_results]
        beats_at = [result.tokens_to_beat_unigram for result in row_results]
        comparable = _is_comparable(row_results, base)
        common_tokens = max(set.intersection(*(set(result.losses) for result in (*row_results, *base))))
        final_difference = _median_loss(row_results) - _median_loss(base)
        row_loss, base_loss = (median(r.losses[common_tokens] for r in group) for group in (row_results, base))
        by_seed = measures[LOSS].difference(row)
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
                "by seed (95 % interval)": _format_interval(by_seed, 3),
                "smallest detectable difference": _format_detectable(by_seed, 3),
                **(
                    {
                        PAIRS: measures[PAIRS].format(row),
                        f"{PAIRS}, difference": _format_interval(measures[PAIRS].difference(row), 1),
                    }
                    if PAIRS in measures
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


def read_measures(ablation: Ablation) -> dict[str, Measure]:
    """Read the measures of the rows by name: validation loss, minimal pairs, and the results of the stages after pretraining."""
    measures: dict[str, Measure] = {}

    def add(name: str, is_loss: bool, row: str, seed: int, value: float, is_at_chance: bool = False) -> None:
        measure = measures.setdefault(name, Measure(is_loss))
        measure.values.setdefault(row, {})[seed] = value
        if is_at_chance:
            measure.at_chance.setdefault(row, set()).add(seed)

    all_results = read_results(ablation)
    base = next(iter(all_results.values()), [])
    for row, results in all_results.items():
        for result in results:
            add(LOSS, True, row, result.seed, result.loss)
            if result.minimal_pairs is not None:
                add(PAIRS, False, row, result.seed, result.minimal_pairs)
        if not _is_comparable(results, base):
            measures[LOSS].other_targets.add(row)
    text_targets: dict[str, tuple[Any, ...]] = {}  # of the first row of each text
    for stage in ablation.stages:
        if isinstance(stage, Evaluation) and (records := stage.read()):
            for record in records:
                if isinstance(stage, PairsEvaluation):
                    add(stage.key, False, stage.row, stage.seed, record["accuracy"])
                else:
                    memory = f", memory {record['mem_len']}" if len(records) > 1 else ""
                    name = f"{stage.key}, loss{memory}"
                    add(name, True, stage.row, stage.seed, record["loss"])
                    targets = tuple(record.get(key) for key in TARGET_KEYS)
                    if targets != text_targets.setdefault(name, targets):
                        measures[name].other_targets.add(stage.row)
        elif isinstance(stage, Finetuning) and (scores := stage.read()):
            n_at_chance = sum(result.is_at_chance for result in scores.values())
            metric = next(iter(scores.values())).main_metric.partition("/")[2]
            score = 100 * mean(result.score for result in scores.values())
            add(f"{stage.key}, {metric}", False, stage.row, stage.seed, score, 2 * n_at_chance > len(scores))
    return measures


@dataclass
class Measure:
    """Values of a measure of all rows.

    Attributes:
        is_loss: True for a loss in nats, which is lower for better models; False for a score in percent.
        values: values by row and seed. The value of a fine-tuning is the mean over its seeds.
        at_chance: by row, the seeds whose fine-tuning mostly stayed at chance.
        other_targets: rows whose loss is that of other targets than the loss of the first row.
    """

    is_loss: bool
    values: dict[str, dict[int, float]] = field(default_factory=dict)
    at_chance: dict[str, set[int]] = field(default_factory=dict)
    other_targets: set[str] = field(default_factory=set)

    @property
    def digits(self) -> int:
        """Decimals of a value in a table."""
        return 3 if self.is_loss else 1

    @property
    def base_row(self) -> str:
        """First row that has values, with which the others are compared."""
        return next(iter(self.values))

    def difference(self, row: str) -> Difference | None:
        """Compare a row with the base by seed; None for the base, other targets, or rows without a common seed."""
        if row == self.base_row or row in self.other_targets or row not in self.values:
            return None
        return paired_difference(self.values[row], self.values[self.base_row])

    def format(self, row: str) -> str:
        """Return the median of a row for a table; empty if it has no values."""
        values = self.values.get(row)
        if not values:
            return ""
        text = f"{median(values.values()):.{self.digits}f}"
        n_at_chance = len(self.at_chance.get(row, ()))
        return f"{text} ({n_at_chance} of {len(values)} at chance)" if n_at_chance else text


def build_stage_table(measures: Mapping[str, Measure]) -> list[dict[str, str]]:
    """Return a table of the results after pretraining, with a line for each row of each measure; empty if there are none."""
    table = []
    for name, measure in measures.items():
        if name in (LOSS, PAIRS):
            continue
        for row, values in measure.values.items():
            difference = measure.difference(row)
            table.append(
                {
                    "measure": name if row == measure.base_row else "",
                    "row": row,
                    "runs": str(len(values)),
                    "median": measure.format(row),
                    "difference to first row, by seed": (
                        "other targets"
                        if row in measure.other_targets
                        else _format_interval(difference, measure.digits)
                    ),
                    "smallest detectable difference": _format_detectable(difference, measure.digits),
                }
            )
    return table


def to_records(measures: Mapping[str, Measure]) -> list[dict[str, Any]]:
    """Return all measures of each row, by seed and compared with the first row, as JSON values."""
    return [
        {
            "row": row,
            "measure": name,
            "by_seed": {str(seed): _finite_or_none(value) for seed, value in values.items()},
            "seeds_at_chance": sorted(measure.at_chance.get(row, ())),
            "difference": (difference := measure.difference(row)) and difference.to_json(),
        }
        for name, measure in measures.items()
        for row, values in measure.values.items()
    ]


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
    measures, prefix = read_measures(ablation), "subset_" * is_subset
    if not measures:
        raise ValueError(f"{ablation.folder} is invalid: it contains no evaluated run. Start the runs with --run.")
    files = {name: ablation.folder / f"{prefix}{name}" for name in OUTPUT_FILES}
    table = build_table(ablation) if LOSS in measures else []
    stages = build_stage_table(measures)
    parts = [f"{to_markdown(table)}\n{describe_table(table)}\n"] if table else []
    parts += [f"{to_markdown(stages)}\n{describe_stages(measures)}\n"] if stages else []
    write_text(files["table.md"], "\n".join(parts))
    write_text(files["table.csv"], to_csv(table or stages))
    write_text(files["results.jsonl"], to_jsonl(to_records(measures)))
    if table:
        save_figure(draw_losses(read_results(ablation)), files["losses.png"])
        print(to_text([{name: cell for name, cell in row.items() if not _is_hidden(name)} for row in table]))
        print(describe_table(table))
    if stages:
        print("\n" * bool(table) + f"{to_text(stages)}\n{describe_stages(measures)}")
    if figure := draw_differences(measures):
        save_figure(figure, files["differences.png"])
    written = ", ".join(str(path) for path in files.values() if path.exists())
    print(f"All columns, values by seed and pictures: {written}.")


def describe_stages(measures: Mapping[str, Measure]) -> str:
    """Return the notes below the table of the stages after pretraining."""
    notes = "Losses are in nats, scores in percent. The value of a fine-tuning is the mean over its seeds."
    if any(measure.at_chance for measure in measures.values()):
        notes += "\nAt chance: most fine-tunings of the run did not exceed the score of a trivial prediction."
    return notes


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


def draw_differences(measures: Mapping[str, Measure]) -> Any:
    """Draw the difference of each row to the first one by seed, with intervals. Return None if no row has two seeds of the base."""
    shown: list[tuple[str, Measure, dict[str, Difference]]] = []
    for name, measure in measures.items():
        differences = {row: each for row in measure.values if (each := measure.difference(row)) and each.has_interval}
        if differences:
            shown.append((name, measure, differences))
    if not shown:
        return None
    height = 1.4 + 0.32 * max(len(differences) for _, _, differences in shown)
    figure, all_axes = new_axes(1 + 4 * len(shown), height, len(shown))
    for axes, (name, measure, differences) in zip(all_axes, shown, strict=True):
        rows = sorted(differences, key=lambda row: differences[row].mean, reverse=measure.is_loss)
        for y, row in enumerate(rows):
            each = differences[row]
            colour = "#9aa3ad" if each.is_noise else COLOURS[0]
            axes.plot([each.low, each.high], [y, y], color=colour, linewidth=1.5)
            axes.plot(each.mean, y, "o", color=colour)
        axes.axvline(0, color="#333333", linewidth=0.8)
        axes.set_yticks(range(len(rows)), rows)
        unit = "nats" if measure.is_loss else "percent"
        axes.set(xlabel=f"{name},\ndifference to {measure.base_row} in {unit}", ylim=(-0.6, len(rows) - 0.4))
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
