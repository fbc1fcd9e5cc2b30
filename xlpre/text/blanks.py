"""Blanks: missing words of a text that a model fills in.

____        one piece of the vocabulary; three or more underscores
____{3}     three pieces
____{1,4}   one to four pieces
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from xlpre.common.errors import InputError

BLANK = "____"
# two underscores are part of many names in code, such as __init__
_PATTERN = re.compile(r"_{3,}(?P<length>\{ *(?P<shortest>\d+) *(?:, *(?P<longest>\d+) *)?\}|\{[^}\s]*\}?)?")


@dataclass(frozen=True)
class Blank:
    """A blank in a text.

    Attributes:
        start: index of its first character.
        end: index after its last character.
        shortest: smallest number of pieces.
        longest: largest number of pieces.
        has_length: True if the number of pieces is written.
    """

    start: int
    end: int
    shortest: int
    longest: int
    has_length: bool


def has_blank(text: str) -> bool:
    """Return True if `text` contains a blank."""
    return _PATTERN.search(text) is not None


def find_blanks(text: str) -> Iterator[Blank]:
    """Yield the blanks of a text.

    Raises:
        InputError: the number of pieces of a blank is malformed.
    """
    for match in _PATTERN.finditer(text):
        shortest = int(match["shortest"] or (0 if match["length"] else 1))
        longest = int(match["longest"] or shortest)
        if not 1 <= shortest <= longest:
            raise InputError(
                f"{match[0]} is invalid: the number of pieces of a blank is at least 1, or an increasing range. "
                f"Write {BLANK}{{3}} or {BLANK}{{1,4}}."
            )
        yield Blank(*match.span(), shortest, longest, bool(match["length"]))
