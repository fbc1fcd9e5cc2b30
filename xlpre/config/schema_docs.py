"""Keys, defaults and descriptions of the settings of a schema.

A schema is a frozen dataclass. Its fields are settings or groups of settings, which are schemas too. The `Attributes:` section of
the docstring of a group describes its settings.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from xlpre.common.errors import InputError


@dataclasses.dataclass(frozen=True)
class Setting:
    """One setting of a schema.

    Attributes:
        key: dotted key.
        type: type as it is written in a usage message, such as `INT`, `{true,false}` or `[TEXT,...]`.
        default: default value as YAML.
        description: text from the docstring of its group.
    """

    key: str
    type: str
    default: str
    description: str

    @property
    def group(self) -> str:
        """Name of the group of the setting; empty if it belongs to no group."""
        return self.key.rpartition(".")[0]

    @property
    def summary(self) -> str:
        """First sentence of the description, without its full stop, then the meaning of null if null is the default."""
        sentence, *rest = re.split(r"\.(?:\s|$)", self.description)
        meaning = next((part for part in rest if part.startswith("null: ")), "") if self.default == "null" else ""
        return f"{sentence}; {meaning}" if meaning else sentence


def list_settings(schema: type) -> list[Setting]:
    """List all settings of `schema` in the order of its fields. All of them need a default and a description."""
    settings = []
    for key, group, field in _leaf_fields(schema):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        descriptions = _descriptions(group)
        assert field.name in descriptions, f"the docstring of {group.__name__} does not describe {field.name}"
        text = yaml.safe_dump(default, default_flow_style=True).split("\n...")[0].strip()
        kind = _type_name(_type_hints(group)[field.name])
        settings.append(Setting(key, kind, text, descriptions[field.name]))
    return settings


def group_summaries(schema: type) -> dict[str, str]:
    """Return the first sentence of the docstring of each group of `schema`, by its name."""
    kinds = {field.name: _type_hints(schema)[field.name] for field in dataclasses.fields(schema)}
    groups = {name: kind for name, kind in kinds.items() if dataclasses.is_dataclass(kind)}
    return {name: re.split(r"\.(?:\s|$)", group.__doc__ or "")[0] for name, group in groups.items()}


def settings_markdown(schema: type) -> str:
    """Return the settings of `schema` in Markdown: a table of those outside groups, then a section for each group."""
    groups: dict[str, list[Setting]] = {}
    for setting in list_settings(schema):
        groups.setdefault(setting.group, []).append(setting)
    summaries = group_summaries(schema)
    lines = []
    for group, settings in groups.items():
        if group:
            lines += [f"## {group}", "", f"{summaries[group]}.", ""]
        lines += ["| key | type | default | |", "| --- | --- | --- | --- |", *map(_table_row, settings), ""]
    return "\n".join(lines)


def _table_row(setting: Setting) -> str:
    cells = (f"`{setting.key}`", f"`{setting.type.replace(',', ', ')}`", f"`{setting.default}`", setting.description)
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def setting_keys(schema: type, prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of all settings of `schema`, each after `prefix`."""
    return (key for key, _, _ in _leaf_fields(schema, prefix))


def check_choices(config: Any, prefix: str) -> None:
    """Raise InputError if a field of `config` with a `Literal` type has a value that is not one of its choices.

    Args:
        config: a group of settings.
        prefix: prefix of its keys, with a trailing dot.
    """
    for name, kind in get_type_hints(type(config)).items():
        if get_origin(kind) is Literal and getattr(config, name) not in get_args(kind):
            choices = ", ".join(map(str, get_args(kind)))
            raise InputError(f"{prefix}{name}={getattr(config, name)} is invalid: it must be one of {choices}.")


def _leaf_fields(schema: type, prefix: str = "") -> Iterator[tuple[str, type, dataclasses.Field[Any]]]:
    """Yield the dotted key of each setting, the group that holds it, and its field there."""
    kinds = _type_hints(schema)
    for field in dataclasses.fields(schema):
        if dataclasses.is_dataclass(kinds[field.name]):
            yield from _leaf_fields(kinds[field.name], f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", schema, field


def _type_name(kind: Any) -> str:
    """Return the name of a type in usage messages. `| None` is left out, because the default shows it."""
    alternatives = [alternative for alternative in get_args(kind) if alternative is not type(None)]
    if get_origin(kind) is Literal:
        return f"{{{','.join(map(str, alternatives))}}}"
    if get_origin(kind) is list:
        return f"[{_type_name(alternatives[0])},...]"
    if get_origin(kind) is dict:
        return "{KEY: VALUE,...}"
    if alternatives:
        return _type_name(alternatives[0])
    return {bool: "{true,false}", int: "INT", float: "FLOAT", str: "TEXT"}[kind]


@functools.cache
def _type_hints(schema: type) -> dict[str, Any]:
    return get_type_hints(schema)


@functools.cache
def _descriptions(schema: type) -> dict[str, str]:
    """Return the description of each attribute, from the docstrings of a schema and its base classes."""
    descriptions: dict[str, str] = {}
    for cls in reversed(schema.__mro__):
        descriptions |= _parse_attributes(cls.__doc__ or "")
    return descriptions


def _parse_attributes(docstring: str) -> dict[str, str]:
    """Parse the `Attributes:` section of a docstring in Google style."""
    descriptions: dict[str, str] = {}
    names: list[str] = []
    for line in inspect.cleandoc(docstring).partition("Attributes:\n")[2].splitlines():
        if match := re.match(r" {4}(\w[\w, ]*): (.*)", line):
            names = match[1].split(", ")
            descriptions.update(dict.fromkeys(names, match[2]))
        elif line.startswith(" " * 8):
            descriptions.update((name, f"{descriptions[name]} {line.strip()}") for name in names)
    return descriptions
