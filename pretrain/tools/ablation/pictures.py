"""Pictures of an ablation: losses of all runs, and differences to the first row."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pretrain.tools.ablation.measures import (
    MARGIN,
    NOT_COMPARABLE,
    Measure,
    RunResult,
    is_comparable,
    main_measures,
    median_loss,
)
from pretrain.tools.paired_statistics import CONFIDENCE, Difference
from xlpre.common.plots import COLORS, new_axes


def draw_losses(results: Mapping[str, Sequence[RunResult]], base_row: str) -> Any:
    """Draw the last validation loss of every run: a line of dots per row, sorted by the median, which is written beside it.

    Rows whose loss cannot be compared with that of the base have hollow dots. Dots beyond the axis are triangles at its end.

    Args:
        results: results of the runs by row.
        base_row: row with which the others are compared; it may have no results.
    """
    base = results.get(base_row, ())
    baseline = (base or next(iter(results.values())))[0].last["val_unigram_loss"]
    rows = sorted(results, key=lambda row: median_loss(results[row]), reverse=True)  # the best row at the top
    losses = [result.loss for row_results in results.values() for result in row_results if result.loss < math.inf]
    near = [loss for loss in losses if loss < baseline + 2 * MARGIN] or losses or [baseline]
    low, high = min(near), max(near)
    margin = max(0.08 * (high - low), MARGIN - (high - low) / 2)  # an axis of at least 2 MARGIN
    figure, (axes,) = new_axes(8, 1.4 + 0.32 * len(rows))
    for y, row in enumerate(rows):
        fill = "full" if is_comparable(results[row], base) else "none"
        for result in results[row]:
            marker = "o" if result.loss <= high else ">"
            axes.plot(min(result.loss, high + margin), y, marker, color=COLORS[0], fillstyle=fill, clip_on=False)
        text = f"{median_loss(results[row]):.3f}"
        axes.text(1.03, y, text, transform=axes.get_yaxis_transform(), va="center", fontsize=9)
    if base:
        axes.axvline(median_loss(base), color=COLORS[0], linewidth=1, label=f"median of {base_row}")
    if low - margin <= baseline <= high + margin:
        axes.axvline(baseline, color="#b4442c", linestyle="--", linewidth=1, label="unigram baseline")
    is_other = [not is_comparable(results[row], base) for row in rows]
    axes.set_yticks(
        range(len(rows)),
        [f"{row} ({NOT_COMPARABLE})" if other else row for row, other in zip(rows, is_other, strict=True)],
    )
    axes.set(xlim=(low - margin, high + margin), ylim=(-0.6, len(rows) - 0.4))
    axes.ticklabel_format(axis="x", useOffset=False)
    axes.set(xlabel="last validation loss, nats per target (at the right: median of the runs)", ylabel="row")
    axes.grid(axis="both", color="#e3e7ee")
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside upper right", frameon=False, fontsize=8, ncols=2)
    return figure


def draw_differences(measures: Mapping[str, Measure]) -> Any:
    """Draw the difference of each row to the first one by seed, with intervals. Return None if no row has two seeds of the base."""
    shown: list[tuple[str, Measure, dict[str, Difference]]] = []
    for name, measure in main_measures(measures).items():
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
            color = "#9aa3ad" if each.is_noise else COLORS[0]
            axes.plot([each.low, each.high], [y, y], color=color, linewidth=1.5)
            axes.plot(each.mean, y, "o", color=color)
        axes.axvline(0, color="#333333", linewidth=0.8)
        unit = "nats" if measure.is_loss else "percentage points"
        labels = [f"{row}\n(fine-tuning seeds only)" if differences[row].of_finetuning else row for row in rows]
        axes.set_yticks(range(len(rows)), labels)
        axes.set(xlabel=f"{name},\ndifference from {measure.base_row}, {unit}", ylim=(-0.6, len(rows) - 0.4))
    figure.suptitle(f"mean over seeds, {CONFIDENCE:.0%} intervals; grey: within noise", fontsize=9)
    return figure
