"""Counts in messages."""


def counted(n: int, noun: str) -> str:
    """Return a number and a noun, in the plural unless the number is 1: `1 process`, `2 processes`."""
    ending = "" if n == 1 else "es" if noun.endswith(("s", "ch", "x")) else "s"
    return f"{n:,} {noun}{ending}"
