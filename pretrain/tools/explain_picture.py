"""The masks of an explanation as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pretrain.tools.explanation import ITSELF, SEEN, Explanation
from xlpre.common.plots import new_figure, save_figure

OWN = "seen only as its own"
COLORS = {"not seen": "#eceff3", "seen": "#6d93c8", "seen, a target": "#ee9a3a", OWN: "#c7b2de"}
GREY, INK, TARGET = "#6b7585", "#2a3240", "#b35c00"
SMALLEST_LETTERS = 3  # points; a window of more than 200 tokens is drawn without
PICTURES = (".png", ".svg", ".pdf")


def draw(it: Explanation) -> Any:
    """The masks as a matplotlib figure; targets are coloured and have their place in the order."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.patches import Patch

    length, streams = len(it.pieces), it.streams
    side = min(max(0.32 * length, 5), 14)  # inches of a panel
    figure = new_figure(len(streams) * (side + 1.4), side + 2.7, ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
    panels = figure.subplots(1, len(streams), squeeze=False)[0]
    targets = it.is_target & (len(it.wanted) < length)  # causal: no colour
    for axes, (name, mask) in zip(panels, streams.items(), strict=True):
        axes.set_title(name, fontsize=16, loc="left", pad=30)
        _panel(axes, mask, targets, it.reuse_len)
        _label(axes, it, ~np.isnan(mask[:, 0]), targets, size=min(44 * side / length, 13))
    kinds = [
        kind for kind in COLORS if kind in ("not seen", "seen") or targets.any() and (it.two_streams or kind != OWN)
    ]
    patches = [Patch(color=COLORS[kind], label=kind) for kind in kinds]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=13)
    numbers = "; a number is a place in the factorization order" if it.two_streams else ""
    figure.suptitle(it.title + numbers, fontsize=12, color=GREY, x=0.012, ha="left")
    return figure


def _panel(axes: Any, mask: np.ndarray, targets: np.ndarray, reuse_len: int) -> None:
    """The squares of one stream, and where the reused part ends."""
    from matplotlib.colors import ListedColormap

    length = len(mask)
    kinds = np.select([mask == ITSELF, (mask == SEEN) & targets], [3, 2], mask)
    colors = ListedColormap(list(COLORS.values()))
    axes.pcolormesh(kinds, cmap=colors, vmin=-0.5, vmax=3.5, edgecolors="white", linewidth=min(25 / length, 1.2))
    axes.set(xlim=(0, length), ylim=(length, 0), aspect="equal")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    if reuse_len < length:
        axes.axvline(reuse_len, color=GREY, linewidth=1)
        axes.axhline(reuse_len, color=GREY, linewidth=1)
        for middle, name in ((reuse_len / 2, "reused part"), ((reuse_len + length) / 2, "the rest")):
            axes.text(middle, -0.25, name, ha="center", va="bottom", color=GREY, fontsize=12)


def _label(axes: Any, it: Explanation, rows: np.ndarray, targets: np.ndarray, size: float) -> None:
    """Pieces with their places below the columns and beside `rows`: on the left if all are there, else on the right."""
    if size < SMALLEST_LETTERS:
        axes.set(xticks=[], yticks=[])
        return
    places = ["" if place is None else f"  {place}" for place in it.places]
    columns = [piece + place for piece, place in zip(it.read, places, strict=True)]
    some = np.flatnonzero(rows)
    axes.set_xticks(np.arange(len(columns)) + 0.5, columns, rotation=90, size=size)
    axes.set_yticks(some + 0.5, [it.pieces[i] + places[i] for i in some], size=size)
    if len(some) < len(columns):
        axes.yaxis.tick_right()
    labels = [*enumerate(axes.get_xticklabels()), *zip(some, axes.get_yticklabels(), strict=True)]
    for position, label in labels:
        label.set(color=TARGET if targets[position] else INK, weight="bold" if targets[position] else "normal")


def save_picture(it: Explanation, path: Path) -> None:
    """Draw `it` into a file of the kind that its name says.

    Raises:
        ValueError: a kind that cannot be drawn.
    """
    if path.suffix not in PICTURES:
        raise ValueError(f"--picture {path}: the name must end with {' or '.join(PICTURES)}")
    save_figure(draw(it), path, dpi=130)
