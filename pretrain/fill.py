"""Fill in blanks.

python pretrain/fill.py runs/quickstart/model "The ____ of the function is a list of strings."
"""

from __future__ import annotations

import argparse
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import pretrain  # noqa: F401  before torch

# isort: split
import numpy as np
import torch

from xlpre.batch import Batch
from xlpre.common.cli_main import run_main
from xlpre.conversion.model_folder import load_folder
from xlpre.data.store import SplitData
from xlpre.inference.cloze import BLANK, blanks_batch, hide
from xlpre.model.dropout import without_dropout
from xlpre.model.language_model import LanguageModel
from xlpre.model.memory import initial_memory
from xlpre.objectives.registry import OBJECTIVES
from xlpre.text import special_tokens
from xlpre.text.sentence_boundaries import starts_word, written_without_spaces
from xlpre.text.tokenizer import Tokenizer

TOP = 5


@dataclass(frozen=True)
class ClozeResult:
    """A text with blanks; for each blank the likeliest pieces with their probabilities, and what stood there if known."""

    text: str
    blanks: list[list[tuple[str, float]]]
    truth: list[str]


@torch.no_grad()
def likeliest(model: LanguageModel, batch: Batch, tokenizer: Tokenizer) -> list[list[tuple[str, float]]]:
    """For each target of a one-row batch its TOP pieces and their probabilities."""
    weight = model.backbone.mask_embedding
    memory = initial_memory(model.config, 1, mem_len=0, device=weight.device, dtype=weight.dtype)
    with without_dropout(model):
        logits, *_ = model.logits(batch.to(weight.device), memory)
    probabilities = logits[0].float().softmax(-1)
    probabilities[:, : special_tokens.EOP + 1] = 0  # a symbol is no answer
    best = probabilities.topk(TOP)
    return [
        [(plain(tokenizer.pieces[i]), p) for p, i in zip(*row, strict=True)]
        for row in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    ]


def fill(model: LanguageModel, tokenizer: Tokenizer, text: str) -> ClozeResult:
    """Fill in the blanks of `text`."""
    return ClozeResult(text, likeliest(model, blanks_batch(text, tokenizer), tokenizer), [])


def held_out_puzzles(part: SplitData, tokenizer: Tokenizer, count: int, seed: int) -> list[tuple[np.ndarray, int]]:
    """Sentences of held-out text, each with the position of one whole word, a single piece, to hide."""
    rng = np.random.default_rng(seed)
    ends = part.sentence_ends
    words = np.array([_is_word(piece) for piece in tokenizer.pieces]) & tokenizer.starts_word
    puzzles: list[tuple[np.ndarray, int]] = []
    for index in rng.permutation(len(ends))[:5000]:
        tokens = np.asarray(part.tokens[ends[index - 1] if index else 0 : ends[index]])
        tokens = tokens[tokens > special_tokens.EOP]
        if not 10 <= len(tokens) <= 40:
            continue
        whole = words[tokens] & np.append(tokenizer.starts_word[tokens[1:]], True)
        candidates = np.flatnonzero(whole)[2:]
        if len(candidates):
            puzzles.append((tokens, int(rng.choice(candidates))))
        if len(puzzles) == count:
            break
    return puzzles


def _is_word(piece: str) -> bool:
    """Letters and their marks alone, three or more where words are written with spaces."""
    bare = piece.removeprefix(special_tokens.WORD_BOUNDARY)
    letters = all(unicodedata.category(character)[0] in "LM" for character in bare)
    return letters and (len(bare) >= 3 or (len(bare) > 0 and written_without_spaces(bare[0])))


def solve(model: LanguageModel, tokenizer: Tokenizer, puzzle: tuple[np.ndarray, int]) -> ClozeResult:
    """Fill in the hidden word of a puzzle."""
    tokens, position = puzzle
    before, after = tokenizer.decode(tokens[:position]), tokenizer.decode(tokens[position + 1 :])
    if len(after) and tokenizer.pieces[tokens[position + 1]].startswith(special_tokens.WORD_BOUNDARY):
        after = f" {after}"
    guesses = likeliest(model, hide(tokens, np.array([position])), tokenizer)
    return ClozeResult(f"{before} {BLANK}{after}", guesses, [plain(tokenizer.pieces[tokens[position]])])


def show(filled: ClozeResult) -> str:
    """Lines for a terminal."""
    lines = [filled.text]
    for number, guesses in enumerate(filled.blanks):
        truth = f"   (it was: {filled.truth[number]})" if filled.truth else ""
        lines.append("    " + "  ".join(f"{piece} {p:.0%}" for piece, p in guesses) + truth)
    return "\n".join(lines)


def plain(piece: str) -> str:
    """A piece as a person reads it: one that goes on a word opens with a hyphen, a mark has a circle to stand on."""
    bare = piece.removeprefix(special_tokens.WORD_BOUNDARY)
    if not bare:
        return "␣"
    shown = f"◌{bare}" if unicodedata.category(bare[0])[0] == "M" else bare
    return shown if starts_word(piece) or unicodedata.category(bare[0])[0] not in "LMN" else f"-{shown}"


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model folder, such as runs/quickstart/model")
    parser.add_argument("text", nargs="+", help=f"sentences with {BLANK} where a word is missing")
    words = parser.parse_args(argv)
    folder = load_folder(words.model)
    if not OBJECTIVES[folder.objective].sees_ahead:
        raise ValueError(
            f"{words.model} holds a {folder.objective} model, which sees nothing after a blank; it cannot fill one in"
        )
    model, tokenizer = folder.model(), folder.require_tokenizer(words.model)
    for text in words.text:
        print(show(fill(model, tokenizer, text)))


if __name__ == "__main__":
    run_main(main)
