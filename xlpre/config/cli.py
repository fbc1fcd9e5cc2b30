"""Command line of all commands: `COMMAND ARGUMENTS --option`, and `--config FILE key=value ...` where a command takes settings.

Mistakes are InputErrors with a message of one line.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, NoReturn

from xlpre.common.errors import InputError
from xlpre.config.help_text import HELP_COLUMN, common_settings, group_settings, wrap_docstring
from xlpre.config.key_suggestions import similar_keys
from xlpre.config.loader import DeriveOverrides, Schema, keys_in_file, keys_in_override, keys_over_base, load_config
from xlpre.config.schema_docs import setting_keys

PRESETS = Path("configs")
SUFFIXES = (".yaml", ".yml")
PICTURE_SUFFIXES = (".png", ".svg", ".pdf")
MIN_OPTION_SIMILARITY = 0.75  # difflib's ratio from which an option is suggested
ARGPARSE_RULES = (  # argparse's messages, and the messages that replace them
    (r"argument (\S+): invalid int value: '(.*)'", r"\1=\2 is invalid: it must be an integer."),
    (r"argument (\S+): invalid float value: '(.*)'", r"\1=\2 is invalid: it must be a number."),
    (r"argument (\S+): invalid choice: '(.*)' \(choose from (.*)\)", r"\1=\2 is invalid: it must be one of \3."),
    (r"argument (\S+): expected one argument", r"\1 is invalid: it has no value. Write the value after it."),
    (r"argument (\S+): not allowed with argument (\S+)", r"\1 is invalid: \2 is set, too. Leave one of them out."),
    (r"the following arguments are required: (.*)", r"arguments are missing: \1. See --help."),
)


@dataclass(frozen=True)
class ExplicitKeys:
    """Keys of the settings that the user set, even if to their defaults.

    Attributes:
        args: keys set on the command line.
        file: keys set in the config file or in one that it extends.
        own_file: keys set in the config file itself, if it extends another one.
    """

    args: frozenset[str] = frozenset()
    file: frozenset[str] = frozenset()
    own_file: frozenset[str] = frozenset()

    @classmethod
    def read(cls, config_file: str | Path | None, overrides: Sequence[str]) -> ExplicitKeys:
        """Read the keys of a config file and of `key=value` overrides.

        Raises:
            InputError: the file cannot be read.
        """
        file, own_file = (keys_in_file(config_file), keys_over_base(config_file)) if config_file else ((), ())
        return cls(frozenset().union(*map(keys_in_override, overrides)), frozenset(file), frozenset(own_file))


NO_EXPLICIT_KEYS = ExplicitKeys()


class CommandParser(argparse.ArgumentParser):
    """Parser of the arguments and options of a command. Arguments and options may be in any order.

    Args:
        docstring: docstring of the command, the text of `--help`. Indented lines are examples.
    """

    def __init__(self, docstring: str | None) -> None:
        program = "/".join(Path(sys.argv[0]).parts[-2:])
        formatter = partial(argparse.RawDescriptionHelpFormatter, max_help_position=HELP_COLUMN)
        super().__init__(prog=program, formatter_class=formatter, add_help=False, allow_abbrev=False)
        self._docstring = docstring or ""

    def add_device_option(self) -> None:
        """Add `--device`, whose value `xlpre.training.distributed.select_device` takes."""
        self.add_argument("--device", choices=("cpu", "cuda"), help="device (default: a GPU if there is one)")

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Parse the arguments of a command.

        Args:
            argv: the arguments. None: those of the process.

        Raises:
            InputError: an argument is missing, or an argument or option is invalid.
        """
        argv = sys.argv[1:] if argv is None else argv
        self._add_help()
        args, unknown = self.parse_known_intermixed_args(argv)
        if unknown:
            raise InputError(self._describe_unknown(unknown[0], argv))
        return args

    def format_help(self) -> str:
        """Return the text of `--help`."""
        self.description = wrap_docstring(self._docstring, _terminal_width())
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        """Raise InputError with the message of a mistake on the command line."""
        for pattern, rule in ARGPARSE_RULES:
            if match := re.fullmatch(pattern, message):
                raise InputError(match.expand(rule))
        raise InputError(message)

    def _add_help(self) -> None:
        self.add_argument("-h", "--help", action="help", help="print this text and exit")

    def _describe_unknown(self, argument: str, argv: Sequence[str]) -> str:
        """Describe an argument that does not exist."""
        option, options = argument.partition("=")[0], [*self._option_string_actions]
        if not argument.startswith("-"):
            return f"{argument!r} is invalid: there is no such argument. See --help."
        similar = difflib.get_close_matches(option, options, 1, MIN_OPTION_SIMILARITY)
        remedy = f"Did you mean {similar[0]}?" if similar else "See --help."
        return f"{option} is invalid: there is no such option. {remedy}"


