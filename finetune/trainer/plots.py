"""Plots of a fine-tuning run: learning curves of all seeds, and the predictions of the best one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from finetune.data.examples import Outputs, Split
from finetune.metrics.classification import N_BINS, calibration, confusion_matrix
from finetune.tasks.base import Task
from finetune.tasks.regression import RegressionTask
from finetune.tasks.sequence import ClassificationTask, softmax, stack_labels
from xlpre.common.plots import COLORS, legend_label, new_axes, save_figure
from xlpre.training.metrics_writer import read_metrics

MAX_CLASSES = 20  # with more classes, no confusion matrix is drawn


def plot_all(folder: Path, run_folders: Sequence[Path], task: Task, split: Split, outputs: Outputs) -> None:
    """Write all plots of a task.

    Args:
        folder: folder for the plots.
        run_folders: folders of the runs, with their metrics.
        task: the task.
        split: the split that selects the best run.
        outputs: outputs of the best run for this split.
    """
    plot_learning_curves(folder / "curves.png", run_folders, f"{split.name}/{task.main_metric}")
    if not isinstance(task, ClassificationTask | RegressionTask):
        return
    outputs, labels = task.pool_outputs(split, outputs), stack_labels(split)
    predictions = task.predict_values(outputs)
    if isinstance(task, RegressionTask):
        plot_regression(folder / "predictions.png", labels, predictions)
        return
    plot_calibration(folder / "calibration.png", labels, softmax(outputs["logits"]))
    if len(task.label_names) <= MAX_CLASSES:
        plot_confusion(folder / "confusion.png", labels, predictions, task.label_names)


def plot_learning_curves(path: Path, run_folders: Sequence[Path], metric: str) -> None:
    """Plot training loss and the main metric by step, one line per run."""
    figure, (left, right) = new_axes(9, 3.6, 2)
    for folder, color in zip(run_folders, itertools.cycle(COLORS), strict=False):
        lines = read_metrics(folder)
        training = [line for line in lines if "lr" in line]
        for axes, of_kind, key, marker in ((left, training, "loss", "-"), (right, lines, metric, "o-")):
            points = [(line["step"], line[key]) for line in of_kind if line.get(key) is not None]
            if points:
                style = marker if len(points) > 1 else "o"  # a single point has no line
                label = legend_label(folder.name)
                axes.plot(*zip(*points, strict=True), style, color=color, markersize=3, linewidth=1, label=label)
    left.set(xlabel="step", ylabel="training loss")
    right.set(xlabel="step", ylabel=metric)
    right.legend(frameon=False, fontsize=8)
    save_figure(figure, path)


def plot_confusion(path: Path, labels: np.ndarray, predictions: np.ndarray, label_names: Sequence[str]) -> None:
    """Plot the confusion matrix, with labels as rows and predictions as columns. The color shows the fraction of the row's examples."""
    counts = confusion_matrix(labels, predictions, len(label_names))
    fractions = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    side = 2.2 + 0.55 * len(label_names)
    figure, (axes,) = new_axes(side, side)
    axes.imshow(fractions, cmap="Blues", vmin=0, vmax=1)
    for row, column in itertools.product(range(len(label_names)), repeat=2):
        color = "white" if fractions[row, column] > 0.5 else "#1c2430"
        axes.text(column, row, f"{counts[row, column]:,}", ha="center", va="center", color=color, fontsize=8)
    ticks = range(len(label_names))
    axes.set_xticks(ticks, label_names, rotation=45, ha="right", fontsize=8)
    axes.set_yticks(ticks, label_names, fontsize=8)
    axes.set(xlabel="prediction", ylabel="label")
    save_figure(figure, path)


def plot_calibration(path: Path, labels: np.ndarray, probabilities: np.ndarray) -> None:
    """Plot accuracy by confidence, and the distribution of the confidence."""
    is_correct, confidence = labels == probabilities.argmax(1), probabilities.max(1)
    mean_confidence, accuracy, counts, error = calibration(is_correct, confidence)
    figure, (axes,) = new_axes(4.4, 4)
    centers = (np.arange(N_BINS) + 0.5) / N_BINS
    axes.bar(centers, counts / counts.sum(), width=0.9 / N_BINS, color="#d8e0ec", label="fraction of predictions")
    axes.plot([0, 1], [0, 1], color="#a5afbd", linewidth=1)
    filled = counts > 0
    axes.plot(mean_confidence[filled], accuracy[filled], "o-", color=COLORS[0], markersize=4, label="accuracy")
    axes.set(xlabel="confidence", xlim=(0, 1), ylim=(0, 1.02), title=f"expected calibration error {error:.3f}")
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    save_figure(figure, path)


def plot_regression(path: Path, labels: np.ndarray, predictions: np.ndarray) -> None:
    """Plot predictions against labels."""
    figure, (axes,) = new_axes(4.4, 4)
    axes.plot(labels, predictions, ".", color=COLORS[0], markersize=3, alpha=0.5)
    axes.plot([labels.min(), labels.max()], [labels.min(), labels.max()], color="#a5afbd", linewidth=1)
    axes.set(xlabel="label", ylabel="prediction")
    save_figure(figure, path)
