"""Recorded numbers of the original implementations ("goldens"), selected for parametrized tests."""

import os
from pathlib import Path

import pytest

GOLDENS = Path(os.environ.get("XLPRE_GOLDENS", Path(__file__).parents[3] / "shared" / "goldens"))


def files(pattern: str) -> list:
    """Return a test parameter for each file or folder in GOLDENS that matches `pattern`, or one skipped parameter."""
    paths = sorted(GOLDENS.glob(pattern)) if GOLDENS.is_dir() else []
    if not paths:
        return [pytest.param(None, marks=pytest.mark.skip(reason=f"no {pattern} in {GOLDENS}; set XLPRE_GOLDENS"))]
    prefix = pattern.partition("*")[0]
    return [pytest.param(path, id=path.stem.removeprefix(prefix) or path.stem) for path in paths]
