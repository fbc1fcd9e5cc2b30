"""Numbers and values in messages."""

import json
from typing import Any


def counted(n: int, noun: str) -> str:
    """Return a number and a noun, in the plural unless the number is 1: `1 process`, `2 processes`."""
    ending = "" if n == 1 else "es" if noun.endswith(("s", "ch", "x")) else "s"
    return f"{n:,} {noun}{ending}"


def as_yaml(value: Any) -> str:
    """Return the value of a setting as a user writes it on a command line: `null` for None, `true` for True, `[a,b]` for a list."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(as_yaml, value))}]"
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)