def add_push_option(parser: CommandParser) -> None:
    """Add the option --push of the export commands."""
    text = "upload the result to this repository of the Hugging Face Hub; a new repository is private"
    parser.add_argument("--push", metavar="OWNER/NAME", help=text)


class SettingsParser(CommandParser, Generic[Schema]):
    """Parser of the arguments, the options and the settings of a command.

    `--help` lists the settings in `common`; `--help GROUP` lists all settings of a group.

    Args:
        schema: dataclass of the settings.
        docstring: docstring of the command, the text of `--help`. Indented lines are examples.
        common: settings that `--help` lists: keys, or names of groups.
        reads_file: accept `--config FILE`.
    """

    def __init__(
        self, schema: type[Schema], docstring: str | None, common: Sequence[str], reads_file: bool = True
    ) -> None:
        super().__init__(docstring)
        self._schema, self._common, self._reads_file = schema, common, reads_file
        self.set_defaults(config=None)
        if reads_file:
            text = "YAML file with settings, see configs/"
            self.add_argument("--config", metavar="FILE", action=_StoreOnce, help=text)
        self.add_argument("--local_rank", help=argparse.SUPPRESS)  # the deepspeed launcher passes it; unused

    def parse_config(
        self, argv: Sequence[str] | None = None, derive_overrides: DeriveOverrides | None = None
    ) -> tuple[Schema, ExplicitKeys, argparse.Namespace]:
        """Parse the arguments and load the settings.

        Args:
            argv: the arguments. None: those of the process.
            derive_overrides: see `load_config`.

        Returns:
            The settings, the keys that the user set, and the other arguments and options.

        Raises:
            InputError: see `parse` and `load_config`.
        """
        args = self.parse(argv)
        config = load_config(self._schema, args.config, args.overrides, derive_overrides)
        return config, ExplicitKeys.read(args.config, args.overrides), args

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Parse the arguments of a command; `overrides` of the result are the `key=value` strings. For errors see CommandParser."""
        text = "settings, which override those of the file" if self._reads_file else "settings"
        self.add_argument("overrides", nargs="*", metavar="key=value", help=text)
        args = super().parse(argv)
        _check_overrides(args.overrides)
        if args.config is not None:
            _check_file(args.config)
        return args

    def format_help(self) -> str:
        """Return the text of `--help`."""
        self.epilog = common_settings(self._schema, self._common, _terminal_width())
        return super().format_help()

    def format_group(self, name: str) -> str:
        """Return the text of `--help GROUP`."""
        return group_settings(self._schema, name, _terminal_width()) + "\n"

    def _add_help(self) -> None:
        text = "print this text, or all settings of a group, and exit"
        self.add_argument("-h", "--help", metavar="GROUP", nargs="?", action=_Help, help=text)

    def _describe_unknown(self, argument: str, argv: Sequence[str]) -> str:
        """Describe an option that does not exist. Most such options are settings, written as `--key value`."""
        option, _, value = argument.partition("=")
        name, known = option.lstrip("-").replace("-", "_"), [*setting_keys(self._schema)]
        keys = [name] if name in known else similar_keys(name, known)
        if difflib.get_close_matches(option, [*self._option_string_actions], 1, MIN_OPTION_SIMILARITY) or not keys:
            return super()._describe_unknown(argument, argv)
        following = next(iter(argv[argv.index(argument) + 1 :]), "")
        value = value or ("VALUE" if following.startswith("-") or "=" in following else following or "VALUE")
        remedy = " or ".join(shlex.quote(key if "=" in key else f"{key}={value}") for key in keys)
        return f"{option} is invalid: settings are written as key=value. Write {remedy}."


class _StoreOnce(argparse.Action):
    """Store the value of an option that may be given once."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        if (first := getattr(namespace, self.dest)) is not None:
            raise InputError(
                f"{option}={values} is invalid: {option} is set to {first} already. Give one file. "
                "To build on another file, add the line `extends: OTHER.yaml` to yours."
            )
        setattr(namespace, self.dest, values)


