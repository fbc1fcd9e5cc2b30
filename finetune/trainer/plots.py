"""Pictures of a fine-tuning: learning curves of all runs; confusion and calibration, or truth against answer, of the best."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from finetune.data.examples import Outputs, Split
from finetune.metrics.classification import BINS, calibration, confusion
from finetune.tasks.base import Task
from finetune.tasks.regression import RegressionTask
from finetune.tasks.sequence import ClassificationTask, softmax, stack_labels
from xlpre.common.plots import COLOURS, legend_label, new_axes, save_figure
from xlpre.training.metrics import read_metrics

MOST_CLASSES = 20  # that a confusion is drawn of


def draw(folder: Path, runs: Sequence[Path], task: Task, split: Split, outputs: Outputs) -> None:
    """Write all pictures that the task has into `folder`.

    Args:
        folder: where they go.
        runs: folders with metrics.
        task: what was learned.
        split: what the best run was measured on,
        outputs: and its answers to it.
    """
    draw_curves(folder / "curves.png", runs, f"{split.name}/{task.main_metric}")
    if isinstance(task, ClassificationTask | RegressionTask):
        outputs = task.pool_outputs(split, outputs)
    if isinstance(task, ClassificationTask):
        draw_calibration(folder / "calibration.png", stack_labels(split), softmax(outputs["logits"]))
        if len(task.label_names) <= MOST_CLASSES:
            draw_confusion(folder / "confusion.png", stack_labels(split), task.predict_values(outputs), task.label_names)
    elif isinstance(task, RegressionTask):
        draw_numbers(folder / "answers.png", stack_labels(split), task.predict_values(outputs))


def draw_curves(path: Path, runs: Sequence[Path], score: str) -> None:
    """Training loss and the score by update, a line for each run."""
    figure, (left, right) = new_axes(9, 3.6, 2)
    for run, colour in zip(runs, itertools.cycle(COLOURS), strict=False):
        lines = read_metrics(run)
        for axes, key, mark in ((left, "loss", "-"), (right, score, "o-")):
            points = [
                (line["step"], line[key])
                for line in lines
                if line.get(key) is not None and (key != "loss" or "lr" in line)
            ]
            if points:  # of a single one there is no line
                mark = mark if len(points) > 1 else "o"
                axes.plot(
                    *zip(*points, strict=True), mark, color=colour, markersize=3, linewidth=1, label=legend_label(run.name)
                )
    left.set(xlabel="update", ylabel="training loss")
    right.set(xlabel="update", ylabel=score)
    right.legend(frameon=False, fontsize=8)
    save_figure(figure, path)


def draw_confusion(path: Path, truth: np.ndarray, answers: np.ndarray, labels: Sequence[str]) -> None:
    """How often each class (row) was answered by each (column); colour is the share of the row."""
    counts = confusion(truth, answers, len(labels))
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    side = 2.2 + 0.55 * len(labels)
    figure, (axes,) = new_axes(side, side)
    axes.imshow(share, cmap="Blues", vmin=0, vmax=1)
    for row, column in itertools.product(range(len(labels)), repeat=2):
        colour = "white" if share[row, column] > 0.5 else "#1c2430"
        axes.text(column, row, f"{counts[row, column]:,}", ha="center", va="center", color=colour, fontsize=8)
    ticks = range(len(labels))
    axes.set_xticks(ticks, labels, rotation=45, ha="right", fontsize=8)
    axes.set_yticks(ticks, labels, fontsize=8)
    axes.set(xlabel="answer", ylabel="truth")
    save_figure(figure, path)


def draw_calibration(path: Path, truth: np.ndarray, probabilities: np.ndarray) -> None:
    """How often answers are right that the model is so sure of, and how many there are of each."""
    right, confidence = truth == probabilities.argmax(1), probabilities.max(1)
    sure, correct, count, error = calibration(right, confidence)
    figure, (axes,) = new_axes(4.4, 4)
    middle = (np.arange(BINS) + 0.5) / BINS
    axes.bar(middle, count / count.sum(), width=0.9 / BINS, color="#d8e0ec", label="share of answers")
    axes.plot([0, 1], [0, 1], color="#a5afbd", linewidth=1)
    axes.plot(sure[count > 0], correct[count > 0], "o-", color=COLOURS[0], markersize=4, label="share that is right")
    axes.set(xlabel="confidence", xlim=(0, 1), ylim=(0, 1.02), title=f"expected calibration error {error:.3f}")
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    save_figure(figure, path)


def draw_numbers(path: Path, truth: np.ndarray, answers: np.ndarray) -> None:
    """A point for each example."""
    figure, (axes,) = new_axes(4.4, 4)
    axes.plot(truth, answers, ".", color=COLOURS[0], markersize=3, alpha=0.5)
    axes.plot([truth.min(), truth.max()], [truth.min(), truth.max()], color="#a5afbd", linewidth=1)
    axes.set(xlabel="truth", ylabel="answer")
    save_figure(figure, path)
