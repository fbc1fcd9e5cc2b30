"""Matplotlib figures without a window, with fonts for all characters of their texts."""

from __future__ import annotations

import io
import re
import sys
import warnings
from pathlib import Path
from typing import IO, Any

from xlpre.common.files import atomic_write

COLORS = ("#1f4e9c", "#8a6d1f", "#5b3f8c", "#2f7d6d", "#99516f", "#4c5866", "#b0542c", "#3b8ea5", "#7a9a32", "#c26fa0")
MAX_SHOWN = 5  # number of missing characters that a warning lists


def new_figure(width: float, height: float, layout: Any = "constrained") -> Any:
    """Return an empty matplotlib figure; `width` and `height` are in inches."""
    import matplotlib
    from matplotlib.figure import Figure  # pyplot would open windows

    matplotlib.rcParams["text.parse_math"] = False  # show dollar signs as they are
    return Figure(figsize=(width, height), layout=layout)


def new_axes(width: float, height: float, count: int = 1) -> tuple[Any, Any]:
    """Return a figure and its `count` axes side by side, without top and right spines; sizes are in inches."""
    figure = new_figure(width, height)
    all_axes = figure.subplots(1, count, squeeze=False)[0]
    for axes in all_axes:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, all_axes


def set_log_scale(axes: Any, axis: str) -> None:
    """Set a logarithmic scale with plain numbers as labels. The default labels need math text, which `new_figure` disables.

    Args:
        axes: the axes.
        axis: `x` or `y`.
    """
    from matplotlib.ticker import NullFormatter

    axes.set(**{f"{axis}scale": "log"})
    scaled = getattr(axes, f"{axis}axis")
    scaled.set_major_formatter("{x:,g}")
    scaled.set_minor_formatter(NullFormatter())


def legend_label(name: str) -> str:
    """Return `name` as a legend label. Matplotlib leaves out labels that start with an underscore."""
    return f" {name}" if name.startswith("_") else name


def save_figure(figure: Any, path: Path, dpi: int = 150) -> None:
    """Write a figure atomically, in the format of the suffix of `path`.

    A warning lists characters that no installed font has.
    """
    if missing := _set_fonts(figure):
        print(
            f"warning: no installed font has the characters {missing[:MAX_SHOWN]}; install a font that has them, for example Noto Sans",
            file=sys.stderr,
        )
    with atomic_write(path) as partial:
        _write(figure, partial, path.suffix[1:], dpi)


def figure_to_svg(figure: Any) -> str:
    """Return a figure as an <svg> element for an HTML page, without a warning about missing characters."""
    _set_fonts(figure)
    stream = io.StringIO()
    _write(figure, stream, "svg", 150)
    return re.sub(r"^.*?(?=<svg)", "", stream.getvalue(), flags=re.DOTALL)


def _write(figure: Any, target: Path | IO[str], file_format: str, dpi: int) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # save_figure prints one warning for all
        figure.savefig(target, format=file_format, dpi=dpi)


def _set_fonts(figure: Any) -> str:
    """Set fonts that have the characters of the figure's texts. Return the characters that no installed font has."""
    from matplotlib.text import Text

    texts = figure.findobj(Text)
    families, missing = _font_families("".join(text.get_text() for text in texts))
    for text in texts if len(families) > 1 else []:
        text.set_family(families)
    return missing


def _font_families(characters: str) -> tuple[list[str], str]:
    """Return DejaVu Sans and the other installed fonts that `characters` need, and the characters that no installed font has."""
    from matplotlib.font_manager import findfont, fontManager
    from matplotlib.ft2font import FT2Font

    families = ["DejaVu Sans"]
    missing = set(map(ord, characters)) - {ord("\n")} - set(FT2Font(findfont(families[0])).get_charmap())
    for font in fontManager.ttflist if missing else []:
        if covered := missing & set(FT2Font(font.fname).get_charmap()):
            families.append(font.name)
            missing -= covered
    return families, "".join(map(chr, sorted(missing)))
