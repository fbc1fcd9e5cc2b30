"""Comparison of the rows of an ablation: tables, JSON lines and pictures. docs/ablations.md describes them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

from pretrain.tools.ablation.measures import (
    LOSS,
    MARGIN,
    NOT_COMPARABLE,
    PAIRS,
    Measure,
    RunResult,
    finite_or_inf,
    is_comparable,
    main_measures,
    median_loss,
    read_failures,
    read_measures,
    read_results,
)
from pretrain.tools.ablation.pictures import draw_differences, draw_losses
from pretrain.tools.ablation.plan import Ablation
from pretrain.tools.paired_statistics import CONFIDENCE, Difference
from pretrain.tools.report_page import SUBSET_PREFIX
from xlpre.common.errors import InputError
from xlpre.common.files import write_text
from xlpre.common.plots import save_figure
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


def build_table(ablation: Ablation) -> list[dict[str, str]]:
    """Compare each evaluated row with the first one.

    Rows are compared at the end, and after the largest number of window tokens at which all runs of both rows were evaluated.

    Returns:
        One dict per row, with cells by column name.

    Raises:
        InputError: no run was evaluated yet.
    """
    results = read_results(ablation)
    if not results:
        raise InputError(f"{ablation.folder} is invalid: it contains no evaluated run. Start the runs with --run.")
    base = results.get(ablation.base_row, [])
    table = []
    measures = read_measures(ablation)
    for row, row_results in results.items():
        losses, lasts = sorted(result.loss for result in row_results), [result.last for result in row_results]
        beats_at = [result.tokens_to_beat_unigram for result in row_results]
        by_seed = measures[LOSS].difference(row)
        difference, at_equal_tokens = _format_differences(row_results, base)
        table.append(
            {
                "row": row,
                "settings": " ".join(ablation.rows[row]) or "none",
                "runs": _format_runs(row_results),
                "million tokens read": f"{median(x['tokens'] for x in lasts) / 1e6:.2f}",
                "training minutes": f"{median(x['train_seconds'] for x in lasts) / 60:.1f}",
                "validation loss": f"{median(losses):.3f}",
                "lowest to highest": f"{losses[0]:.3f} to {losses[-1]:.3f}" if len(losses) > 1 else "",
                f"difference from {ablation.base_row}": difference,
                "difference at equal tokens": at_equal_tokens,
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
                "bits per byte": f"{median(finite_or_inf(x['val_bpb']) for x in lasts):.3f}",
                "accuracy": f"{median(x['val_accuracy'] for x in lasts) * 100:.1f} %",
                **{f"published: {measure}": str(values.get(row, "")) for measure, values in ablation.published.items()},
            }
        )
    return table


def build_stage_table(measures: Mapping[str, Measure]) -> list[dict[str, str]]:
    """Return a table of the results after pretraining, with a line for each row of each measure; empty if there are none."""
    table = []
    has_rates = any(measure.learning_rates for measure in measures.values())
    for name, measure in main_measures(measures).items():
        if name in (LOSS, PAIRS):
            continue
        for index, (row, values) in enumerate(measure.values.items()):
            rate = measure.learning_rates.get(row)
            table.append(
                {
                    "measure": "" if index else name,
                    "row": row,
                    "runs": str(len(values)),
                    **({"learning rate": "" if rate is None else f"{rate:g}"} if has_rates else {}),
                    "median": measure.format(row),
                    f"difference from {measure.base_row}, by seed": _format_comparison(measure, row),
                    "smallest detectable difference": _format_detectable(measure.difference(row), measure.digits),
                }
            )
    return table


def build_csv_table(
    ablation: Ablation, table: Sequence[dict[str, str]], measures: Mapping[str, Measure]
) -> list[dict[str, str]]:
    """Return a line for each row: the columns of `table`, the median and the difference of all other measures, and failures.

    Args:
        ablation: the ablation.
        table: result of `build_table`; empty if there is none.
        measures: all measures.
    """
    failures = read_failures(ablation)
    lines = {line["row"]: line for line in table}
    columns = list(table[0]) if table else ["row", "settings"]
    others = {name: measure for name, measure in measures.items() if name not in (LOSS, PAIRS)}
    result = []
    for row, changes in ablation.rows.items():
        reasons = [f"{each['stage']}, seed {each['seed']}: {each['failed']}" for each in failures if each["row"] == row]
        if not reasons and not any(row in measure.values for measure in measures.values()):
            continue
        line = dict.fromkeys(columns, "") | {"row": row, "settings": " ".join(changes) or "none"} | lines.get(row, {})
        for name, measure in others.items():
            line |= {name: measure.format(row), f"{name}, difference": _format_comparison(measure, row)}
            if measure.learning_rates and measure.is_main:
                line[f"{name}, learning rate"] = (
                    f"{measure.learning_rates[row]:g}" if row in measure.learning_rates else ""
                )
        result.append(line | {"failed": "; ".join(reasons)})
    return result


def describe_table(table: Sequence[dict[str, str]]) -> str:
    """Return the notes below a table: definitions of its columns, and a warning if differences may be seed noise."""
    notes = (
        "Numbers are medians over the runs of a row. Validation loss and unigram baseline are in nats per target; lower is better.\n"
        f"A row beats the baseline when its loss is {MARGIN} below it. Tokens are window tokens."
    )
    if any("unfinished" in row["runs"] for row in table):
        notes += "\nThe values of an unfinished run are those of its last evaluation."
    if not any(row["lowest to highest"] for row in table):
        notes += "\nOne run per row: differences cannot be distinguished from seed noise; use --seeds 3."
    else:
        notes += (
            f"\nBy seed: mean difference between runs with the same seed, and its {CONFIDENCE:.0%} interval (bootstrap; t-test with two "
            "seeds), within noise if it contains 0. Of 20 differences that are noise, one interval excludes 0 on average.\n"
            "This number of seeds finds the smallest detectable difference with a probability of 70 to 80 %."
        )
    return notes


def write_comparison(ablation: Ablation, is_subset: bool = False) -> None:
    """Write the tables, JSON lines and pictures into the folder of the ablation, and print the most important columns.

    Args:
        ablation: the ablation.
        is_subset: True if only some rows are included: the files are then named subset_table.md and so on.

    Raises:
        InputError: there are neither results nor failures.
    """
    measures, failures, prefix = read_measures(ablation), read_failures(ablation), SUBSET_PREFIX * is_subset
    if not measures and not failures:
        raise InputError(f"{ablation.folder} is invalid: it contains no evaluated run. Start the runs with --run.")
    files = {name: ablation.folder / f"{prefix}{name}" for name in OUTPUT_FILES}
    table = build_table(ablation) if LOSS in measures else []
    stages = build_stage_table(measures)
    printed = [{name: cell for name, cell in row.items() if not _is_hidden(name)} for row in table]
    reasons = [f"{each['row']}, seed {each['seed']}, {each['stage']}: {each['failed']}" for each in failures]
    parts = [
        (table, to_text(printed) if printed else "", describe_table(table) if table else ""),
        (stages, to_text(stages) if stages else "", describe_stages(measures)),
        (failures, "\n".join(reasons), "Stages whose last start failed. The next --run starts them again."),
    ]
    text = "\n".join(f"{to_markdown(rows)}\n{notes}\n" for rows, _, notes in parts if rows)
    write_text(files["table.md"], text)
    write_text(files["table.csv"], to_csv(build_csv_table(ablation, table, measures)))
    records = [measure.to_json(name, row) for name, measure in measures.items() for row in measure.values]
    write_text(files["results.jsonl"], to_jsonl([*records, *failures]))
    print("\n\n".join(f"{printed}\n{notes}" for rows, printed, notes in parts if rows))
    figures = {
        "losses.png": draw_losses(read_results(ablation), ablation.base_row) if table else None,
        "differences.png": draw_differences(measures),
    }
    for name, figure in figures.items():
        if figure:
            save_figure(figure, files[name])
        else:  # that of an earlier comparison
            files[name].unlink(missing_ok=True)
    written = ", ".join(str(path) for path in files.values() if path.exists())
    print(f"All columns, values by seed and pictures: {written}.")


def describe_stages(measures: Mapping[str, Measure]) -> str:
    """Return the notes below the table of the stages after pretraining."""
    notes = "Losses are in nats, scores in percent. The value of a fine-tuning is the mean over its seeds."
    if any(measure.learning_rates for measure in measures.values()):
        notes += "\nOf several learning rates, each row has the one with its highest mean score on the same held-out examples."
    if any(measure.at_chance for measure in measures.values()):
        notes += "\nAt chance: most fine-tunings of the run did not exceed the score of a trivial prediction."
    differences = [measure.difference(row) for measure in measures.values() for row in measure.values]
    if any(each and each.of_finetuning for each in differences):
        notes += (
            "\nFine-tuning seeds only: the interval is over seeds of the fine-tuning of one pretrained model per row. Other seeds of "
            "pretraining may differ by more."
        )
    return notes


def _is_hidden(column: str) -> bool:
    """Return True if a column is not printed on a terminal."""
    return column in HIDDEN_COLUMNS or column.startswith("published: ")


def _format_runs(results: Sequence[RunResult]) -> str:
    """Return the number of runs, and how many of them are not finished."""
    n_unfinished = sum(not result.is_finished for result in results)
    return f"{len(results)} ({n_unfinished} unfinished)" if n_unfinished else str(len(results))


def _format_differences(results: Sequence[RunResult], base: Sequence[RunResult]) -> tuple[str, str]:
    """Return the difference of the losses from those of the base, at the end and at equal tokens; empty without a base."""
    if not base:
        return "", ""
    if not is_comparable(results, base):
        return NOT_COMPARABLE, ""
    at_end = _format_difference(median_loss(results) - median_loss(base))
    tokens = max(set.intersection(*(set(result.losses) for result in (*results, *base))))
    loss, base_loss = (median(result.losses[tokens] for result in group) for group in (results, base))
    return at_end, f"{_format_difference(loss - base_loss)} ({tokens / 1e6:.2f} M)" if tokens else ""


def _format_difference(difference: float) -> str:
    """Return a difference with its sign, or without a sign if it is zero after rounding."""
    text = f"{difference:+.3f}"
    return text if float(text) else text[1:]


def _format_range(values: Sequence[float], n_runs: int) -> str:
    if not values:
        return "never"
    text = f"{min(values):.2f}" + (f" to {max(values):.2f}" if max(values) > min(values) else "")
    return text if len(values) == n_runs else f"{text} ({n_runs - len(values)} never)"


def _format_comparison(measure: Measure, row: str) -> str:
    """Return the difference of a row to the first one with its interval; empty for the first row."""
    return (
        NOT_COMPARABLE if row in measure.not_comparable else _format_interval(measure.difference(row), measure.digits)
    )


def _format_interval(difference: Difference | None, digits: int) -> str:
    """Return the mean difference with its interval, and whether it is noise; "" without an interval."""
    if difference is None or not difference.has_interval:
        return ""
    low, mean, high = (f"{value:+.{digits}f}" for value in (difference.low, difference.mean, difference.high))
    of_finetuning, noise = ", fine-tuning seeds only" * difference.of_finetuning, ", within noise" * difference.is_noise
    return f"{mean} ({low} to {high}{of_finetuning}){noise}"


def _format_detectable(difference: Difference | None, digits: int) -> str:
    return f"{difference.detectable:.{digits}f}" if difference and difference.has_interval else ""
