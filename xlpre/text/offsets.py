"""Where in a text its tokens stand, to the character, whatever was done to the text before it was cut into pieces.

Cleaning, SentencePiece's normalization and the cutting of numbers from commas change, add and drop characters. What is followed
through all of them is where each character began; it ends where the next one begins, so that characters that left no trace (a combining
accent) go with the one before them.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from xlpre.text.preprocess import Preprocess
from xlpre.text.special_tokens import WORD_BOUNDARY

NOWHERE = -1  # of a piece that is a space and nothing else


@dataclass(frozen=True)
class TokenOffsets:
    """A text and its N tokens.

    Attributes:
        text: as it was given.
        ids: (N,) of the tokens.
        begins: (N,) never falling, the character at which each token begins; of a space alone, that of the token after it.
        ends: (N,) never falling, the character after it, without spaces; of a space alone, that of the token before it.
    """

    text: str
    ids: list[int]
    begins: np.ndarray
    ends: np.ndarray

    def stretch(self, first: int, last: int) -> str:
        """The characters from token `first` to token `last`; none between a space and itself."""
        return self.text[self.begins[first] : self.ends[last]]

    def tokens(self, begin: int, end: int) -> tuple[int, int]:
        """The first and the last token of the characters [begin, end): no others hold any of them.

        Where one character became several tokens, it is all of them.
        """
        first = min(int(np.searchsorted(self.ends, begin, "right")), len(self.ids) - 1)
        return first, max(first, int(np.searchsorted(self.begins, end - 1, "right")) - 1)


def prepared_and_located(text: str, preprocess: Preprocess) -> tuple[str, np.ndarray]:
    """What preprocess.prepared makes of a text, and where each of its n characters began.

    Returns:
        The text, and (n + 1,) int64 places in the one that was given; the last is its end.
    """
    if preprocess == "none":
        return text, np.arange(len(text) + 1)
    kept = _without_accents(_with_quotes(_with_single_spaces(text)))
    cleaned = "".join(character for character, _ in kept)
    if preprocess == "uncased":
        cleaned = cleaned.lower()  # as a whole: a final sigma is another letter
        assert len(cleaned) == len(kept), "of what NFKD leaves, no letter becomes two"
    return cleaned, np.array([*(begin for _, begin in kept), len(text)])


def located(text: str, ids: list[int], extents: Sequence[tuple[int, int]], places: np.ndarray) -> TokenOffsets:
    """Tokens with their stretches.

    Args:
        text: as it was given.
        ids: (N,) of its tokens.
        extents: of each the first and the last character of the normalized text, NOWHERE for those that have none.
        places: (n + 1,) never falling, where in `text` each of the n characters of the normalized text began, and its end.
    """
    first, last = np.array(extents, np.int64).reshape(-1, 2).T
    of_text = first != NOWHERE
    begins = places[first[of_text]]
    # what follows is the first character that began elsewhere than the last one, which may have become several
    following = np.searchsorted(places, places[last[of_text]], "right")
    ends = np.append(places, len(text))[following]
    for number, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        while end > begin and text[end - 1].isspace():
            end -= 1
        ends[number] = end
    before = np.cumsum(of_text)  # tokens with text, up to and with each
    return TokenOffsets(text, ids, np.append(begins, len(text))[before - of_text], np.insert(ends, 0, 0)[before])


def extents_of(pieces: Iterable[Sequence[str]]) -> list[tuple[int, int]]:
    """Of each piece the numbers of its first and last character in the normalized text, or NOWHERE twice.

    Args:
        pieces: of the normalized text, one after another; each with the pieces that are read in its place.
    """
    found: list[tuple[int, int]] = []
    begin = 0
    for whole, *parts in pieces:
        visible = [begin + number for number, character in enumerate(whole) if character != WORD_BOUNDARY]
        lengths = [len(part) - part.count(WORD_BOUNDARY) for part in parts]
        known = sum(lengths) == len(visible)  # else it was normalized once more, and otherwise: each part gets all
        taken = 0
        for length in lengths:
            own = visible[taken : taken + length] if known else visible
            found.append((own[0], own[-1]) if length and own else (NOWHERE, NOWHERE))
            taken += length
        begin += len(whole)
    return found


def _with_single_spaces(text: str) -> list[tuple[str, int]]:
    kept: list[tuple[str, int]] = []
    for place, character in enumerate(text):
        if not character.isspace():
            kept.append((character, place))
        elif kept and kept[-1][0] != " ":
            kept.append((" ", place))
    return kept[:-1] if kept and kept[-1][0] == " " else kept


def _with_quotes(kept: list[tuple[str, int]]) -> list[tuple[str, int]]:
    for quote in ("`", "'"):
        found: list[tuple[str, int]] = []
        number = 0
        while number < len(kept):
            double = kept[number][0] == quote and number + 1 < len(kept) and kept[number + 1][0] == quote
            found.append(('"', kept[number][1]) if double else kept[number])
            number += 1 + double
        kept = found
    return kept


def _without_accents(kept: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Letter by letter is as good as all at once: only accents would change places, and they go."""
    return [
        (part, place)
        for character, place in kept
        for part in (character if character.isascii() else unicodedata.normalize("NFKD", character))
        if not unicodedata.combining(part)
    ]
