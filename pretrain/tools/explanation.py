"""Explanation of one training window of a text: tokens, targets, factorization order and attention masks, as text or picture."""

from __future__ import annotations

import dataclasses
import math
import textwrap
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from pretrain.config import PretrainConfig
from xlpre.common.errors import InputError
from xlpre.common.messages import counted
from xlpre.common.plots import new_figure, save_figure
from xlpre.data.lanes import DirectedText, WindowLocation
from xlpre.data.rng import RowRng
from xlpre.data.store import SplitData, TokenStore
from xlpre.data.window_layout import SEGMENT_A, SEGMENT_B, SEGMENT_CLS, DataConfig, Windows, build_windows
from xlpre.objectives.objective import ModelInputs
from xlpre.objectives.registry import build_objective
from xlpre.text import special_tokens
from xlpre.text.load_tokenizer import tokenizer_from_config
from xlpre.text.tokenizer import Tokenizer

SEGMENT_NAMES = {SEGMENT_A: "A", SEGMENT_B: "B", SEGMENT_CLS: "cls"}
SELF_ONLY = 0.5  # value in a mask of a token that is visible only to the query at its own position
VISIBLE = 1.0  # value of any other visible token

# default text: the example of XLNet, section 2.6
EXAMPLE_PAIR = "New York"
EXAMPLE = "New York is a city in the United States of America. It lies in the state of New York, on the coast of the Atlantic Ocean."
MAX_STEPS = 500  # tried until the pair is a target

# as text
TERMINAL_WIDTH = 100  # columns
MAX_PAIRS = 5  # pairs of targets in the text
MAX_MASK_CELLS = 40  # largest number of characters per side of a mask

# as picture
MIN_FONT_SIZE = 3  # points; windows of more than 200 tokens have no labels
SELF_ONLY_LABEL = "visible as its own only"
COLORS = {"masked": "#eceff3", "visible": "#6d93c8", "visible target": "#ee9a3a", SELF_ONLY_LABEL: "#c7b2de"}
GREY, INK, TARGET_COLOR = "#6b7585", "#2a3240", "#b35c00"


@dataclass(frozen=True)
class TargetPair:
    """Log-probabilities in nats that a model gives two neighboring targets, from what the first of them in the order sees.

    Attributes:
        targets: indices of the two targets, from left to right.
        joint: log-probability of both, where the second in the order also sees the first.
        independent: the same, where it does not.
    """

    targets: tuple[int, int]
    joint: float
    independent: float


@dataclass(frozen=True)
class Predictions:
    """Log-probabilities in nats that a model gives the P targets of an explanation.

    Attributes:
        in_order: (P,) given what the target sees, as in training.
        independent: (P,) if no token saw a target. None if the objective has no factorization order of targets.
        pairs: neighboring targets.
    """

    in_order: np.ndarray
    independent: np.ndarray | None
    pairs: Sequence[TargetPair] = ()


@dataclass(frozen=True)
class Explanation:
    """One row of a batch, made from a text.

    Attributes:
        title: objective, window and random draw.
        notes: description of the objective, and remarks on this window.
        pieces: T pieces of the text, in the order of the row.
        input_pieces: T pieces that the model reads; they differ where a target is hidden.
        segments: T segment names.
        query_rank: (T,) rank of each token as a query. A query sees the keys of lower rank.
        key_rank: (T,) rank of each token as a key.
        target_positions: (P,) positions in the window.
        target_pieces: P pieces to predict at `target_positions`.
        reuse_len: number of tokens in the reused part, which enters memory.
        backward: True if the row runs from right to left.
        two_streams: True if a query stream makes the predictions. It does not see the token at its own position.
        windows: the window of one row.
        inputs: inputs of the model for this window.
    """

    title: str
    notes: list[str]
    pieces: list[str]
    input_pieces: list[str]
    segments: list[str]
    query_rank: np.ndarray
    key_rank: np.ndarray
    target_positions: np.ndarray
    target_pieces: list[str]
    reuse_len: int
    backward: bool
    two_streams: bool
    windows: Windows
    inputs: ModelInputs

    @property
    def masks(self) -> dict[str, np.ndarray]:
        """Attention mask (T, T) of each stream by its title: row i tells which tokens position i sees, as VISIBLE, SELF_ONLY or 0.

        In the mask of the query stream, rows of positions without a target are nan.
        """
        visible = self.query_rank[:, None] > self.key_rank[None, :]
        content = np.where(visible, VISIBLE, np.eye(len(visible)) * SELF_ONLY)
        if not self.two_streams:
            return {"content stream: reads and predicts": content}
        query = np.where(self.is_target[:, None], visible * VISIBLE, np.nan)
        return {"content stream: reads": content, "query stream: predicts": query}

    @property
    def is_target(self) -> np.ndarray:
        """(T,) bool, True at positions with a target."""
        return np.isin(np.arange(len(self.pieces)), self.target_positions)

    @property
    def order(self) -> list[int | None]:
        """Index of each token in the factorization order of its part of the window; None for a token that only serves as context."""
        if not self.two_streams:
            return [None] * len(self.pieces)
        in_rest = np.arange(len(self.pieces)) >= self.reuse_len
        indices = self.key_rank - np.where(in_rest, self.reuse_len + 1, 0)
        return [int(index) if index >= 0 else None for index in indices]


