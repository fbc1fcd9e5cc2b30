"""The text of the project: links resolve, docstrings and documents avoid a list of phrases, and spelling is checked."""

import ast
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from finetune.config import FinetuneConfig
from pretrain.config import PretrainConfig
from tests.conftest import REPOSITORY
from xlpre.config.schema_docs import setting_keys

FILES = [
    REPOSITORY / name
    for name in subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    if (REPOSITORY / name).is_file()
]
PAGES = [path for path in FILES if path.suffix == ".md"]
SOURCES = [path for path in FILES if path.suffix == ".py" and path != Path(__file__)]

# Phrases that a reader has to read twice. Each has a plain alternative: see "Conventions" in CONTRIBUTING.md.
PHRASES = re.compile(
    r"\b(one's own|so many|as many as there|so-manieth|anew|is none of|is no number|no number|none of these|whoever|"
    r"what is met|what was met|is told|are told|says so|say so|goes on|go on from|went on|gone on|lets? go of|"
    r"of before|hand(?:s|ed)? back|stands? (?:at|beside) |by itself alone|at hand|besides;|nothing at all|"
    r"word frequencies|held-out loss|passport|a stretch of|the way out|to the letter)\b",
    re.IGNORECASE,
)
OPENINGS = re.compile(r"(What|Whether|How|Where|Which|Who|Of|As|The same|That of|See)\b")


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of the docstrings of a module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield node.body[0].lineno, docstring


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of the comments of a module."""
    with open(path, "rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string


def test_links_of_the_documents_resolve():
    broken = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            path, _, anchor = target.partition("#")
            if re.match(r"[a-z]+:", path):
                continue
            linked = (page.parent / path).resolve() if path else page
            if not linked.exists():
                broken.append(f"{page.relative_to(REPOSITORY)}: {target}")
            elif anchor and anchor not in anchors(linked):
                broken.append(f"{page.relative_to(REPOSITORY)}: no heading for {target}")
    assert not broken, "\n".join(broken)


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_paths_that_documents_and_docstrings_name_exist():
    pattern = re.compile(
        r"(?<![\w/.])((?:xlpre|pretrain|finetune|configs|docs|benchmarks|tests|reports)/[a-z0-9_./]+\.(?:py|md|yaml|cpp|sh))\b"
    )
    missing = []
    texts = [(page, page.read_text()) for page in PAGES if page.name != "CHANGELOG.md"]
    texts += [(path, path.read_text()) for path in SOURCES]
    for path, text in texts:
        missing += [
            f"{path.relative_to(REPOSITORY)}: {name}"
            for name in pattern.findall(text)
            if not (REPOSITORY / name).exists()
        ]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("folder", ["xlpre", "pretrain", "finetune", "tests", "benchmarks", "docs"])
def test_docstrings_and_comments_use_plain_phrases(folder):
    found = []
    for path in SOURCES:
        if path.relative_to(REPOSITORY).parts[0] != folder:
            continue
        name = path.relative_to(REPOSITORY)
        for line, text in docstrings(path):
            if OPENINGS.match(text) and folder != "tests":
                found.append(f"{name}:{line}: opens with {text.split()[0]!r}: {text.splitlines()[0]}")
            found += [f"{name}:{line}: {match[0]!r}" for match in PHRASES.finditer(text)]
        found += [f"{name}:{line}: {match[0]!r}" for line, text in comments(path) for match in PHRASES.finditer(text)]
    assert not found, f"{len(found)}\n" + "\n".join(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_documents_use_plain_phrases(page):
    found = [match[0] for match in PHRASES.finditer(page.read_text())]
    assert not found, found


def test_settings_that_the_documents_name_exist():
    known = {*setting_keys(PretrainConfig), *setting_keys(FinetuneConfig)}
    groups = "|".join(sorted({key.partition(".")[0] for key in known if "." in key}))
    pattern = re.compile(rf"(?<![\w./])((?:{groups})\.[a-z_0-9]+)=")
    pages = [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")]
    unknown = [f"{page.name}: {key}" for page in pages for key in pattern.findall(page.read_text()) if key not in known]
    assert not unknown, unknown
