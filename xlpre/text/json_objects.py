"""JSON objects in texts that others wrote; what is wrong with one is said in a sentence."""

from __future__ import annotations

import json
import re
from typing import Any

HALF = re.compile(r"\\u[dD][89a-fA-F]")  # perhaps


def parse_object(text: str, place: str) -> dict[str, Any]:
    """The JSON object in a text.

    Raises:
        ValueError: it is none.
    """
    try:
        found = json.loads(text)
        if HALF.search(text):  # half of a pair of surrogates is no character; a whole pair is
            json.dumps(found, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        ends = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated")
        way_out = _spread(text) or "; it ends early: complete it, or get it anew" if ends else ""
        raise ValueError(f"{place}: not JSON ({error.msg} at character {error.pos}){way_out}") from None
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise ValueError(f"{place}: {half} is half a character, which cut texts end in; remove it") from None
    except (RecursionError, ValueError) as error:  # lists in lists in lists, a number of thousands of digits
        raise ValueError(f"{place}: not JSON that can be read ({str(error).partition(';')[0]})") from None
    if not isinstance(found, dict):
        way_out = _spread(text) if found and isinstance(found, list) and isinstance(found[0], dict) else ""
        raise ValueError(f"{place}: a JSON object is needed, not a {type(found).__name__}{way_out}")
    return found


def _spread(line: str) -> str:
    """What to do about a line which opens a document that was to be one object a line."""
    opened = line.strip()
    if not opened.startswith("[") and opened != "{":
        return ""
    words = "'.[]'" if opened.startswith("[") else "."
    return f"; one JSON document holds all objects, where each line is to be one: jq -c {words} FILE > NEW writes it so"