def explain(
    text: str, tokenizer: Tokenizer, config: PretrainConfig, step: int = 0, backward: bool = False
) -> Explanation:
    """Build one window of `text` and draw its targets and order as in training.

    Args:
        text: one paragraph per line.
        tokenizer: vocabulary.
        config: settings; only `data`, `objective`, `text.line_type` and `seed` are used. The window is shortened to the text.
        step: step number; each step has another random draw.
        backward: True to read from right to left.

    Raises:
        InputError: the text is too short, or settings contradict each other.
    """
    document = [line for line in text.splitlines() if line.strip()]
    if not document:
        raise InputError("the text is empty. Give a sentence or two in quotes.")
    ids, sentence_ends = tokenizer.encode_document(document, config.text.line_type)
    if backward:  # the window ends at the start of the text, where the previous document's <eod> would follow
        ids, sentence_ends = np.roll(ids, 1), np.append(sentence_ends[:-1] + 1, len(ids))
    build_objective(
        config.objective, config.data, tokenizer.starts_word
    )  # called for its checks: here, their messages name the configured values
    data = fit_window(config.data, len(ids) - 1)
    objective = build_objective(config.objective, data, tokenizer.starts_word)
    directed_text = DirectedText(SplitData(ids, sentence_ends, np.array([len(ids)])), backward)
    rng = RowRng(config.seed, [int(backward)], step)
    windows = build_windows([WindowLocation(directed_text, begin=0, visible_mem_len=0)], data, rng)
    inputs = objective.build_inputs(windows, rng)
    direction = "backward, from right to left" if backward else "forward"
    pieces = tokenizer.pieces
    return Explanation(
        f"{config.objective.name}, {data.seq_len} tokens ({data.reuse_len} reused), {direction}, seed {config.seed}, step {step}",
        [objective.description, *_mixture_notes(config), *_notes(windows, data, len(ids) - 1)],
        pieces=[pieces[i] for i in windows.ids[0]],
        input_pieces=[pieces[i] for i in inputs.input_ids[0]],
        segments=[SEGMENT_NAMES[i] for i in windows.segments[0]],
        query_rank=inputs.query_rank[0],
        key_rank=inputs.key_rank[0],
        target_positions=inputs.target_positions[0],
        target_pieces=[pieces[i] for i in inputs.targets[0]],
        reuse_len=data.reuse_len,
        backward=backward,
        two_streams=objective.two_streams,
        windows=windows,
        inputs=inputs,
    )


def explain_example(tokenizer: Tokenizer, config: PretrainConfig, step: int = 0, backward: bool = False) -> Explanation:
    """Explain EXAMPLE at the first step from `step` at which EXAMPLE_PAIR is a target, or at `step` if there is none soon."""
    pair = tokenizer.encode(EXAMPLE_PAIR)
    pair = pair[::-1] if backward else pair

    def predicts_pair(explanation: Explanation) -> bool:
        found = sliding_window_view(explanation.windows.ids[0], len(pair)) == pair
        return bool((found & sliding_window_view(explanation.is_target, len(pair))).all(1).any())

    steps = range(step, min(step + MAX_STEPS, 2**63))
    found = (it for each in steps if predicts_pair(it := explain(EXAMPLE, tokenizer, config, each, backward)))
    return next(found, None) or explain(EXAMPLE, tokenizer, config, step, backward)


