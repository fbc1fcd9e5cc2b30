"""What a vocabulary was learned from, kept beside its model file, NAME.model, as NAME.model.json.

Of files only names and sizes, so that folders can be moved, and no more of the settings than a vocabulary depends on. A vocabulary made
elsewhere, or before there was such a file, says nothing.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

from xlpre.common.files import write_text
from xlpre.text.corpus import TextConfig, files
from xlpre.text.tokenizer import Tokenizer
from xlpre.text.tokenizer_config import TokenizerConfig

SETTINGS = {"text": ("column", "rows", "split", "max_chars"), "tokenizer": ("train_chars", "preprocess")}


def beside(path: Path) -> Path:
    """The file that says what the vocabulary `path` was learned from."""
    return path.with_name(f"{path.name}.json")


def write_learned(path: Path, vocabulary: Tokenizer, text: TextConfig, config: TokenizerConfig) -> None:
    """Say that `vocabulary`, saved as `path`, was learned from `text`."""
    said = {"sha256": vocabulary.sha256, **_facts(text, config)}
    write_text(beside(path), json.dumps(said, indent=1))


def check_learned(path: Path, vocabulary: Tokenizer, text: TextConfig, config: TokenizerConfig) -> None:
    """Raise ValueError if `vocabulary`, which is in `path`, says that it was learned from something else than `text`."""
    was = _said(path)
    if was.get("sha256") != vocabulary.sha256:  # nothing is said, or of another vocabulary
        return
    now = _facts(text, config)
    odd = next((key for key in now if key in was and was[key] != now[key]), None)
    if odd is None:
        return
    if odd == "sources":
        then, wanted = (Counter(map(tuple, facts[odd])) for facts in (was, now))
        parts = {"with": then - wanted, "without": wanted - then}
        how = " and ".join(f"{word} {_shown(sorted(part, key=str))}" for word, part in parts.items() if part)
        what = f"another text than text.source={' '.join(text.sources)}, one {how}"
    else:
        before, asked = ("null" if facts[odd] is None else facts[odd] for facts in (was, now))
        what = f"text with {odd}={before}, not {asked}"
    raise ValueError(
        f"{path} was learned from {what}; set another tokenizer.path, delete the file to learn it anew, or delete {beside(path)} to "
        "take it as it is"
    )


def _shown(entries: list[tuple[str, int | None]]) -> str:
    name, size = entries[0]
    bytes_of = "" if size is None else f" ({size:,} bytes)"
    rest = len(entries) - 1
    return f"{name}{bytes_of}" + (f" and {rest} more" if rest else "")


def _said(path: Path) -> dict[str, Any]:
    try:
        said = json.loads(beside(path).read_text("utf-8"))
    except (OSError, ValueError):  # there is none, or it is something else's
        return {}
    return said if isinstance(said, dict) else {}


def _facts(text: TextConfig, config: TokenizerConfig) -> dict[str, Any]:
    """What a vocabulary depends on, as JSON has it: a source that is no files by its name."""
    sources: list[list[Any]] = []
    for source in text.sources:
        found = files(dataclasses.replace(text, source=source, mixture={}))
        sources += [[Path(name).name, size] for name, size in found.items()] or [[source, None]]
    return {
        "sources": sorted(sources, key=str),
        **{f"text.{key}": getattr(text, key) for key in SETTINGS["text"]},
        **{f"tokenizer.{key}": getattr(config, key) for key in SETTINGS["tokenizer"]},
    }
