"""Show what the model sees of a text: tokens, targets, the factorization order, and who sees whom in both streams.

python pretrain/explain.py "A text of your own." --config configs/pretrain/quickstart.yaml
python pretrain/explain.py "A text of your own." --config configs/pretrain/quickstart.yaml objective.max_span=1 --step 7 --picture it.png
"""

from __future__ import annotations

import argparse
import math
import textwrap
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pretrain.config import PretrainConfig
from pretrain.tools.explain_picture import PICTURES, save_picture
from pretrain.tools.explanation import Explanation, explain, vocabulary
from xlpre.common.cli_main import run_main
from xlpre.config.loader import load_config
from xlpre.text import special_tokens

WIDTH = 100  # columns of a terminal
MOST_CELLS = 40  # a side of a mask in the terminal


def show(it: Explanation) -> str:
    """The explanation for a terminal of WIDTH columns."""
    cell = math.ceil(len(it.pieces) / MOST_CELLS)
    tokens = ["TOKENS   A row sees the tokens whose key rank is below its query rank.", *_table(_columns(it))]
    place = "[?] its place" if it.two_streams else "[ ] the place that predicts it"
    count = f"{len(it.wanted)} of {len(it.pieces)} tokens"
    targets = [
        f"TARGETS  {count}, by rank. {place}, _ a token it does not see.",
        " rank  target          is predicted from",
    ]
    ranks = it.query_rank[it.target_positions]
    for target in np.argsort(ranks, kind="stable"):
        line = f"{ranks[target]:5}  {_padded(it.wanted[target], 14)}  {sentence(it, int(target))}"
        width = WIDTH * len(line) // _width(line)  # in characters, of which some are wide
        targets += textwrap.wrap(line, width, subsequent_indent=" " * 23, break_on_hyphens=False)
    masks = [
        "MASKS    A row shows whom a token sees: █ seen, · not seen" + ", ▒ seen only as its own" * it.two_streams + "."
    ]
    if cell > 1:
        masks.append(f"         One character is {cell} x {cell} tokens; the darker, the more of them are seen.")
    masks += ["         Memory, if the lane has any, is seen by all (rank -1).", *_masks(it, cell)]
    sections = [[it.title, *it.about], tokens, targets, masks]
    return "\n\n".join("\n".join(line.rstrip() for line in section) for section in sections)


def sentence(it: Explanation, target: int) -> str:
    """The text as one target sees it, in reading order; what it does not see is `_`, and left out after the last seen token."""
    place = int(it.target_positions[target])
    row = list(it.streams.values())[-1][place] > 0
    shown = []
    for position, (piece, read) in enumerate(zip(it.pieces, it.read, strict=True)):
        space = " " if (read if row[position] else piece).startswith((special_tokens.WORD_BOUNDARY, "<")) else ""
        bare = (read.removeprefix(special_tokens.WORD_BOUNDARY) or read) if row[position] else "?" if position == place else "_"
        shown.append(f"{space}[{bare}]" if position == place else space + bare)
    last = max([place, *np.flatnonzero(row)]) + 1
    return "".join(shown[:last] if not it.backward else shown[:last][::-1]).strip()


def _columns(it: Explanation) -> dict[str, list[str]]:
    """The table of tokens by heading; a column of an objective that does not apply stays empty."""
    wanted = dict(zip(it.target_positions.tolist(), it.wanted, strict=True))
    positions = range(len(it.pieces))
    return {
        "#": [str(i) for i in positions],
        "piece": it.pieces,
        "read as": [r if r != p else "" for p, r in zip(it.pieces, it.read, strict=True)],
        "segment": it.segments,
        "part": ["reused" if i < it.reuse_len else "rest" for i in positions],
        "target": [f"{_bracket(i, wanted)} {wanted[i]}" if i in wanted else "" for i in positions],
        "place": ["" if p is None else str(p) for p in it.places],
        "key rank": [str(r) for r in it.key_rank],
        "query rank": [str(r) for r in it.query_rank],
    }


