"""Command line of all commands: `COMMAND --config FILE.yaml key=value other.key=value`, and flags of the command."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from xlpre.config.loader import DeriveOverrides, Schema, keys_in_file, load_config


@dataclass(frozen=True)
class ExplicitKeys:
    """Keys of the settings that the user set, to any value.

    Attributes:
        args: keys set on the command line.
        file: keys set in the config file or in one that it extends.
    """

    args: frozenset[str] = frozenset()
    file: frozenset[str] = frozenset()


NO_EXPLICIT_KEYS = ExplicitKeys()


def parse_config(schema: type[Schema], description: str, argv: Sequence[str] | None = None) -> Schema:
    """Parse `--config FILE key=value ...`.

    Args:
        schema: dataclass of the settings.
        description: text of `--help`.
        argv: arguments. None: those of the process.

    Raises:
        ValueError: see `load_config`.
    """
    return parse_config_and_flags(schema, description, {}, argv)[0]


def parse_config_and_flags(
    schema: type[Schema],
    description: str,
    flags: Mapping[str, str],
    argv: Sequence[str] | None = None,
    derive_overrides: DeriveOverrides | None = None,
) -> tuple[Schema, set[str]]:
    """Parse `--config FILE key=value ...` and flags, in any order.

    Args:
        schema: dataclass of the settings.
        description: text of `--help`.
        flags: help text of each flag, by its name without dashes.
        argv: arguments. None: those of the process.
        derive_overrides: see `load_config`.

    Returns:
        The settings, and the names of the flags that were passed.

    Raises:
        ValueError: see `load_config`.
    """
    args = _parse_args(description, flags, argv)
    return load_config(schema, args.config, args.overrides, derive_overrides), set(args.flags)


def read_explicit_keys(flags: Mapping[str, str], argv: Sequence[str] | None = None) -> ExplicitKeys:
    """Return the keys that the command line and its config file set; arguments as for `parse_config_and_flags`."""
    args = _parse_args("", flags, argv)
    file = keys_in_file(args.config) if args.config else ()
    return ExplicitKeys(frozenset(override.partition("=")[0] for override in args.overrides), frozenset(file))


def _parse_args(description: str, flags: Mapping[str, str], argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", help="YAML file with settings, see configs/")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # the deepspeed launcher passes it; unused
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that override those of the file")
    parser.set_defaults(flags=[])
    for flag, help_text in flags.items():
        parser.add_argument(f"--{flag}", action="append_const", const=flag, dest="flags", help=help_text)
    return parser.parse_intermixed_args(argv)
