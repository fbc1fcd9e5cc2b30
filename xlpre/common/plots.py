"""Figures without a window, whose names may hold any character."""

from __future__ import annotations

import io
import re
import sys
import warnings
from pathlib import Path
from typing import IO, Any

from xlpre.common.files import new_file

# of curves
COLOURS = ("#1f4e9c", "#8a6d1f", "#5b3f8c", "#2f7d6d", "#99516f", "#4c5866", "#b0542c", "#3b8ea5", "#7a9a32", "#c26fa0")
SHOWN = 5  # characters that no font has


def new_figure(width: float, height: float, layout: Any = "constrained") -> Any:
    """An empty matplotlib figure of so many inches."""
    import matplotlib
    from matplotlib.figure import Figure  # no pyplot: no window

    matplotlib.rcParams["text.parse_math"] = False  # a dollar is a dollar
    return Figure(figsize=(width, height), layout=layout)


def new_panels(width: float, height: float, count: int = 1) -> tuple[Any, Any]:
    """A figure of so many inches, and its panels side by side, open above and on the right."""
    figure = new_figure(width, height)
    panels = figure.subplots(1, count, squeeze=False)[0]
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels


def in_legend(name: str) -> str:
    """A name that is shown in a legend, which would leave out one that begins with an underscore."""
    return f" {name}" if name.startswith("_") else name


def save(figure: Any, path: Path, dpi: int = 150) -> None:
    """Write a figure, whole or not at all, as the ending of `path` says; characters that no installed font has are told in a sentence."""
    if lacking := _lacking(figure):
        print(
            f"warning: no installed font has {lacking[:SHOWN]}; install one that has, one of Noto Sans for instance",
            file=sys.stderr,
        )
    with new_file(path) as partial:
        _write(figure, partial, path.suffix[1:], dpi)


def as_svg(figure: Any) -> str:
    """A figure as an element of a page of HTML; of characters it tells nothing."""
    _lacking(figure)
    stream = io.StringIO()
    _write(figure, stream, "svg", 150)
    return re.sub(r"^.*?(?=<svg)", "", stream.getvalue(), flags=re.DOTALL)


def _write(figure: Any, target: Path | IO[str], kind: str, dpi: int) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # `save` says so in one sentence
        figure.savefig(target, format=kind, dpi=dpi)


def _lacking(figure: Any) -> str:
    """Put a figure's texts in fonts that have their characters; those that no installed font has."""
    from matplotlib.text import Text

    texts = figure.findobj(Text)
    families, lacking = _families("".join(text.get_text() for text in texts))
    for text in texts if len(families) > 1 else []:
        text.set_family(families)
    return lacking


def _families(characters: str) -> tuple[list[str], str]:
    """Fonts for `characters`: DejaVu Sans, then installed ones that have what it lacks; and characters that none has."""
    from matplotlib.font_manager import findfont, fontManager
    from matplotlib.ft2font import FT2Font

    families = ["DejaVu Sans"]
    missing = set(map(ord, characters)) - {ord("\n")} - set(FT2Font(findfont(families[0])).get_charmap())
    for font in fontManager.ttflist if missing else []:
        if found := missing & set(FT2Font(font.fname).get_charmap()):
            families.append(font.name)
            missing -= found
    return families, "".join(map(chr, sorted(missing)))