def _bracket(position: int, wanted: dict[int, str]) -> str:
    """Draws neighbouring targets as one span."""
    return {(False, False): "─", (False, True): "┌", (True, True): "│", (True, False): "└"}[
        position - 1 in wanted, position + 1 in wanted
    ]


def _table(columns: dict[str, list[str]]) -> list[str]:
    """Aligned lines; columns of nothing are left out, numbers stand to the right."""
    lines = [""] * (1 + len(columns["#"]))
    for heading, cells in columns.items():
        if not any(cells):
            continue
        width = max(_width(cell) for cell in [heading, *cells])
        to_right = all(cell.lstrip("-").isdigit() for cell in cells if cell)
        lines = [
            f"{line}  {_padded(cell, width, to_right)}" for line, cell in zip(lines, [heading, *cells], strict=True)
        ]
    return lines


def _masks(it: Explanation, cell: int) -> list[str]:
    """The streams side by side; a label at each row (* a target), the last digits of the position above each column."""
    starts = range(0, len(it.pieces), cell)
    wide = 2 if 4 * len(starts) + 20 <= WIDTH else 1
    targets = it.is_target & (cell == 1)
    labels = [f"{_padded(it.pieces[i], 11)}{'*' if targets[i] else ' '}{i:3}" for i in starts]
    lines = [" " * 15, " " * 15, *labels]
    for name, mask in it.streams.items():
        digits = "".join(f"{i % 10**wide:{wide}}" for i in starts)
        blocks = ["".join(_block(value) * wide for value in row) for row in _pooled(mask, cell)]
        width = max(len(digits), len(name))
        lines = [f"{line}  {part:{width}}" for line, part in zip(lines, [name, digits, *blocks], strict=True)]
    return lines


def _pooled(mask: np.ndarray, cell: int) -> np.ndarray:
    """Means over squares of `cell` tokens a side, without the rows that predict nothing; nan where there is no other."""
    starts = np.arange(0, len(mask), cell)
    counted = ~np.isnan(mask)
    sums, counts = (
        np.add.reduceat(np.add.reduceat(part, starts, axis=0), starts, axis=1)
        for part in (np.nan_to_num(mask), counted.astype(float))
    )
    return np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)


def _block(value: float) -> str:
    return " " if np.isnan(value) else "·░▒▓█"[math.ceil(value * 4)]


def _padded(text: str, width: int, to_right: bool = False) -> str:
    """`text` cut or filled to `width` columns of a terminal."""
    while _width(text) > width:
        text = text[:-2] + "…"
    space = " " * (width - _width(text))
    return space + text if to_right else text + space


def _width(text: str) -> int:
    """Columns of a terminal: two for a wide character (Chinese, ...), none for a mark upon the one before."""
    return sum(
        2 if unicodedata.east_asian_width(c) in "WF" else 0 if unicodedata.category(c) in ("Mn", "Me") else 1
        for c in text
    )


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", help="in quotes; a line is a paragraph")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that win over the file's")
    parser.add_argument("--config", help="a YAML file, see configs/")
    parser.add_argument("--step", type=int, default=0, help="each draws other targets and another order")
    parser.add_argument("--backward", action="store_true", help="read from right to left")
    parser.add_argument("--picture", type=Path, help=f"draw the masks into this file ({', '.join(PICTURES)})")
    words = parser.parse_intermixed_args(argv)
    if not 0 <= words.step < 2**63:
        raise ValueError(f"--step {words.step}: must be at least 0, and below 2^63")
    for word in words.overrides:
        if "=" not in word:
            raise ValueError(
                f"{word!r} is not of the form key=value; if it belongs to the text, put quotes around all of it"
            )
    config = load_config(PretrainConfig, words.config, words.overrides)
    explanation = explain(words.text, vocabulary(config), config, words.step, words.backward)
    print(show(explanation))
    if words.picture:
        save_picture(explanation, words.picture)
        print(f"\n{words.picture}: the masks as a picture")


if __name__ == "__main__":
    run_main(main)
