"""`--help` of every command: short, with examples that parse, and a page to read more."""

import importlib
import re
import shlex
import sys

import pytest

from tests.conftest import REPOSITORY
from xlpre.config.cli import SettingsParser

COMMANDS = sorted(
    str(file.relative_to(REPOSITORY))
    for folder in ("pretrain", "finetune")
    for file in (REPOSITORY / folder).glob("*.py")
    if "__main__" in file.read_text()
)
assert {"pretrain/run.py", "finetune/run.py", "finetune/predict.py"} <= {*COMMANDS}
MAX_LINES = 90


def build_parser(command):
    return importlib.import_module(command.removesuffix(".py").replace("/", ".")).build_parser()


def read_examples(command):
    """Return the arguments of the examples in the docstring of a command."""
    docstring = importlib.import_module(command.removesuffix(".py").replace("/", ".")).__doc__
    examples = docstring.partition("Examples:\n")[2].partition("\n\n")[0].splitlines()
    return [line.strip() for line in examples]


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(REPOSITORY)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_a_terminal_and_names_options_examples_and_an_existing_page(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", [command, "--help"])
    parser = build_parser(command)
    with pytest.raises(SystemExit) as end:
        parser.parse()
    captured = capsys.readouterr()
    assert not end.value.code and not captured.err
    assert captured.out.startswith(f"usage: {command} ") and len(captured.out.splitlines()) < MAX_LINES
    assert all(option in captured.out for option in parser._option_string_actions if option != "--local_rank")
    pages = re.findall(r"docs/\w+\.md|README\.md", captured.out)
    assert pages and all((REPOSITORY / page).exists() for page in pages), pages


@pytest.mark.parametrize("command", COMMANDS)
def test_there_are_two_examples_and_their_arguments_and_settings_are_valid(command):
    examples = [example for example in read_examples(command) if not example.startswith("make ")]
    assert len(examples) >= 2
    for example in examples:
        launcher, found, arguments = example.partition(f" {command} ")
        assert found and launcher.split()[0] in ("python", "deepspeed", "torchrun"), example
        parser, argv = build_parser(command), shlex.split(re.split(r" [<>] ", arguments)[0])
        parser.parse_config(argv) if isinstance(parser, SettingsParser) else parser.parse(argv)
