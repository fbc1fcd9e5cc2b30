"""Text cleaning of the released XLNet models: cleaning before SentencePiece, and splitting of commas after digits.

Source: zihangdai/xlnet prepro_utils.py, `preprocess_text` and `encode_pieces`.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable
from typing import Literal

from xlpre.text.special_tokens import WORD_BOUNDARY

Preprocess = Literal["none", "cased", "uncased"]


def clean_text(text: str, preprocess: Preprocess) -> str:
    """Return `text` cleaned as for a vocabulary that was trained with this `preprocess`."""
    return text if preprocess == "none" else preprocess_text(text, lower=preprocess == "uncased")


def preprocess_text(text: str, lower: bool = False, remove_space: bool = True, keep_accents: bool = False) -> str:
    """Clean `text` as for the released XLNet models. Double backticks and double apostrophes become quotation marks.

    Args:
        text: any text.
        lower: convert to lower case.
        remove_space: collapse white space to single spaces and strip the ends.
        keep_accents: keep accents. False: they are removed after NFKD, which also splits ligatures and other compatibility forms.
    """
    if remove_space:
        text = " ".join(text.split())
    for quote in ("``", "''"):
        text = text.replace(quote, '"')
    if not keep_accents and not text.isascii():
        text = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    return text.lower() if lower else text


def split_commas_after_digits(pieces: Iterable[str], encode: Callable[[str], list[str]]) -> list[str]:
    """Apply `split_comma_after_digit` to all pieces of a text."""
    result: list[str] = []
    for piece in pieces:
        if piece[-1:] == ",":  # rare: a call for every piece would be slow
            result += split_comma_after_digit(piece, encode)
        else:
            result.append(piece)
    return result


def ends_with_number_and_comma(piece: str) -> bool:
    """Return True if a piece ends with a comma after a digit."""
    return piece[-1:] == "," and piece[-2:-1].isdigit()


def split_comma_after_digit(piece: str, encode: Callable[[str], list[str]]) -> list[str]:
    """Split off a comma after a digit at the end of a piece: "20," becomes "20" and ",".

    Args:
        piece: a piece of a text.
        encode: encodes a text as pieces. It is called for the number without its comma.
    """
    if not ends_with_number_and_comma(piece):
        return [piece]
    first, *rest = encode(piece[:-1].replace(WORD_BOUNDARY, ""))
    if not piece.startswith(WORD_BOUNDARY):  # `encode` adds a space before the number
        first = first.removeprefix(WORD_BOUNDARY)
    return [first, *rest, ","] if first else [*rest, ","]
