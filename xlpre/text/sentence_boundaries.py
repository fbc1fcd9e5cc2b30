"""Starts of words and ends of sentences and documents, from the pieces of a vocabulary."""

from __future__ import annotations

import unicodedata
from array import array
from collections.abc import Iterable

import numpy as np

from xlpre.text import special_tokens
from xlpre.text.document import LineType
from xlpre.text.preprocess import Preprocess
from xlpre.text.special_tokens import WORD_BOUNDARY

# flags of a piece, see boundary_flags
TERMINAL = 1 << 0  # ends with a full stop
CLOSING = 1 << 1  # closing quotes and brackets only
QUOTE = 1 << 2  # a quotation mark that opens in some languages and closes in others
LOWER = 1 << 3  # starts with a lower-case letter
LONE_SPACE = 1 << 4  # a space
SPACED = 1 << 5  # starts with a space
UNSPACED = 1 << 6  # of a script that is written without spaces
BREAK = 1 << 7  # <eop>, <eod> or a newline

TERMINALS = ".!?…։؟۔।॥፧።။៕᠃。！？｡"  # full stops of many scripts


def starts_word(piece: str) -> bool:
    """Return True if a piece starts a word, so that a span may start with it.

    As in zihangdai/xlnet data_utils.py, these pieces start with a space or '<', or are one ASCII punctuation mark. In addition, every piece
    of a script without spaces starts a word.
    """
    if piece.startswith((WORD_BOUNDARY, "<")) or (len(piece) == 1 and piece in '!"#$%&()*+,-./:;?@[\\]^_`{|}~'):
        return True
    first = piece[:1]
    return first != "" and written_without_spaces(first)


def written_without_spaces(character: str) -> bool:
    """Return True for scripts without spaces between words: Han, kana, Thai, Lao, Khmer, Burmese, Tibetan."""
    name = unicodedata.name(character, "")
    return name.startswith(("CJK", "HIRAGANA", "KATAKANA", "BOPOMOFO", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN"))


def boundary_flags(pieces: Iterable[str], preprocess: Preprocess) -> np.ndarray:
    """Return (V,) uint8, the flags of each piece. With them, `sentence_ends` needs one look-up per token instead of eight."""
    return np.array([_flags(piece, preprocess) for piece in pieces], np.uint8)


def sentence_ends(ids: np.ndarray, flags: np.ndarray) -> np.ndarray:
    """Return the offset after each sentence of encoded documents whose lines are paragraphs. The last offset is N.

    A sentence ends at the end of a paragraph or document. It also ends after punctuation that contains a full stop or a similar mark
    (`.`, `?!`, `.")`) if one of these follows:

    - a space and a word that does not start with a lower-case letter (in uncased text any word)
    - a script without spaces

    A quotation mark that can open or close counts as closing before a space.

    Args:
        ids: (N,) token ids.
        flags: (V,) flags from `boundary_flags`.
    """
    flag = np.append(flags[ids], [0, 0])
    marks = np.flatnonzero(flag & (TERMINAL | CLOSING | QUOTE))  # few: all following arrays are short
    is_opening = (flag[marks] & QUOTE > 0) & (flag[marks + 1] & (TERMINAL | CLOSING | SPACED | BREAK) == 0)
    marks = marks[~is_opening]
    is_last_of_run = np.append(np.diff(marks) > 1, True)[: len(marks)]
    terminals_in_run = np.diff(np.cumsum(flag[marks] & TERMINAL > 0)[is_last_of_run], prepend=0)
    final = marks[is_last_of_run][terminals_in_run > 0]
    # a piece that is a space belongs to the word that starts with the next piece
    word = np.where(flag[final + 1] & LONE_SPACE > 0, flag[final + 2], flag[final + 1])
    ends = final[(flag[final + 1] & (SPACED | UNSPACED) > 0) & (word & LOWER == 0)]
    breaks = np.flatnonzero(flag & BREAK)
    breaks = breaks[breaks + 1 < len(ids)]
    is_end = (ids[breaks] == special_tokens.EOD) | (ids[breaks + 1] != special_tokens.EOD)  # <eop> <eod> is one end
    return np.append(np.union1d(ends, breaks[is_end]) + 1, len(ids))


def concatenate_documents(
    documents: Iterable[Iterable[list[int]]],
    line_type: LineType,
    flags: np.ndarray,
    line_end: int = special_tokens.EOP,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Concatenate encoded documents.

    <eod> follows each document, and `line_end` each line that is a paragraph. A newline also follows a line that is a sentence. Nothing is
    added to verbatim documents.

    Args:
        documents: token ids of each line of each document.
        line_type: see `Tokenizer.encode_documents`.
        flags: (V,) from `boundary_flags`.
        line_end: id of <eop>, or of the newline if the vocabulary has one.

    Returns:
        (N,) int64 token ids; (S,) int64 offset after each sentence; (documents,) int64 offset after each document. Offsets increase, and
        the last ones are N.
    """
    id_buffer, line_ends, document_ends = array("q"), [], []
    for document in documents:
        for line in document:
            id_buffer.fromlist(line)
            if line_type == "paragraphs" or (line_type == "sentences" and line_end != special_tokens.EOP):
                id_buffer.append(line_end)
            line_ends.append(len(id_buffer))
        if line_type != "verbatim":
            id_buffer.append(special_tokens.EOD)
        document_ends.append(len(id_buffer))
    ids = np.asarray(id_buffer)
    if line_type == "paragraphs":
        return ids, sentence_ends(ids, flags), np.array(document_ends)
    if line_type == "verbatim":
        return ids, np.union1d(sentence_ends(ids, flags), document_ends), np.array(document_ends)
    ends = np.array(line_ends, np.int64)
    ends = ends[(ends > 0) & (ids[ends] != special_tokens.EOD)]  # <eod> belongs to the last sentence
    ends = np.union1d(ends[ids[ends - 1] != special_tokens.EOD], document_ends)  # lines without tokens have no end
    return ids, ends, np.array(document_ends)


def _flags(piece: str, preprocess: Preprocess) -> int:
    categories = {unicodedata.category(character) for character in piece}
    flags = {
        TERMINAL: _without_closing_marks(piece).endswith(tuple(TERMINALS)),
        CLOSING: piece != "" and _without_closing_marks(piece) == "",
        QUOTE: categories == {"Pi"},
        LOWER: piece.removeprefix(WORD_BOUNDARY)[:1].islower() and preprocess != "uncased",
        LONE_SPACE: piece == WORD_BOUNDARY,
        SPACED: piece.startswith(WORD_BOUNDARY),
        UNSPACED: written_without_spaces(piece[:1]) or (not piece.isascii() and categories <= {"Ps", "Pi"}),
        BREAK: piece in (special_tokens.NEWLINE_PIECE, *special_tokens.SPECIAL_TOKENS[special_tokens.EOD :]),
    }
    return sum(flag for flag, is_set in flags.items() if is_set)


def _without_closing_marks(piece: str) -> str:
    """Return a piece without the quotes and brackets at its end."""
    while piece and (piece[-1] in "\"'" or unicodedata.category(piece[-1]) in ("Pe", "Pf")):
        piece = piece[:-1]
    return piece
