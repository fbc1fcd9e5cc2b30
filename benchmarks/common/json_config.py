"""The `--config` option of benchmarks that read a JSON configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xlpre.common.errors import InputError

KINDS = {bool: "true or false", int: "an integer", float: "a number", str: "text"}


def read_json_config(text: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return `defaults`, updated by a JSON object.

    Args:
        text: the object, or the path of its file.
        defaults: values by key. A value of the object must have the type of its default.

    Raises:
        InputError: the file cannot be read, the text is not a JSON object, a key does not exist, or a value has another type.
    """
    try:
        config = json.loads(text if text.lstrip().startswith("{") else Path(text).read_text("utf-8"))
        if not isinstance(config, dict):
            raise InputError("it is not a JSON object")
    except (OSError, ValueError) as error:
        raise InputError(f"--config={text} is invalid: {error}. Pass a JSON object, or a file with one.") from None
    for key, value in config.items():
        if key not in defaults:
            raise InputError(f"{key}={value} is invalid: --config has no such key. Its keys are {', '.join(defaults)}.")
        kind = type(defaults[key])
        is_number = kind is float and type(value) is int
        if type(value) is not kind and not is_number:
            raise InputError(f"{key}={json.dumps(value)} is invalid: it must be {KINDS[kind]}.")
    return {**defaults, **config}
