"""Where words begin and sentences end, as pieces of a vocabulary show it."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

import numpy as np

from xlpre.text import symbols
from xlpre.text.preprocess import Preprocess
from xlpre.text.symbols import SPACE

TERMINAL, CLOSING, LOWER, LONE_SPACE, BEGINS_WORD, BREAK = (1 << i for i in range(6))  # of a kind, see kinds_of


def starts_word(piece: str) -> bool:
    """Whether a piece begins a word, where a span may begin.

    Source: zihangdai/xlnet data_utils.py (space mark, '<', ASCII punctuation), and here also a script written without spaces, whose
    every piece begins one.
    """
    if piece.startswith((SPACE, "<")) or (len(piece) == 1 and piece in '!"#$%&()*+,-./:;?@[\\]^_`{|}~'):
        return True
    first = piece[:1]
    return first != "" and written_without_spaces(first)


def written_without_spaces(character: str) -> bool:
    """Han, kana, Thai, Lao, Khmer, Burmese, Tibetan: scripts that put no space between words."""
    name = unicodedata.name(character, "")
    return name.startswith(("CJK", "HIRAGANA", "KATAKANA", "BOPOMOFO", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN"))


def kinds_of(pieces: Iterable[str], preprocess: Preprocess) -> np.ndarray:
    """(V,) uint8, what each piece is at the end of a sentence: one look-up a token instead of five."""
    return np.array([_kind(piece, preprocess) for piece in pieces], np.uint8)


def sentence_ends(ids: np.ndarray, kinds: np.ndarray) -> np.ndarray:
    """Offsets after each sentence of encoded documents of paragraphs, the last one their end.

    A sentence ends at a terminal mark (and closing quotes or brackets) before a piece that begins a word and is not lower-case (in
    uncased text any such piece), and at the end of a paragraph or document.

    Args:
        ids: (N,) of the tokens.
        kinds: (V,) of the vocabulary, see kinds_of.
    """
    kind = kinds[ids]
    at = np.flatnonzero(kind & (TERMINAL | BREAK))  # few: the rest looks at these alone
    final, breaks = at[kind[at] & TERMINAL > 0], at[kind[at] & BREAK > 0]
    after = final[final + 1 < len(ids)] + 1
    final = np.union1d(final, after[kind[after] & CLOSING > 0])
    final = final[final + 2 < len(ids)]
    # a space of its own belongs to the word that begins in the next piece
    word = np.where(kind[final + 1] & LONE_SPACE > 0, kind[final + 2], kind[final + 1])
    ends = final[(kind[final + 1] & BEGINS_WORD > 0) & (word & LOWER == 0)]
    breaks = breaks[breaks + 1 < len(ids)]
    breaks = breaks[(ids[breaks] == symbols.EOD) | (ids[breaks + 1] != symbols.EOD)]  # <eop> <eod> is one end
    return np.append(np.union1d(ends, breaks) + 1, len(ids))


def _kind(piece: str, preprocess: Preprocess) -> int:
    marks = {
        TERMINAL: piece.endswith((".", "!", "?", "…", "。", "！", "？", "｡")),
        CLOSING: all(c in "\"')]»”’」』）" for c in piece),
        LOWER: piece.removeprefix(SPACE)[:1].islower() and preprocess != "uncased",  # where lower case says something
        LONE_SPACE: piece == SPACE,
        BEGINS_WORD: starts_word(piece),
        BREAK: piece in (symbols.PIECES[symbols.EOP], symbols.PIECES[symbols.EOD]),
    }
    return sum(mark for mark, is_so in marks.items() if is_so)
