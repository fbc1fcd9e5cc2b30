"""Cloze: texts with blanks, and independent predictions: each blank sees the whole text and no other blank."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from xlpre.batch import Batch
from xlpre.common.errors import InputError, check_minimum
from xlpre.data.store import SplitData
from xlpre.inference.batches import check_length, masked_batch, masked_row
from xlpre.model.dropout import without_dropout
from xlpre.model.language_model import LanguageModel
from xlpre.text import special_tokens
from xlpre.text.blanks import BLANK, Blank, find_blanks
from xlpre.text.sentence_boundaries import starts_word, written_without_spaces
from xlpre.text.tokenizer import Tokenizer

TOP_K = 5  # predictions per blank
EXAMPLE_LEN = (10, 40)  # shortest and longest sentence of a ClozeExample, in tokens
MAX_SENTENCES_TRIED = 5000
N_FREQUENT = 200  # words of a ClozeExample; a small model has learned little about others


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


@dataclass(frozen=True)
class ClozeText:
    """Text with N blanks, encoded.

    Attributes:
        text: the text.
        blanks: the N blanks.
        parts: N + 1 arrays of token ids: the text before, between and after the blanks.
    """

    text: str
    blanks: list[Blank]
    parts: list[np.ndarray]

    def masked_tokens(self, lengths: Sequence[int]) -> tuple[np.ndarray, list[np.ndarray]]:
        """Return the token ids (T,) of `[text <sep> <cls>]`, with <mask> for each missing piece, and the positions of each blank.

        Args:
            lengths: number of pieces of each blank.

        Raises:
            InputError: the text is longer than MAX_TOKENS.
        """
        n_tokens = sum(map(len, self.parts)) + sum(lengths) + 2
        check_length(n_tokens)
        tokens, positions, end = [self.parts[0]], [], len(self.parts[0])
        for length, part in zip(lengths, self.parts[1:], strict=True):
            positions.append(np.arange(end, end + length))
            tokens += [np.full(length, special_tokens.MASK), part]
            end += length + len(part)
        return np.concatenate([*tokens, [special_tokens.SEP, special_tokens.CLS]]).astype(np.int64), positions

    @property
    def n_unknown(self) -> int:
        """Number of tokens of the text that are <unk>."""
        return sum(int((part == special_tokens.UNK).sum()) for part in self.parts)


def encode_cloze(text: str, tokenizer: Tokenizer) -> ClozeText:
    """Encode a text with blanks (xlpre/text/blanks.py).

    Pieces of a SentencePiece or word vocabulary include the space before a word, so the space before a blank belongs to the missing word.

    Args:
        text: text with one or more blanks.
        tokenizer: vocabulary.

    Raises:
        InputError: `text` is not a string, has no blank, or has a blank of malformed length; it contains <eop>, which marks a blank
            internally.
    """
    if not isinstance(text, str):
        raise InputError(
            f"text={text!r:.60} is invalid: it must be one str. Build one batch per text, and join them with "
            "xlpre.inference.collate."
        )
    text = text.strip()
    blanks = list(find_blanks(text))
    if not blanks:
        raise InputError(f"text={text!r} is invalid: it has no blank. Mark a missing word with {BLANK}.")
    bounds = [0, *(bound for blank in blanks for bound in (blank.start, blank.end)), len(text)]
    parts = [text[start:end] for start, end in zip(bounds[::2], bounds[1::2], strict=True)]
    encode = _encode_around_blanks if tokenizer.kind == "sentencepiece" else _encode_parts
    return ClozeText(text, blanks, encode(parts, tokenizer))


def check_lengths(cloze: ClozeText, tokenizer: Tokenizer) -> None:
    """Raise InputError if a blank has no length, and a token of the vocabulary is less than a word."""
    if tokenizer.kind in ("bytes", "characters") and not all(blank.has_length for blank in cloze.blanks):
        raise InputError(
            f"text={cloze.text!r} is invalid for a vocabulary of {tokenizer.kind}: a blank is one token, not a word. Write the number of "
            f"{tokenizer.kind}, such as {BLANK}{{5}}, or use a model with a vocabulary of words or word pieces."
        )


def cloze_batch(text: str, tokenizer: Tokenizer, two_streams: bool = True) -> Batch:
    """Build a batch of one row, `[text <sep> <cls>]`, with a target for each missing piece.

    Args:
        text: text with one or more blanks.
        tokenizer: tokenizer of the model.
        two_streams: see `masked_batch`.

    Returns:
        Batch with B = 1. `targets` are <mask>, because the missing pieces are unknown.

    Raises:
        InputError: see `encode_cloze` and `check_lengths`; the length of a blank is a range; or the text is longer than MAX_TOKENS.
    """
    cloze = encode_cloze(text, tokenizer)
    check_lengths(cloze, tokenizer)
    if any(blank.shortest < blank.longest for blank in cloze.blanks):
        raise InputError(
            f"text={text!r} is invalid for independent predictions: each blank needs one length. Write {BLANK}{{3}}, for example, or "
            "predict the blanks jointly."
        )
    tokens, positions = cloze.masked_tokens([blank.shortest for blank in cloze.blanks])
    return masked_row(tokens, np.concatenate(positions), two_streams)


@torch.no_grad()
def top_predictions(
    model: LanguageModel, batch: Batch, tokenizer: Tokenizer, top_k: int = TOP_K
) -> list[list[tuple[str, float]]]:
    """Return the `top_k` most likely tokens of each target with their probabilities. Special tokens are excluded.

    Args:
        model: language model.
        batch: one row.
        tokenizer: tokenizer of the model.
        top_k: number of tokens.
    """
    backbone = model.backbone
    with without_dropout(model):
        logits, *_ = model.logits(batch.to(backbone.device), backbone.initial_memory(1, mem_len=0))
    probabilities = logits[0].float().softmax(-1)
    probabilities[:, : special_tokens.N_SPECIAL] = 0
    top = probabilities.topk(min(top_k, probabilities.size(1) - special_tokens.N_SPECIAL))
    return [
        [(readable_piece(tokenizer.pieces[i]), probability) for probability, i in zip(*row, strict=True)]
        for row in zip(top.values.tolist(), top.indices.tolist(), strict=True)
    ]


def predict_blanks(model: LanguageModel, tokenizer: Tokenizer, text: str, top_k: int = TOP_K) -> ClozeResult:
    """Predict each missing piece of `text` independently, given the text and no other missing piece.

    `xlpre.inference.fill` predicts them jointly.

    Raises:
        InputError: see `cloze_batch`; or `top_k` is below 1.
    """
    check_minimum("top_k", top_k, 1)
    batch = cloze_batch(text, tokenizer, model.backbone.two_streams)
    return ClozeResult(text, top_predictions(model, batch, tokenizer, top_k), [])


def predict_example(model: LanguageModel, tokenizer: Tokenizer, example: ClozeExample) -> ClozeResult:
    """Predict the masked word of an example."""
    tokens, position = example.tokens, example.position
    before, after = tokenizer.decode(tokens[:position]), tokenizer.decode(tokens[position + 1 :])
    if len(after) and tokenizer.pieces[tokens[position + 1]].startswith(special_tokens.WORD_BOUNDARY):
        after = f" {after}"
    batch = masked_batch(tokens, [position], model.backbone.two_streams)
    predictions = top_predictions(model, batch, tokenizer)
    return ClozeResult(f"{before} {BLANK}{after}", predictions, [readable_piece(tokenizer.pieces[tokens[position]])])


def sample_cloze_examples(
    split: SplitData, tokenizer: Tokenizer, counts: np.ndarray, count: int, seed: int
) -> list[ClozeExample]:
    """Sample up to `count` sentences of a split, each with a word to mask that is a single token and one of the N_FREQUENT most frequent.

    Args:
        split: text.
        tokenizer: tokenizer of the text.
        counts: (V,) number of occurrences of each token.
        count: number of examples.
        seed: random seed.
    """
    rng = np.random.default_rng(seed)
    is_word = np.array([_is_word(piece) for piece in tokenizer.pieces]) & tokenizer.starts_word
    frequent = np.argsort(-np.where(is_word, counts, -1), kind="stable")[:N_FREQUENT]
    is_word[np.setdiff1d(np.arange(len(is_word)), frequent)] = False
    examples: list[ClozeExample] = []
    for tokens in islice(split.random_sentences(rng), MAX_SENTENCES_TRIED):
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
    return f"-{shown}" if continues_word(piece) else shown


def continues_word(piece: str) -> bool:
    """Return True if a piece continues the word before it."""
    return not starts_word(piece) and unicodedata.category(piece[0])[0] in "LMN"


def _is_word(piece: str) -> bool:
    """Return True if a piece has only letters and combining marks. In scripts with spaces between words, it must have at least three."""
    text = piece.removeprefix(special_tokens.WORD_BOUNDARY)
    is_letters = all(unicodedata.category(character)[0] in "LM" for character in text)
    return is_letters and (len(text) >= 3 or (len(text) > 0 and written_without_spaces(text[0])))


def _encode_parts(parts: Sequence[str], tokenizer: Tokenizer) -> list[np.ndarray]:
    """Return the token ids of the parts of a text between its blanks, with a vocabulary whose tokens do not depend on their neighbors."""
    return [np.array(tokenizer.encode(part), np.int64) for part in parts]


def _encode_around_blanks(parts: Sequence[str], tokenizer: Tokenizer) -> list[np.ndarray]:
    """Return the token ids of the parts of a text between its blanks, with a SentencePiece vocabulary.

    A special token stands for each blank while the text is encoded, because the pieces after a blank depend on whether a space follows it.
    """
    marker = special_tokens.SPECIAL_TOKENS[special_tokens.EOP]
    if any(marker in part for part in parts):
        raise InputError(f"text={BLANK.join(parts)!r} is invalid: {marker} is a special token. Remove it.")
    *before, last = parts
    ids = np.array(tokenizer.encode(marker.join([*(part.rstrip() for part in before), last])), np.int64)
    encoded = np.split(ids, np.flatnonzero(ids == special_tokens.EOP))
    encoded = [encoded[0], *(part[1:] for part in encoded[1:])]
    # a space before the marker that became a piece of its own belongs to the missing word
    for i, part in enumerate(encoded[:-1]):
        if len(part) and tokenizer.pieces[part[-1]] == special_tokens.WORD_BOUNDARY:
            encoded[i] = part[:-1]
    return encoded
