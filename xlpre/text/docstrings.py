"""Text that is always there: the docstrings of the standard library and the installed packages, as prose."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path


def docstrings() -> Iterator[list[str]]:
    """One document a Python module of the standard library and the installed packages: its docstrings, as prose.

    Packages take turns, so that a bounded read sees many of them; a paragraph is taken where it first stands.
    """
    roots = {Path(sysconfig.get_path(kind)) for kind in ("stdlib", "purelib", "platlib")}
    packages = {entry for root in roots for entry in root.iterdir() if entry.is_dir() or entry.suffix == ".py"}
    queues = [_modules(entry) for entry in sorted(packages - roots, key=lambda entry: entry.name)]
    seen: set[int] = set()
    while queues:
        for queue in list(queues):
            module = next(queue, None)
            if module is None:
                queues.remove(queue)
                continue
            document = [p for text in _texts(module) for p in _prose(text)]
            fresh = [p for p in document if hash(p) not in seen]
            seen.update(map(hash, fresh))
            if sum(map(len, fresh)) > 200:
                yield list(dict.fromkeys(fresh))


def _modules(entry: Path) -> Iterator[Path]:
    found = [entry] if entry.is_file() else sorted(entry.rglob("*.py"))
    skipped = {"tests", "test", "site-packages", "_vendor", "idlelib", "lib2to3"}
    return (path for path in found if not skipped.intersection(path.parts[len(entry.parts) - 1 :]))


# a string that opens a file (after comments) or a block; parsing the file would be exact and far slower
_DOCSTRING = re.compile(r'''(?:\A(?:\s|#[^\n]*\n)*|:[ \t]*\n\s*)[rRuU]?("""|\'\'\')(.*?)\1''', re.DOTALL)


def _texts(module: Path) -> Iterator[str]:
    try:
        source = module.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return  # another encoding, or gone: nothing is owed to this source
    for match in _DOCSTRING.finditer(source):
        yield match[2]


def _prose(docstring: str) -> Iterator[str]:
    """The paragraphs of a docstring that read as English: words, not signatures, tables or sessions."""
    for block in re.split(r"\n\s*\n", docstring):
        text = " ".join(block.split())
        letters = sum(character.isalpha() or character == " " for character in text)
        code = ">>>" in text or "::" in text or "====" in text or "----" in text
        if not code and len(text) > 60 and text.count(" ") >= 8 and letters > 0.85 * len(text):
            yield text