class _Help(argparse.Action):
    """Print the help of a command, or of a group of settings, and exit."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        assert isinstance(parser, SettingsParser)
        is_group = values is not None and "=" not in values
        print(parser.format_group(values) if is_group else parser.format_help(), end="")
        parser.exit()


def _check_overrides(overrides: Sequence[str]) -> None:
    """Raise InputError if an argument is not of the form key=value."""
    for index, override in enumerate(overrides):
        if override.partition("=")[0] and "=" in override:
            continue
        before, after = overrides[max(index - 1, 0) : index], overrides[index + 1 :]
        if after and after[0].startswith("="):  # key = value, key =value
            written = override + after[0] + (after[1] if after[0] == "=" and len(after) > 1 else "")
        elif before and before[0].endswith("="):  # key= value
            written = before[0] + override
        elif override.endswith(SUFFIXES):
            raise InputError(f"{override!r} is invalid: settings are written as key=value. Write --config {override}.")
        else:
            raise InputError(
                f"{override!r} is invalid: settings are written as key=value. Put a text or value with spaces in quotes."
            )
        raise InputError(
            f"{override!r} is invalid: settings are written as key=value, without spaces around =. Write {shlex.quote(written)}."
        )


def _check_file(path: str) -> None:
    """Raise InputError if a config file does not exist."""
    if Path(path).exists():
        return
    presets = [str(preset) for suffix in SUFFIXES for preset in sorted(PRESETS.rglob(f"*{suffix}"))]
    name = Path(path).stem
    similar = [p for p in presets if Path(p).stem == name] or difflib.get_close_matches(path, presets, 1, 0.8)
    remedy = f"Did you mean {' or '.join(similar)}?" if similar else "The presets are in configs/."
    raise InputError(f"--config={path} is invalid: there is no such file. {remedy}")


def _terminal_width() -> int:
    return max(shutil.get_terminal_size().columns - 2, 40)


def check_output_files(out: Path | None, picture: Path | None) -> None:
    """Check the arguments of --out and --picture before the work whose result they receive.

    Raises:
        InputError: a file cannot be written, or the suffix of the picture is not in `PICTURE_SUFFIXES`.
    """
    if picture is not None and picture.suffix not in PICTURE_SUFFIXES:
        formats = ", ".join(PICTURE_SUFFIXES)
        raise InputError(f"--picture={picture} is invalid: the name must end with one of {formats}. Rename it.")
    for option, path in (("out", out), ("picture", picture)):
        if path is None:
            continue
        if not path.absolute().parent.is_dir():
            problem = f"the folder {path.parent} does not exist. Create it, or name another"
        elif path.is_dir():
            problem = "it is a folder. Name a file"
        elif path.exists() and not path.is_file():
            problem = "it is a device or a pipe. Name a file"
        elif not os.access(path.absolute().parent, os.W_OK):
            problem = f"the folder {path.parent} cannot be written. Name another"
        else:
            continue
        raise InputError(f"--{option}={path} is invalid: {problem}.")
