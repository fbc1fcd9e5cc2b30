"""Text that exists on every machine: the docstrings of the standard library and the installed packages."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

MIN_DOCUMENT_CHARS = 200
SKIPPED_FOLDERS = {"tests", "test", "site-packages", "_vendor", "idlelib", "lib2to3"}

# A string at the start of a file (after comments) or of a block. Parsing the file would be exact, but far slower.
_DOCSTRING = re.compile(r'''(?:\A(?:\s|#[^\n]*\n)*|:[ \t]*\n\s*)[rRuU]?("""|\'\'\')(.*?)\1''', re.DOTALL)


def read_docstrings() -> Iterator[list[str]]:
    """Yield one document per Python module: the paragraphs of its docstrings that are prose.

    Packages alternate, so that the first documents come from many of them. A paragraph that occurs in several modules is kept only in
    the first of these modules.
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
            paragraphs = [p for docstring in _docstrings(module) for p in _prose(docstring)]
            new = [p for p in paragraphs if hash(p) not in seen]
            seen.update(map(hash, new))
            if sum(map(len, new)) > MIN_DOCUMENT_CHARS:
                yield list(dict.fromkeys(new))


def _modules(entry: Path) -> Iterator[Path]:
    modules = [entry] if entry.is_file() else sorted(entry.rglob("*.py"))
    return (path for path in modules if not SKIPPED_FOLDERS.intersection(path.parts[len(entry.parts) - 1 :]))


def _docstrings(module: Path) -> Iterator[str]:
    try:
        source = module.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return  # not UTF-8, or removed in the meantime
    for match in _DOCSTRING.finditer(source):
        yield match[2]


def _prose(docstring: str) -> Iterator[str]:
    """Yield the paragraphs of a docstring that are sentences, not signatures, tables or interpreter sessions."""
    for block in re.split(r"\n\s*\n", docstring):
        text = " ".join(block.split())
        n_letters = sum(character.isalpha() or character == " " for character in text)
        is_code = ">>>" in text or "::" in text or "====" in text or "----" in text
        if not is_code and len(text) > 60 and text.count(" ") >= 8 and n_letters > 0.85 * len(text):
            yield text
