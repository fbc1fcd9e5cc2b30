"""Text of `--help`: docstrings and settings, wrapped to the width of the terminal."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Sequence

from xlpre.common.errors import InputError
from xlpre.config.schema_docs import Setting, group_summaries, list_settings

HELP_COLUMN = 28  # column of the descriptions
NO_GROUP = "run"  # the settings that belong to no group have this name in `--help`
ALL_GROUPS = "all"
NO_BREAK = "\N{NO-BREAK SPACE}"


def wrap_docstring(docstring: str, width: int) -> str:
    """Wrap the paragraphs of a docstring. Paragraphs with an indented line, such as examples, stay as they are."""
    paragraphs = inspect.cleandoc(docstring).split("\n\n")
    return "\n\n".join(text if "\n " in f"\n{text}" else textwrap.fill(text, width) for text in paragraphs)


def common_settings(schema: type, common: Sequence[str], width: int) -> str:
    """Describe the most used settings of a command, one sentence each, and list the groups of all settings.

    Args:
        schema: dataclass of the settings.
        common: keys of the most used settings. The name of a group stands for all settings of the group.
        width: characters in a line.
    """
    lines, settings = [], _by_group(schema)
    known = {*settings, *(setting.key for group in settings.values() for setting in group)}
    assert {*common} <= known, f"no settings: {', '.join({*common} - known)}"
    for group, summary in _groups(schema).items():
        listed = [setting for setting in settings[group] if setting.key in common or setting.group in common]
        entries = [_entry(setting, setting.summary, width) for setting in listed]
        lines += [textwrap.shorten(f"{group}: {summary}", width, placeholder=" ..."), *entries] if entries else []
    more = f"--help GROUP prints all settings of a group: {', '.join(_groups(schema))}, or {ALL_GROUPS}."
    return "\n".join(["common settings, written as key=value:", *lines, "", textwrap.fill(more, width)])


def group_settings(schema: type, name: str, width: int) -> str:
    """Describe all settings of a group.

    Args:
        schema: dataclass of the settings.
        name: name of the group, or `all`.
        width: characters in a line.

    Raises:
        InputError: there is no such group.
    """
    groups = _groups(schema)
    if name not in (*groups, ALL_GROUPS):
        raise InputError(f"--help={name} is invalid: it must be one of {', '.join(groups)}, or {ALL_GROUPS}.")
    sections, settings = [], _by_group(schema)
    for group in groups if name == ALL_GROUPS else [name]:
        entries = [_entry(setting, setting.description, width) for setting in settings[group]]
        sections.append("\n".join([textwrap.fill(f"{group}: {groups[group]}", width), *entries]))
    return "\n\n".join(sections)


def _groups(schema: type) -> dict[str, str]:
    """Return the summary of each group by its name."""
    return {NO_GROUP: "Name, folder, initial weights and seed of the run", **group_summaries(schema)}


def _by_group(schema: type) -> dict[str, list[Setting]]:
    settings: dict[str, list[Setting]] = {}
    for setting in list_settings(schema):
        settings.setdefault(setting.group or NO_GROUP, []).append(setting)
    return settings


def _entry(setting: Setting, description: str, width: int) -> str:
    """Return the lines of a setting: key and type on the left, description and default on the right, as argparse does."""
    left = f"  {setting.key}={setting.type}"
    default = f"(default: {setting.default})".replace(" ", NO_BREAK)
    text = textwrap.wrap(f"{description} {default}", max(width - HELP_COLUMN, 20), break_on_hyphens=False)
    lines = [" " * HELP_COLUMN + line.replace(NO_BREAK, " ") for line in text]
    if len(left) > HELP_COLUMN - 2:
        return "\n".join([left, *lines])
    return "\n".join([left.ljust(HELP_COLUMN) + text[0].replace(NO_BREAK, " "), *lines[1:]])
