"""Text as the released XLNet models read it: cleaned before SentencePiece, commas split from numbers after it.

Source: zihangdai/xlnet prepro_utils.py, `preprocess_text` and `encode_pieces`.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable
from typing import Literal

from xlpre.text.special_tokens import WORD_BOUNDARY

Preprocess = Literal["none", "cased", "uncased"]


def prepared(text: str, preprocess: Preprocess) -> str:
    """`text` as a vocabulary with this `preprocess` wants it."""
    return text if preprocess == "none" else preprocess_text(text, lower=preprocess == "uncased")


def preprocess_text(text: str, lower: bool = False, remove_space: bool = True, keep_accents: bool = False) -> str:
    """Clean one text.

    Args:
        text: any text.
        lower: make it lower-case.
        remove_space: single spaces between words and none at the ends.
        keep_accents: leave accents; else they go, and compatibility forms (fi as one letter, a half) are taken apart.

    Returns:
        The text, in which double back-ticks and double apostrophes are now quotation marks.
    """
    if remove_space:
        text = " ".join(text.split())
    for quote in ("``", "''"):
        text = text.replace(quote, '"')
    if not keep_accents:
        text = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    return text.lower() if lower else text


def all_split_after_digits(pieces: Iterable[str], encode: Callable[[str], list[str]]) -> list[str]:
    """Pieces as they are read, see split_after_digits."""
    found: list[str] = []
    for piece in pieces:
        if piece[-1:] == ",":  # few: the rest is not worth a call
            found += split_after_digits(piece, encode)
        else:
            found.append(piece)
    return found


def split_after_digits(piece: str, encode: Callable[[str], list[str]]) -> list[str]:
    """A piece as it is read: a comma after a digit is a piece of its own ("20," is "20" and ",").

    Args:
        piece: of a text.
        encode: text to pieces; what stood before such a comma is encoded anew.
    """
    if piece[-1:] != "," or not piece[-2:-1].isdigit():
        return [piece]
    first, *rest = encode(piece[:-1].replace(WORD_BOUNDARY, ""))
    if not piece.startswith(WORD_BOUNDARY):  # SentencePiece put a space before the number
        first = first.removeprefix(WORD_BOUNDARY)
    return [first, *rest, ","] if first else [*rest, ","]
