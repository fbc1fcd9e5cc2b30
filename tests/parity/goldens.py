"""Where the numbers of the originals are, and which of them a test takes."""

import os
from pathlib import Path

import pytest

GOLDENS = Path(os.environ.get("XLPRE_GOLDENS", Path(__file__).parents[3] / "shared" / "goldens"))


def files(pattern: str, outside: dict[str, str] | None = None) -> list:
    """Parameters for each golden file; those in `outside` (by the end of their name) are skipped with their reason."""
    found = sorted(GOLDENS.glob(pattern)) if GOLDENS.is_dir() else []
    if not found:
        return [pytest.param(None, marks=pytest.mark.skip(reason=f"no {pattern} in {GOLDENS}; set XLPRE_GOLDENS"))]
    prefix = pattern.partition("*")[0]
    parameters = []
    for path in found:
        name = path.stem.removeprefix(prefix)
        reason = (outside or {}).get(name)
        marks = [pytest.mark.skip(reason=reason)] if reason else []
        parameters.append(pytest.param(path, id=name or path.stem, marks=marks))
    return parameters
