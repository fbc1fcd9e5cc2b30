"""The passport of a saved folder: what made it, so that a wrong vocabulary or an unknown origin is noticed."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, get_args

from xlpre.text import special_tokens
from xlpre.text.preprocess import Preprocess
from xlpre.text.tokenizer import Tokenizer

FILE = "passport.json"
PACKAGES = ("xlpre", "torch", "deepspeed", "sentencepiece", "numpy")


def write(path: Path, tokenizer: Tokenizer, facts: Mapping[str, Any]) -> None:
    """Write passport.json into the folder `path`: `facts`, and vocabulary, special ids, revision and versions."""
    content = {
        **facts,
        "vocabulary_sha256": tokenizer.sha256,
        "preprocess": tokenizer.preprocess,
        "special_ids": {piece: number for number, piece in enumerate(special_tokens.PIECES)},
        "revision": revision(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
    }
    (path / FILE).write_text(json.dumps(content, indent=1), encoding="utf-8")


def read(path: Path) -> dict[str, Any] | None:
    """The passport of the folder `path`, None if it has none.

    Raises:
        ValueError: one that cannot be read.
    """
    try:
        content = json.loads((path / FILE).read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path / FILE}: cannot be read: {error}") from None
    known = isinstance(content, dict) and isinstance(content.get("vocabulary_sha256"), str)
    if not known or content.get("preprocess") not in get_args(Preprocess):
        raise ValueError(f"{path / FILE}: not a passport: it must have vocabulary_sha256 and preprocess")
    return content


def check_vocabulary(path: Path, passport: Mapping[str, Any], tokenizer: Tokenizer) -> None:
    """Raise ValueError unless `tokenizer` is the vocabulary that the folder `path` was saved with."""
    if tokenizer.sha256 != passport["vocabulary_sha256"]:
        raise ValueError(
            f"{path}/spiece.model (sha256 {tokenizer.sha256[:12]}) is not the vocabulary that the model was saved with "
            f"({passport['vocabulary_sha256'][:12]}); put that one back"
        )


@cache
def revision() -> str | None:
    """The git revision of this code as it was when first asked, with a mark if it was changed; None outside a checkout."""
    folder = Path(__file__).parents[2]
    if not (folder / ".git").exists():
        return None
    try:
        answer = subprocess.run(
            ["git", "-C", str(folder), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
