"""Cloze: predict masked tokens of a text. Each blank sees the whole text and no other blank."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from xlpre.batch import Batch, make_batch
from xlpre.data.store import SplitData
from xlpre.data.window_layout import SEGMENT_A, SEGMENT_CLS
from xlpre.model.dropout import without_dropout
from xlpre.model.language_model import LanguageModel
from xlpre.model.memory import initial_memory
from xlpre.text import special_tokens
from xlpre.text.blanks import BLANK, BLANK_PATTERN
from xlpre.text.sentence_boundaries import starts_word, written_without_spaces
from xlpre.text.tokenizer import Tokenizer

MAX_TOKENS = 2048  # attention memory grows with its square
TOP_K = 5  # predictions per blank
EXAMPLE_LEN = (10, 40)  # shortest and longest sentence of a ClozeExample, in tokens
MAX_SENTENCES_TRIED = 5000


@dataclass(frozen=True)
class ClozeExample:
    """Sentence with one word to mask.

    Attributes:
        tokens: (T,) token ids.
        position: position of the word to mask, which is a single token.
    """

    tokens: np.ndarray
    position: int


@dataclass(frozen=True)
class ClozeResult:
    """Predictions for a text with blanks.

    Attributes:
        text: the text.
        predictions: for each blank, the most likely tokens with their probabilities, best first.
        labels: the masked token of each blank. The list is empty if they are unknown.
    """

    text: str
    predictions: list[list[tuple[str, float]]]
    labels: list[str]


def cloze_batch(text: str, tokenizer: Tokenizer) -> Batch:
    """Build a batch of one row, `[text <sep> <cls>]`, with a target at each blank. A blank is one token.

    Args:
        text: text with one or more blanks of at least three underscores.
        tokenizer: tokenizer of the model.

    Returns:
        Batch with B = 1. `targets` are <mask>, because the masked tokens are unknown.

    Raises:
        ValueError: the vocabulary has no words; `text` is not a string, has no blank, is longer than MAX_TOKENS, or contains the special
            token that marks a blank internally.
    """
    if not isinstance(text, str):
        raise ValueError(
            f"text={text!r:.60} is invalid: it must be one str. Build one batch per text and join them with xlpre.inference.collate."
        )
    if tokenizer.kind in ("bytes", "characters"):
        raise ValueError(
            f"text={text!r} is invalid for a vocabulary of {tokenizer.kind}: a blank is one token, not a word. Use a model with a "
            "vocabulary of words or word pieces."
        )
    marker = special_tokens.SPECIAL_TOKENS[special_tokens.EOP]
    if marker in text:
        raise ValueError(f"text={text!r} is invalid: {marker} is a special token. Remove it.")
    blank = f" {marker} " if tokenizer.kind == "words" else marker
    ids = tokenizer.encode(re.sub(rf"\s*{BLANK_PATTERN}", blank, text.strip()))
    # the space before a blank belongs to the missing word
    space = (
        tokenizer.pieces.index(special_tokens.WORD_BOUNDARY)
        if special_tokens.WORD_BOUNDARY in tokenizer.pieces
        else None
    )
    ids = [
        i
        for i, following in zip(ids, [*ids[1:], None], strict=False)
        if not (i == space and following == special_tokens.EOP)
    ]
    tokens = np.array([*ids, special_tokens.SEP, special_tokens.CLS])
    positions = np.flatnonzero(tokens == special_tokens.EOP)
    if not len(positions):
        raise ValueError(f"text={text!r} is invalid: it has no blank. Mark a missing word with {BLANK}.")
    if len(tokens) > MAX_TOKENS:
        raise ValueError(f"a text of {len(tokens):,} tokens is invalid: the limit is {MAX_TOKENS:,}. Shorten it.")
    return _masked_row(tokens, positions)


def masked_batch(tokens: Sequence[int] | np.ndarray, positions: Sequence[int] | np.ndarray) -> Batch:
    """Build a batch of one row, `[tokens <sep> <cls>]`, with masked targets.

    Args:
        tokens: (T,) token ids.
        positions: (P,) positions to mask and predict.

    Raises:
        ValueError: a position is outside the text or repeated, a token id is negative, or an argument is not a one-dimensional sequence of
            integers.
    """
    tokens, positions = _integer_row("tokens", tokens), _integer_row("positions", positions)
    if len(tokens) and tokens.min() < 0:
        raise ValueError(f"tokens with id {tokens.min()} are invalid: ids must be at least 0.")
    if len(np.unique(positions)) < len(positions) or not all(0 <= position < len(tokens) for position in positions):
        raise ValueError(
            f"positions={positions.tolist()} is invalid: positions must be between 0 and {len(tokens) - 1}, each at most once."
        )
    return _masked_row(np.concatenate([tokens, [special_tokens.SEP, special_tokens.CLS]]), positions)


def unmasked_batch(tokens: Sequence[int] | np.ndarray) -> Batch:
    """Build a batch of one row, `[tokens <sep> <cls>]`, to compute the hidden states of all T + 2 tokens.

    Use it for models that read from the content stream. Every token sees every token.

    Args:
        tokens: (T,) token ids.
    """
    batch = masked_batch(tokens, [])
    positions = torch.arange(batch.input_ids.size(1))[None]
    weights = torch.ones(positions.shape)
    return replace(batch, target_positions=positions, targets=batch.input_ids, target_weights=weights)


@torch.no_grad()
def top_predictions(model: LanguageModel, batch: Batch, tokenizer: Tokenizer) -> list[list[tuple[str, float]]]:
    """Return the `TOP_K` most likely tokens of each target with their probabilities. Special tokens are excluded.

    Args:
        model: language model.
        batch: one row.
        tokenizer: tokenizer of the model.
    """
    weight = model.backbone.mask_embedding
    memory = initial_memory(model.config, 1, mem_len=0, device=weight.device, dtype=weight.dtype)
    with without_dropout(model):
        logits, *_ = model.logits(batch.to(weight.device), memory)
    probabilities = logits[0].float().softmax(-1)
    probabilities[:, : special_tokens.EOP + 1] = 0
    top = probabilities.topk(TOP_K)
    return [
        [(readable_piece(tokenizer.pieces[i]), probability) for probability, i in zip(*row, strict=True)]
        for row in zip(top.values.tolist(), top.indices.tolist(), strict=True)
    ]


def fill_blanks(model: LanguageModel, tokenizer: Tokenizer, text: str) -> ClozeResult:
    """Predict the blanks of `text`.

    Raises:
        ValueError: see `cloze_batch`.
    """
    return ClozeResult(text, top_predictions(model, cloze_batch(text, tokenizer), tokenizer), [])


def fill_example(model: LanguageModel, tokenizer: Tokenizer, example: ClozeExample) -> ClozeResult:
    """Predict the masked word of an example."""
    tokens, position = example.tokens, example.position
    before, after = tokenizer.decode(tokens[:position]), tokenizer.decode(tokens[position + 1 :])
    if len(after) and tokenizer.pieces[tokens[position + 1]].startswith(special_tokens.WORD_BOUNDARY):
        after = f" {after}"
    predictions = top_predictions(model, masked_batch(tokens, [position]), tokenizer)
    return ClozeResult(f"{before} {BLANK}{after}", predictions, [readable_piece(tokenizer.pieces[tokens[position]])])


def sample_cloze_examples(split: SplitData, tokenizer: Tokenizer, count: int, seed: int) -> list[ClozeExample]:
    """Sample up to `count` sentences of a split, each with a word to mask that is a single token.

    Args:
        split: text.
        tokenizer: tokenizer of the text.
        count: number of examples.
        seed: random seed.
    """
    rng = np.random.default_rng(seed)
    ends = split.sentence_ends
    is_word = np.array([_is_word(piece) for piece in tokenizer.pieces]) & tokenizer.starts_word
    examples: list[ClozeExample] = []
    for index in rng.permutation(len(ends))[:MAX_SENTENCES_TRIED]:
        tokens = np.asarray(split.tokens[ends[index - 1] if index else 0 : ends[index]])
        tokens = tokens[tokens > special_tokens.EOP]
        if not EXAMPLE_LEN[0] <= len(tokens) <= EXAMPLE_LEN[1]:
            continue
        is_whole_word = is_word[tokens] & np.append(tokenizer.starts_word[tokens[1:]], True)
        candidates = np.flatnonzero(is_whole_word)[2:]
        if len(candidates):
            examples.append(ClozeExample(tokens, int(rng.choice(candidates))))
        if len(examples) == count:
            break
    return examples


def format_result(result: ClozeResult) -> str:
    """Format predictions for a terminal, one line per blank."""
    lines = [result.text]
    for blank, predictions in enumerate(result.predictions):
        label = f"   (label: {result.labels[blank]})" if result.labels else ""
        lines.append("    " + "  ".join(f"{piece} {format_percent(p)}" for piece, p in predictions) + label)
    return "\n".join(lines)


def format_percent(probability: float) -> str:
    """Return a probability in whole percent; `<1%` if it is below 1 %."""
    return "<1%" if probability < 0.01 else f"{probability:.0%}"


def readable_piece(piece: str) -> str:
    """Return a piece for display. A hyphen marks a piece that continues a word; a combining mark is shown on a circle."""
    text = piece.removeprefix(special_tokens.WORD_BOUNDARY)
    if not text:
        return "␣"
    shown = f"◌{text}" if unicodedata.category(text[0])[0] == "M" else text
    return shown if starts_word(piece) or unicodedata.category(text[0])[0] not in "LMN" else f"-{shown}"


def _is_word(piece: str) -> bool:
    """Return True if a piece has only letters and combining marks. In scripts with spaces between words, it must have at least three."""
    text = piece.removeprefix(special_tokens.WORD_BOUNDARY)
    is_letters = all(unicodedata.category(character)[0] in "LM" for character in text)
    return is_letters and (len(text) >= 3 or (len(text) > 0 and written_without_spaces(text[0])))


def _integer_row(name: str, values: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return `values` as an (N,) int64 array. `name` is their name in error messages."""
    try:
        row = np.asarray(values)
    except (ValueError, TypeError):  # nested lists of different lengths
        row = np.empty((0, 0))
    if row.ndim != 1 or (row.dtype.kind not in "iu" and len(row)):
        raise ValueError(
            f"{name}={values!r:.60} is invalid: it must be a one-dimensional sequence of integers. "
            "Build one batch per text and join them with xlpre.inference.collate."
        )
    return row.astype(np.int64)


def _masked_row(tokens: np.ndarray, positions: np.ndarray) -> Batch:
    """Build a batch of one row with the token ids `tokens` (T,) int64 and masked targets at `positions` (P,) int64."""
    input_ids = tokens.copy()
    input_ids[positions] = special_tokens.MASK
    segment_ids = np.full(len(tokens), SEGMENT_A)
    segment_ids[-1] = SEGMENT_CLS
    key_rank = np.zeros(len(tokens), np.int32)
    key_rank[positions] = 1
    return make_batch(
        torch.from_numpy(input_ids)[None],
        query_rank=torch.ones(1, len(tokens), dtype=torch.int32),
        key_rank=torch.from_numpy(key_rank)[None],
        target_positions=torch.from_numpy(positions)[None],
        segment_ids=torch.from_numpy(segment_ids)[None],
        targets=torch.from_numpy(tokens[positions])[None],
    )
