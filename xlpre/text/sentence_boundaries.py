"""Where words begin and sentences and documents end, as pieces of a vocabulary show it."""

from __future__ import annotations

import unicodedata
from array import array
from collections.abc import Iterable

import numpy as np

from xlpre.text import special_tokens
from xlpre.text.document import LineType
from xlpre.text.preprocess import Preprocess
from xlpre.text.special_tokens import WORD_BOUNDARY

TERMINAL, CLOSING, QUOTE, LOWER, LONE_SPACE, SPACED, UNSPACED, BREAK = (
    1 << i for i in range(8)
)  # of a kind, see kinds_of
TERMINALS = ".!?…։؟۔।॥፧።။។៕᠃。！？｡"  # full stops of many scripts, and what stands for one


def starts_word(piece: str) -> bool:
    """Whether a piece begins a word, where a span may begin.

    Source: zihangdai/xlnet data_utils.py (space mark, '<', ASCII punctuation), and here also a script written without spaces, whose
    every piece begins one.
    """
    if piece.startswith((WORD_BOUNDARY, "<")) or (len(piece) == 1 and piece in '!"#$%&()*+,-./:;?@[\\]^_`{|}~'):
        return True
    first = piece[:1]
    return first != "" and written_without_spaces(first)


def written_without_spaces(character: str) -> bool:
    """Han, kana, Thai, Lao, Khmer, Burmese, Tibetan: scripts that put no space between words."""
    name = unicodedata.name(character, "")
    return name.startswith(("CJK", "HIRAGANA", "KATAKANA", "BOPOMOFO", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN"))


def kinds_of(pieces: Iterable[str], preprocess: Preprocess) -> np.ndarray:
    """(V,) uint8, what each piece is at the end of a sentence: one look-up a token instead of eight."""
    return np.array([_kind(piece, preprocess) for piece in pieces], np.uint8)


def sentence_ends(ids: np.ndarray, kinds: np.ndarray) -> np.ndarray:
    """Offsets after each sentence of encoded documents of paragraphs, the last one their end.

    A sentence ends after a run of marks with a terminal one among them (`.`, `?!`, `.")`), before a space and a word that is not
    lower-case (in uncased text any word), before a script without spaces, and at the end of a paragraph or document. A quotation mark that
    opens in one language and closes in another closes before a space.

    Args:
        ids: (N,) of the tokens.
        kinds: (V,) of the vocabulary, see kinds_of.
    """
    kind = np.append(kinds[ids], [0, 0])
    marks = np.flatnonzero(kind & (TERMINAL | CLOSING | QUOTE))  # few: the rest looks at these alone
    opens = (kind[marks] & QUOTE > 0) & (kind[marks + 1] & (TERMINAL | CLOSING | SPACED | BREAK) == 0)
    marks = marks[~opens]
    last = np.append(np.diff(marks) > 1, True)[: len(marks)]  # of a run of marks
    terminals = np.diff(np.cumsum(kind[marks] & TERMINAL > 0)[last], prepend=0)
    final = marks[last][terminals > 0]
    # a space of its own belongs to the word that begins in the next piece
    word = np.where(kind[final + 1] & LONE_SPACE > 0, kind[final + 2], kind[final + 1])
    ends = final[(kind[final + 1] & (SPACED | UNSPACED) > 0) & (word & LOWER == 0)]
    breaks = np.flatnonzero(kind & BREAK)
    breaks = breaks[breaks + 1 < len(ids)]
    breaks = breaks[
        (ids[breaks] == special_tokens.EOD) | (ids[breaks + 1] != special_tokens.EOD)
    ]  # <eop> <eod> is one end
    return np.append(np.union1d(ends, breaks) + 1, len(ids))


def joined(
    documents: Iterable[Iterable[list[int]]], line_type: LineType, kinds: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Encoded documents one after another, with the symbols that end their lines and them.

    Args:
        documents: of each its lines' ids.
        line_type: what a line is, see Tokenizer.encode_documents.
        kinds: (V,) of the vocabulary, see kinds_of.

    Returns:
        (N,) int64 ids; (S,) and (documents,) int64 increasing offsets after sentences and documents, the last ones N.
    """
    ids, line_ends, document_ends = array("q"), [], []
    for document in documents:
        for line in document:
            ids.fromlist(line)
            if line_type == "paragraphs":
                ids.append(special_tokens.EOP)
            line_ends.append(len(ids))
        ids.append(special_tokens.EOD)
        document_ends.append(len(ids))
    found = np.asarray(ids)
    if line_type == "paragraphs":
        return found, sentence_ends(found, kinds), np.array(document_ends)
    ends = np.array(line_ends, np.int64)
    ends = ends[(ends > 0) & (found[ends] != special_tokens.EOD)]  # the last line of a document ends with it
    ends = np.union1d(ends[found[ends - 1] != special_tokens.EOD], document_ends)  # a line may hold no token
    return found, ends, np.array(document_ends)


def _kind(piece: str, preprocess: Preprocess) -> int:
    category = {unicodedata.category(character) for character in piece}
    marks = {
        TERMINAL: _bare(piece).endswith(tuple(TERMINALS)),
        CLOSING: piece != "" and _bare(piece) == "",
        QUOTE: category == {"Pi"},
        LOWER: piece.removeprefix(WORD_BOUNDARY)[:1].islower() and preprocess != "uncased",  # where lower case says something
        LONE_SPACE: piece == WORD_BOUNDARY,
        SPACED: piece.startswith(WORD_BOUNDARY),
        UNSPACED: written_without_spaces(piece[:1]) or (not piece.isascii() and category <= {"Ps", "Pi"}),
        BREAK: piece in (special_tokens.SPECIAL_TOKENS[special_tokens.EOP], special_tokens.SPECIAL_TOKENS[special_tokens.EOD]),
    }
    return sum(mark for mark, is_so in marks.items() if is_so)


def _bare(piece: str) -> str:
    """A piece without the closing quotes and brackets at its end."""
    while piece and (piece[-1] in "\"'" or unicodedata.category(piece[-1]) in ("Pe", "Pf")):
        piece = piece[:-1]
    return piece
