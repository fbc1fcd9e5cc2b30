"""Blanks: missing words of a text that a model fills in, written as three or more underscores."""

from __future__ import annotations

import re

BLANK = "____"
BLANK_PATTERN = "_{3,}"  # two underscores are part of many names in code, such as __init__


def has_blank(text: str) -> bool:
    """Return True if `text` contains a blank."""
    return re.search(BLANK_PATTERN, text) is not None
