"""The `--config` option of benchmarks that read a JSON configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xlpre.common.errors import InputError


def read_json_config(text: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return `defaults`, updated by a JSON object. `text` is the object or the path of its file. Invalid input ends the command."""
    try:
        config = json.loads(text if text.lstrip().startswith("{") else Path(text).read_text("utf-8"))
        if not isinstance(config, dict):
            raise InputError("it is not a JSON object")
    except (OSError, ValueError) as error:
        raise SystemExit(f"--config={text} is invalid: {error}. Pass a JSON object, or a file with one.") from None
    if unknown := config.keys() - defaults.keys():
        raise SystemExit(
            f"--config is invalid: it has the unknown keys {', '.join(sorted(unknown))}. Known keys: {', '.join(defaults)}."
        )
    return {**defaults, **config}
