"""JSON objects from files of the user, with error messages that explain common mistakes."""

from __future__ import annotations

import json
import re
from typing import Any

from xlpre.common.errors import InputError

SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")  # escape of half of a character outside 16 bits


def parse_object(text: str, location: str, is_line: bool = True) -> dict[str, Any]:
    """Return the JSON object in a text. Error messages start with `location`.

    Args:
        text: the text.
        location: file, and line if there are several objects.
        is_line: True if the file must have one object per line.

    Raises:
        InputError: the text is not a JSON object, or contains an unpaired surrogate.
    """
    try:
        value = json.loads(text)
        if SURROGATE_ESCAPE.search(text):
            json.dumps(value, ensure_ascii=False).encode()  # fails for unpaired surrogates
    except json.JSONDecodeError as error:
        is_truncated = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated")
        remedy = (
            ((is_line and _jsonl_remedy(text)) or " The JSON text is truncated. Complete it, or download it again.")
            if is_truncated
            else ""
        )
        raise InputError(f"{location}: not JSON ({error.msg} at character {error.pos}).{remedy}") from None
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise InputError(f"{location}: {half} is an unpaired surrogate, half of a character. Remove it.") from None
    except (RecursionError, ValueError) as error:  # very deep nesting, or a number with thousands of digits
        raise InputError(
            f"{location}: cannot be read as JSON ({str(error).partition(';')[0]}). Correct or remove it."
        ) from None
    if not isinstance(value, dict):
        is_list_of_objects = value and isinstance(value, list) and isinstance(value[0], dict)
        remedy = _jsonl_remedy(text) if is_line and is_list_of_objects else ""
        raise InputError(f"{location}: must be a JSON object, not a {type(value).__name__}.{remedy}")
    return value


def _jsonl_remedy(line: str) -> str:
    """Return how to convert a file to JSON lines if `line` looks like the start of a JSON document, else an empty string."""
    start = line.strip()
    if not start.startswith("[") and start != "{":
        return ""
    jq_filter = "'.[]'" if start.startswith("[") else "."
    return (
        f" The file is one JSON document, but must have one object per line. Convert it: jq -c {jq_filter} FILE > NEW"
    )
