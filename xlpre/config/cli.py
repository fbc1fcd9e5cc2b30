"""The command line of every command: `COMMAND --config FILE.yaml key=value other.key=value`, and perhaps flags of its own."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from xlpre.config.loader import Recipe, Schema, keys_in, load_config


@dataclass(frozen=True)
class ExplicitKeys:
    """Keys that somebody set, to whatever value.

    Attributes:
        words: on the command line.
        file: in its file, or in one which that extends.
    """

    words: frozenset[str] = frozenset()
    file: frozenset[str] = frozenset()


NO_EXPLICIT_KEYS = ExplicitKeys()


def parse_config(schema: type[Schema], description: str, argv: Sequence[str] | None = None) -> Schema:
    """Read `--config FILE key=value ...`; `--local_rank`, which the deepspeed launcher puts first, is accepted and unused."""
    return parse_config_and_flags(schema, description, {}, argv)[0]


def parse_config_and_flags(
    schema: type[Schema],
    description: str,
    flags: Mapping[str, str],
    argv: Sequence[str] | None = None,
    recipe: Recipe | None = None,
) -> tuple[Schema, set[str]]:
    """The same for a command that has `flags` besides: what each does, by its name without dashes. Returns those given, too."""
    words = _command_line(description, flags, argv)
    return load_config(schema, words.config, words.overrides, recipe), set(words.flags)


def read_explicit_keys(flags: Mapping[str, str], argv: Sequence[str] | None = None) -> ExplicitKeys:
    """Those that the command line of a command with such flags, and its file, set."""
    words = _command_line("", flags, argv)
    file = keys_in(words.config) if words.config else ()
    return ExplicitKeys(frozenset(word.partition("=")[0] for word in words.overrides), frozenset(file))


def _command_line(description: str, flags: Mapping[str, str], argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", help="a YAML file, see configs/")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that win over the file's")
    parser.set_defaults(flags=[])
    for flag, what in flags.items():
        parser.add_argument(f"--{flag}", action="append_const", const=flag, dest="flags", help=what)
    return parser.parse_intermixed_args(argv)
