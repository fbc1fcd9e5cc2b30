"""Character offsets of the tokens of a text.

Cleaning, SentencePiece's normalization and the split of commas change, add and drop characters. The position of each character in the
original text is tracked through these steps. A character ends where the next one starts, so characters that leave no trace, such as a
removed accent, belong to the character before them.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from xlpre.text.preprocess import Preprocess
from xlpre.text.special_tokens import WORD_BOUNDARY

NO_POSITION = -1  # position of a piece that consists of a space
Positioned = list[tuple[str, int]]  # characters with their positions in the original text


@dataclass(frozen=True)
class TokenOffsets:
    """A text and the character offsets of its N tokens.

    Attributes:
        text: the original text.
        ids: (N,) token ids.
        starts: (N,) index of the first character of each token, non-decreasing. A token that is a space starts where the next token starts.
        ends: (N,) index after the last character of each token, without trailing spaces, non-decreasing. A token that is a space ends
            where the previous token ends.
    """

    text: str
    ids: list[int]
    starts: np.ndarray
    ends: np.ndarray

    def span_text(self, first: int, last: int) -> str:
        """Return the text from token `first` to token `last`. It is empty for a single token that is a space."""
        return self.text[self.starts[first] : self.ends[last]]

    def token_range(self, begin: int, end: int) -> tuple[int, int]:
        """Return the first and the last token that contain a character in [begin, end).

        If one character became several tokens, all of them contain it.
        """
        first = min(int(np.searchsorted(self.ends, begin, "right")), len(self.ids) - 1)
        return first, max(first, int(np.searchsorted(self.starts, end - 1, "right")) - 1)


def clean_text_with_offsets(text: str, preprocess: Preprocess) -> tuple[str, np.ndarray]:
    """Clean a text as `preprocess.clean_text` does, and return where each character of the result was in the original text.

    Returns:
        The cleaned text of n characters, and (n + 1,) int64 positions in the original text. The last one is the end of the text.
    """
    if preprocess == "none":
        return text, np.arange(len(text) + 1)
    characters = _without_accents(_with_quotes(_with_single_spaces(text)))
    cleaned = "".join(character for character, _ in characters)
    if preprocess == "uncased":
        cleaned = cleaned.lower()  # of the whole text: the lower case of a final sigma depends on its neighbors
        assert len(cleaned) == len(characters), "after NFKD, lower case changes no length"
    return cleaned, np.array([*(position for _, position in characters), len(text)])


def build_offsets(text: str, ids: list[int], extents: Sequence[tuple[int, int]], positions: np.ndarray) -> TokenOffsets:
    """Return the offsets of tokens.

    Args:
        text: the original text.
        ids: (N,) token ids.
        extents: first and last character of each token in the normalized text; both are NO_POSITION for a space.
        positions: (n + 1,) position in `text` of each of the n characters of the normalized text, then the end of `text`. Non-decreasing.
    """
    first, last = np.array(extents, np.int64).reshape(-1, 2).T
    has_text = first != NO_POSITION
    starts = positions[first[has_text]]
    # a token ends at the next character with another position: one character may have become several
    next_character = np.searchsorted(positions, positions[last[has_text]], "right")
    ends = np.append(positions, len(text))[next_character]
    for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
        while end > start and text[end - 1].isspace():
            end -= 1
        ends[index] = end
    n_with_text = np.cumsum(has_text)
    return TokenOffsets(
        text, ids, np.append(starts, len(text))[n_with_text - has_text], np.insert(ends, 0, 0)[n_with_text]
    )


def piece_extents(pieces: Iterable[Sequence[str]]) -> list[tuple[int, int]]:
    """Return the positions of the first and last character of each part of each piece in the normalized text. See `build_offsets`.

    Args:
        pieces: one sequence for each piece of the normalized text, in order: the piece, then the parts into which it was split.
    """
    extents: list[tuple[int, int]] = []
    begin = 0
    for piece, *parts in pieces:
        visible = [begin + i for i, character in enumerate(piece) if character != WORD_BOUNDARY]
        lengths = [len(part) - part.count(WORD_BOUNDARY) for part in parts]
        parts_match = sum(lengths) == len(
            visible
        )  # otherwise normalization changed the parts: each gets the whole piece
        n_used = 0
        for length in lengths:
            characters = visible[n_used : n_used + length] if parts_match else visible
            extents.append((characters[0], characters[-1]) if length and characters else (NO_POSITION, NO_POSITION))
            n_used += length
        begin += len(piece)
    return extents


def _with_single_spaces(text: str) -> Positioned:
    result: Positioned = []
    for position, character in enumerate(text):
        if not character.isspace():
            result.append((character, position))
        elif result and result[-1][0] != " ":
            result.append((" ", position))
    return result[:-1] if result and result[-1][0] == " " else result


def _with_quotes(characters: Positioned) -> Positioned:
    for quote in ("`", "'"):
        result: Positioned = []
        i = 0
        while i < len(characters):
            is_double = characters[i][0] == quote and i + 1 < len(characters) and characters[i + 1][0] == quote
            result.append(('"', characters[i][1]) if is_double else characters[i])
            i += 1 + is_double
        characters = result
    return characters


def _without_accents(characters: Positioned) -> Positioned:
    """Normalize each character alone. NFKD of the whole text differs only in the order of accents, which are removed."""
    return [
        (part, position)
        for character, position in characters
        for part in (character if character.isascii() else unicodedata.normalize("NFKD", character))
        if not unicodedata.combining(part)
    ]
