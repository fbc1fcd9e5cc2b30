"""Figures without a window, whose names may hold any character."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import IO, Any

SHOWN = 5  # characters that no font has


def new_figure(width: float, height: float, layout: Any = "constrained") -> Any:
    """An empty matplotlib figure of so many inches."""
    import matplotlib
    from matplotlib.figure import Figure  # no pyplot: no window

    matplotlib.rcParams["text.parse_math"] = False  # a dollar is a dollar
    return Figure(figsize=(width, height), layout=layout)


def in_legend(name: str) -> str:
    """A name that is shown in a legend, which would leave out one that begins with an underscore."""
    return f" {name}" if name.startswith("_") else name


def save(figure: Any, target: Path | IO[str], kind: str = "png", dpi: int = 150) -> None:
    """Write a figure, in fonts that have its characters; those that no installed font has are told in a sentence."""
    from matplotlib.text import Text

    texts = figure.findobj(Text)
    families, lacking = _families("".join(text.get_text() for text in texts))
    for text in texts if len(families) > 1 else []:
        text.set_family(families)
    if lacking:
        print(
            f"warning: no installed font has {lacking[:SHOWN]}; install one that has, one of Noto Sans for instance",
            file=sys.stderr,
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # said above in one sentence
        figure.savefig(target, format=kind, dpi=dpi)


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
