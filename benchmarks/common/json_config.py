"""The `--config` of benchmarks that take one in JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def configured(given: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`defaults`, with what JSON, or a file of it, says otherwise; a key that is none of theirs ends the command with a sentence."""
    try:
        named = json.loads(given if given.lstrip().startswith("{") else Path(given).read_text("utf-8"))
        if not isinstance(named, dict):
            raise ValueError("it holds no object, as {} is one")
    except (OSError, ValueError) as error:
        raise SystemExit(f"--config {given}: cannot be read as JSON, or as a file of it: {error}") from None
    if unknown := named.keys() - defaults.keys():
        raise SystemExit(f"--config: {', '.join(sorted(unknown))}: no such key; there are {', '.join(defaults)}")
    return {**defaults, **named}
