"""Scores of the lines of a file as JSON lines, and of minimal pairs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from xlpre.common.files import atomic_write
from xlpre.common.plots import COLORS, legend_label, new_axes, save_figure
from xlpre.common.progress_bar import ProgressBar
from xlpre.common.tables import print_json
from xlpre.inference.minimal_pairs import MinimalPair, PairAccuracies, encode_pairs, pair_accuracies
from xlpre.inference.scoring import TextScore, encode_texts
from xlpre.text import special_tokens
from xlpre.text.readers import STDIN, ByteCounter, read_lines
from xlpre.text.tokenizer import Tokenizer

CHUNK_LINES = 4096  # lines scored together, enough to batch lines of similar length

ScoreTexts = Callable[..., list[TextScore]]  # `score` with all arguments but texts and report_progress


def score_lines(
    score_texts: ScoreTexts, tokenizer: Tokenizer, path: Path | None, chunk_lines: int, with_tokens: bool
) -> Iterator[dict[str, Any]]:
    """Yield the score of each line of a file, in order, as JSON values.

    Args:
        score_texts: `score` of a model.
        tokenizer: vocabulary of the model.
        path: text file, perhaps compressed. None: standard input.
        chunk_lines: number of lines read and scored together.
        with_tokens: add the tokens and their log-probabilities, which are means over the orders.

    Raises:
        InputError: the file cannot be read, or a line is empty. The message names the line.
    """
    source = STDIN if path is None else path
    if path is not None:  # before the work that an empty line would waste
        blank = ((n, line.rstrip("\r\n")) for n, (_, line) in enumerate(read_lines(path), 1) if not line.strip())
        for n, line in blank:
            encode_texts(tokenizer, [line], partial(_name_of_line, path, n))
    n_bytes = None if path is None else path.stat().st_size
    counter = ByteCounter()
    lines = (line.rstrip("\r\n") for _, line in read_lines(source, counter))
    number = 0
    with ProgressBar(n_bytes, "B") as progress:
        while chunk := list(islice(lines, chunk_lines)):
            ids = encode_texts(tokenizer, chunk, partial(_name_of_line, source, number + 1))
            for line, text in zip(chunk, score_texts(ids), strict=True):
                yield to_record(line, text, tokenizer, with_tokens)
            number += len(chunk)
            progress.report(counter.n_bytes, n_bytes or counter.n_bytes)


def to_record(line: str, text: TextScore, tokenizer: Tokenizer, with_tokens: bool) -> dict[str, Any]:
    """Return the score of a line as JSON values."""
    record: dict[str, Any] = {
        "text": line,
        "log_likelihood": text.log_likelihood,
        "n_tokens": text.n_tokens,
        "n_unknown": text.n_unknown,
    }
    if text.std is not None:
        record |= {"std": text.std, "by_order": text.by_order.tolist()}
    if with_tokens:
        record["tokens"] = [tokenizer.pieces[token] for token in text.tokens]
        record["token_log_likelihoods"] = text.token_log_likelihoods.mean(0).tolist()
    return record


def score_pairs(score_texts: ScoreTexts, tokenizer: Tokenizer, pairs: list[MinimalPair]) -> PairAccuracies:
    """Score minimal pairs, with a progress bar.

    Raises:
        InputError: a sentence has no tokens. The message names file and line.
    """
    ids = encode_pairs(tokenizer, pairs)
    n_unknown = sum(
        any((sentence == special_tokens.UNK).any() for sentence in pair)
        for pair in zip(ids[::2], ids[1::2], strict=True)
    )
    if n_unknown:
        print(
            f"note: pairs with <unk>: {n_unknown:,} of {len(pairs):,}. The vocabulary lacks some of their characters",
            file=sys.stderr,
        )
    with ProgressBar(None, "row") as progress:
        scores = score_texts(ids, report_progress=progress.report)
    return pair_accuracies(pairs, scores)


def write_records(records: Iterable[dict[str, Any]], path: Path | None) -> None:
    """Write JSON lines to a file, or to standard output if `path` is None. A file is complete or not written."""
    if path is None:
        for record in records:
            print_json(record)
        return
    with atomic_write(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def _name_of_line(source: Path, first: int, index: int) -> str:
    """Return the name of a text in error messages; `first` is the number of the line with index 0."""
    return f"{source}, line {first + index}: text"


def draw_accuracies(accuracies: PairAccuracies, path: Path, title: str) -> None:
    """Draw the accuracy of each paradigm with its standard error. The format is that of the suffix of `path`."""
    names = [row["paradigm"] for row in accuracies.paradigm_table()][::-1]
    figure, (axes,) = new_axes(8, 1.6 + 0.17 * len(names))
    for index, phenomenon in enumerate(sorted(accuracies.phenomena)):
        rows = [row for row, name in enumerate(names) if accuracies.phenomenon_of[name] == phenomenon]
        values = [accuracies.paradigms[names[row]] for row in rows]
        color, errors = COLORS[index % len(COLORS)], [value.standard_error for value in values]
        label = f"{phenomenon.replace('_', ' ')} ({accuracies.phenomena[phenomenon].percent:.1f})"
        percents = [value.percent for value in values]
        axes.errorbar(percents, rows, xerr=errors, fmt="none", color=color)
        axes.plot(
            percents, rows, "os^D"[index // len(COLORS) % 4], markersize=4, color=color, label=legend_label(label)
        )
    axes.axvline(50, color="#9aa3ad", linewidth=0.8, linestyle="--")
    axes.axvline(accuracies.overall.percent, color="#333333", linewidth=0.8)
    axes.set(xlim=(-2, 102), ylim=(-0.7, len(names) - 0.3), xlabel="accuracy (%); dashed: chance; line: mean")
    axes.set_yticks(range(len(names)), [name.replace("_", " ") for name in names], fontsize=7)
    axes.grid(axis="y", linewidth=0.3)
    figure.suptitle(title, fontsize=10)
    figure.legend(loc="outside lower center", ncols=3, fontsize=7, frameon=False)
    save_figure(figure, path)