def fit_window(data: DataConfig, n_tokens: int) -> DataConfig:
    """Shorten the window to `n_tokens` tokens of text and the special tokens, in the same proportions."""
    plain = data.reuse_len == data.seq_len
    minimum = 2 if plain else 3
    if n_tokens < minimum:
        raise InputError(
            f"the text has {n_tokens} tokens, including <eop>, but a window needs at least {minimum}. Give a longer text."
        )
    seq_len = n_tokens + data.n_symbols
    if seq_len >= data.seq_len:
        return data
    reuse_len = seq_len if plain else max(1, min(seq_len * data.reuse_len // data.seq_len, n_tokens - 2))
    return dataclasses.replace(data, seq_len=seq_len, reuse_len=reuse_len)


def _mixture_notes(config: PretrainConfig) -> list[str]:
    """Return a sentence for each other kind of order in the mixture of the objective."""
    orders = {
        "left_to_right": "predict their targets from left to right, as a causal model",
        "independent": "predict each target from the context alone, as a masked language model",
    }
    fractions = {name: getattr(config.objective, name) for name in orders}
    return [f"{fraction:.0%} of the rows {orders[name]}." for name, fraction in fractions.items() if fraction]


def _notes(windows: Windows, data: DataConfig, n_tokens: int) -> list[str]:
    """Return remarks on a window: the origin of segment B, and tokens of the text that it leaves out."""
    notes, n_read = [], min(data.seq_len - data.n_symbols, n_tokens)
    reason = f"a window holds {n_read:,} tokens of text. Give a shorter text or raise data.seq_len."
    if data.has_pairs and windows.pair_label[0]:
        notes.append("Segment B follows A in the text.")
    elif data.has_pairs:
        notes.append("Segment B is from another position (in training, anywhere in the store; here, in this text).")
        n_read = int(windows.special_mask[0].argmax())  # segment A ends at the first <sep>
        reason = "segment B takes the place. Set data.pairs=false, or another --step."
    if n_omitted := n_tokens - n_read:
        end = "first" if windows.backward[0] else "last"
        notes.append(
            f"The {end} {counted(n_omitted, 'token')} of the text {'does' if n_omitted == 1 else 'do'} not fit: {reason}"
        )
    return notes


def find_tokenizer(config: PretrainConfig) -> Tokenizer:
    """Load the vocabulary `tokenizer.path`, or the vocabulary of the token store."""
    if Path(config.tokenizer.path).exists():
        return tokenizer_from_config(config.tokenizer)
    if Path(config.data.store_dir).exists():
        return TokenStore(config.data.store_dir).tokenizer()
    raise InputError(
        f"tokenizer.path={config.tokenizer.path} and data.store_dir={config.data.store_dir} do not exist: there is no vocabulary. "
        "Train one with pretrain/train_tokenizer.py and the same settings."
    )


def to_text(explanation: Explanation, predictions: Predictions | None = None) -> str:
    """Return the explanation for a terminal of TERMINAL_WIDTH columns, with the probabilities that a model gives the targets."""
    cell = math.ceil(len(explanation.pieces) / MAX_MASK_CELLS)
    tokens = [
        "TOKENS   A row sees the tokens whose key rank is below its query rank.",
        *_table(_token_columns(explanation)),
    ]
    marker = "[?] its own position" if explanation.two_streams else "[ ] the position that predicts it"
    count = f"{len(explanation.target_pieces)} of {len(explanation.pieces)} tokens"
    targets = [
        f"TARGETS  {count}, by rank. {marker}, _ a token that is not visible.",
        f" rank  target          {probability_heading(predictions)}is predicted from",
    ]
    ranks = explanation.query_rank[explanation.target_positions]
    for target in np.argsort(ranks, kind="stable").tolist():
        probabilities = probability_cells(predictions, target)
        piece = _pad(explanation.target_pieces[target], 14)
        line = f"{ranks[target]:5}  {piece}  {probabilities}{visible_sentence(explanation, target)}"
        width = TERMINAL_WIDTH * len(line) // _display_width(line)  # in characters, some of which are wide
        targets += textwrap.wrap(line, width, subsequent_indent=" " * (23 + len(probabilities)), break_on_hyphens=False)
    targets += summarize(predictions)
    pairs = [lines] if (lines := pair_lines(explanation, predictions)) else []
    masks = [
        "MASKS    A row shows what a token attends to: █ visible, · masked"
        + f", ▒ {SELF_ONLY_LABEL}" * explanation.two_streams
        + "."
    ]
    if cell > 1:
        masks.append(f"         One character is {cell} x {cell} tokens; the darker, the more of them are visible.")
    masks += ["         Memory, if the lane has any, is visible to all (rank -1).", *_mask_blocks(explanation, cell)]
    notes = [line for note in explanation.notes for line in textwrap.wrap(note, TERMINAL_WIDTH)]
    sections = [[explanation.title, *notes], tokens, targets, *pairs, masks]
    return "\n\n".join("\n".join(line.rstrip() for line in section) for section in sections)


def probability_heading(predictions: Predictions | None) -> str:
    """Return the heading of `probability_cells`."""
    if predictions is None:
        return ""
    return "probability  " if predictions.independent is None else "probability  independent  "


def probability_cells(predictions: Predictions | None, target: int) -> str:
    """Return the probabilities of a target as cells of a table; no text without predictions."""
    if predictions is None:
        return ""
    columns = [values for values in (predictions.in_order, predictions.independent) if values is not None]
    return "".join(f"{np.exp(values[target]):11.2g}  " for values in columns)


def summarize(predictions: Predictions | None) -> list[str]:
    """Return lines with the log-probability of all targets; no lines without predictions."""
    if predictions is None:
        return []
    joint = float(predictions.in_order.sum())
    if predictions.independent is None:
        return ["", f"log-probability of all targets: {joint:.2f} nats"]
    independent = float(predictions.independent.sum())
    return [
        "",
        f"log-probability of all targets in this order: {joint:.2f} nats; if they were independent: {independent:.2f} nats.",
        f"Seeing the targets before it makes a target {_factor((joint - independent) / len(predictions.in_order))} likely "
        "(geometric mean).",
    ]


def pair_lines(explanation: Explanation, predictions: Predictions | None) -> list[str]:
    """Return a table of the pairs of neighboring targets that gain most from their order; no lines without pairs."""
    if predictions is None or not predictions.pairs:
        return []
    lines = [
        "PAIRS    Neighboring targets, predicted from what the first of them in the order sees.",
        "         joint: the second also sees the first; independent: it does not.",
        " targets                       joint  independent       ratio",
    ]
    best = sorted(predictions.pairs, key=lambda pair: pair.independent - pair.joint)[:MAX_PAIRS]
    for pair in best:
        names = [explanation.target_pieces[target] for target in pair.targets]
        pieces = _pad(" ".join(reversed(names) if explanation.backward else names), 24)
        ratio = math.exp(pair.joint - pair.independent)
        lines.append(
            f" {pieces}  {math.exp(pair.joint):9.2g}  {math.exp(pair.independent):11.2g}  {ratio:>10{',.0f' if ratio >= 100 else '.2g'}}"
        )
    return lines


def visible_sentence(explanation: Explanation, target: int) -> str:
    """Return the text as one target sees it, in reading order.

    Masked tokens are `_`. Tokens after the last visible one are left out.
    """
    target_position = int(explanation.target_positions[target])
    row = list(explanation.masks.values())[-1][target_position] > 0
    shown = []
    for position, (piece, input_piece) in enumerate(zip(explanation.pieces, explanation.input_pieces, strict=True)):
        spaced = (input_piece if row[position] else piece).startswith((special_tokens.WORD_BOUNDARY, "<"))
        if row[position]:
            content = input_piece.removeprefix(special_tokens.WORD_BOUNDARY) or input_piece
        else:
            content = "?" if position == target_position else "_"
        shown.append(" " * spaced + (f"[{content}]" if position == target_position else content))
    end = max([target_position, *np.flatnonzero(row)]) + 1
    return "".join(shown[:end] if not explanation.backward else shown[:end][::-1]).strip()


def _token_columns(explanation: Explanation) -> dict[str, list[str]]:
    """Return the columns of the token table by heading; columns that do not apply to the objective are empty."""
    targets = dict(zip(explanation.target_positions.tolist(), explanation.target_pieces, strict=True))
    positions = range(len(explanation.pieces))
    return {
        "#": [str(i) for i in positions],
        "piece": explanation.pieces,
        "read as": [r if r != p else "" for p, r in zip(explanation.pieces, explanation.input_pieces, strict=True)],
        "segment": explanation.segments,
        "part": ["reused" if i < explanation.reuse_len else "rest" for i in positions],
        "target": [f"{_bracket(i, targets)} {targets[i]}" if i in targets else "" for i in positions],
        "order": ["" if index is None else str(index) for index in explanation.order],
        "key rank": [str(r) for r in explanation.key_rank],
        "query rank": [str(r) for r in explanation.query_rank],
    }


def _factor(log_ratio: float) -> str:
    """Describe how many times more or less likely something is."""
    return f"{math.exp(abs(log_ratio)):.2f} times {'more' if log_ratio >= 0 else 'less'}"


def _bracket(position: int, targets: dict[int, str]) -> str:
    """Return the bracket that joins neighboring targets to a span."""
    return {(False, False): "─", (False, True): "┌", (True, True): "│", (True, False): "└"}[
        position - 1 in targets, position + 1 in targets
    ]


def _table(columns: dict[str, list[str]]) -> list[str]:
    """Return aligned lines; empty columns are left out, and numbers are right-aligned."""
    lines = [""] * (1 + len(columns["#"]))
    for heading, cells in columns.items():
        if not any(cells):
            continue
        width = max(_display_width(cell) for cell in [heading, *cells])
        align_right = all(cell.lstrip("-").isdigit() for cell in cells if cell)
        lines = [
            f"{line}  {_pad(cell, width, align_right)}" for line, cell in zip(lines, [heading, *cells], strict=True)
        ]
    return lines


def _mask_blocks(explanation: Explanation, cell: int) -> list[str]:
    """Return the masks side by side. Rows have labels, with * for targets; columns have the last digits of their positions."""
    starts = range(0, len(explanation.pieces), cell)
    n_digits = 2 if 4 * len(starts) + 20 <= TERMINAL_WIDTH else 1
    targets = explanation.is_target & (cell == 1)
    labels = [f"{_pad(explanation.pieces[i], 11)}{'*' if targets[i] else ' '}{i:3}" for i in starts]
    lines = [" " * 15, " " * 15, *labels]
    for name, mask in explanation.masks.items():
        digits = "".join(f"{i % 10**n_digits:{n_digits}}" for i in starts)
        blocks = ["".join(_block(value) * n_digits for value in row) for row in _pool(mask, cell)]
        width = max(len(digits), len(name))
        lines = [f"{line}  {part:{width}}" for line, part in zip(lines, [name, digits, *blocks], strict=True)]
    return lines


def _pool(mask: np.ndarray, cell: int) -> np.ndarray:
    """Return means over squares of `cell` tokens per side, ignoring nan; nan where all values are nan."""
    starts = np.arange(0, len(mask), cell)
    counted = ~np.isnan(mask)
    sums, counts = (
        np.add.reduceat(np.add.reduceat(part, starts, axis=0), starts, axis=1)
        for part in (np.nan_to_num(mask), counted.astype(float))
    )
    return np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)


def _block(value: float) -> str:
    return " " if np.isnan(value) else "·░▒▓█"[math.ceil(value * 4)]


def _pad(text: str, width: int, align_right: bool = False) -> str:
    """Cut or pad `text` to `width` columns of a terminal."""
    while _display_width(text) > width:
        text = text[:-2] + "…"
    space = " " * (width - _display_width(text))
    return space + text if align_right else text + space


def _display_width(text: str) -> int:
    """Return the width of `text` in terminal columns: two per wide character (such as Chinese), none per combining mark."""
    return sum(
        2 if unicodedata.east_asian_width(c) in "WF" else 0 if unicodedata.category(c) in ("Mn", "Me") else 1
        for c in text
    )


def draw(explanation: Explanation) -> Any:
    """Return the masks as a matplotlib figure; targets are colored and labeled with their index in the order."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.patches import Patch

    length, masks = len(explanation.pieces), explanation.masks
    side = min(max(0.32 * length, 5), 14)  # inches of a panel
    figure = new_figure(len(masks) * (side + 1.4), side + 2.7, ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
    panels = figure.subplots(1, len(masks), squeeze=False)[0]
    targets = explanation.is_target & (
        len(explanation.target_pieces) < length
    )  # no color if every token is a target (causal)
    for axes, (name, mask) in zip(panels, masks.items(), strict=True):
        axes.set_title(name, fontsize=16, loc="left", pad=30)
        _draw_mask(axes, mask, targets, explanation.reuse_len)
        _draw_labels(axes, explanation, ~np.isnan(mask[:, 0]), targets, size=min(44 * side / length, 13))
    labels = [
        label
        for label in COLORS
        if label in ("masked", "visible") or (targets.any() and (explanation.two_streams or label != SELF_ONLY_LABEL))
    ]
    patches = [Patch(color=COLORS[label], label=label) for label in labels]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=13)
    numbers = "; numbers are indices in the factorization order" if explanation.two_streams else ""
    figure.suptitle(explanation.title + numbers, fontsize=12, color=GREY, x=0.012, ha="left")
    return figure


def _draw_mask(axes: Any, mask: np.ndarray, targets: np.ndarray, reuse_len: int) -> None:
    """Draw the mask of one stream, and the border of the reused part."""
    from matplotlib.colors import ListedColormap

    length = len(mask)
    color_index = np.select([mask == SELF_ONLY, (mask == VISIBLE) & targets], [3, 2], mask)
    colors = ListedColormap(list(COLORS.values()))
    axes.pcolormesh(color_index, cmap=colors, vmin=-0.5, vmax=3.5, edgecolors="white", linewidth=min(25 / length, 1.2))
    axes.set(xlim=(0, length), ylim=(length, 0), aspect="equal")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    if reuse_len < length:
        axes.axvline(reuse_len, color=GREY, linewidth=1)
        axes.axhline(reuse_len, color=GREY, linewidth=1)
        for center, name in ((reuse_len / 2, "reused part"), ((reuse_len + length) / 2, "rest")):
            axes.text(center, -0.25, name, ha="center", va="bottom", color=GREY, fontsize=12)


def _draw_labels(axes: Any, explanation: Explanation, rows: np.ndarray, targets: np.ndarray, size: float) -> None:
    """Label all columns, and the rows where `rows` is True. Row labels are on the left if all rows have one, else on the right."""
    if size < MIN_FONT_SIZE:
        axes.set(xticks=[], yticks=[])
        return
    indices = ["" if index is None else f"  {index}" for index in explanation.order]
    columns = [piece + index for piece, index in zip(explanation.input_pieces, indices, strict=True)]
    labeled = np.flatnonzero(rows)
    axes.set_xticks(np.arange(len(columns)) + 0.5, columns, rotation=90, size=size)
    axes.set_yticks(labeled + 0.5, [explanation.pieces[i] + indices[i] for i in labeled], size=size)
    if len(labeled) < len(columns):
        axes.yaxis.tick_right()
    labels = [*enumerate(axes.get_xticklabels()), *zip(labeled, axes.get_yticklabels(), strict=True)]
    for position, label in labels:
        color, weight = (TARGET_COLOR, "bold") if targets[position] else (INK, "normal")
        label.set(color=color, weight=weight)


def save_picture(explanation: Explanation, path: Path) -> None:
    """Draw the masks into a file; its suffix decides the format."""
    save_figure(draw(explanation), path, dpi=130)
