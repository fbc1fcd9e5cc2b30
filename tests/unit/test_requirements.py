"""The versions that pyproject.toml allows are those that the tests run with."""

import re

import pytest
from packaging.requirements import Requirement

from tests.conftest import REPOSITORY


def requirements(text: str) -> dict[str, Requirement]:
    """Return the requirements among the lines of a file, by name."""
    lines = re.findall(r'^[\s"]*([\w-]+[=><][^";\s]*)', text, re.MULTILINE)
    return {requirement.name: requirement for requirement in map(Requirement, lines)}


ALLOWED = requirements((REPOSITORY / "pyproject.toml").read_text())
TESTED = requirements((REPOSITORY / "constraints.txt").read_text())


@pytest.mark.parametrize("name", sorted(ALLOWED.keys() & TESTED.keys()))
def test_the_installed_version_is_allowed(name):
    (version,) = TESTED[name].specifier
    assert version.version in ALLOWED[name].specifier


@pytest.mark.parametrize(
    ("name", "allowed", "untested"),
    [
        ("torch", ["2.11.0", "2.13.0"], "2.14.0"),
        ("deepspeed", ["0.19.8", "0.19.9"], "0.20.0"),  # checkpoints use private functions of it
        ("sentencepiece", ["0.2.1", "0.2.2"], "0.2.3"),  # another vocabulary and other tokens
    ],
)
def test_untested_versions_that_change_numbers_or_private_functions_are_not_installed(name, allowed, untested):
    assert all(version in ALLOWED[name].specifier for version in allowed)
    assert untested not in ALLOWED[name].specifier
