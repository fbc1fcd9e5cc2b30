"""The settings of a schema, which is a frozen dataclass whose groups are such again: keys, defaults, and what docstrings say of them."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml


@dataclasses.dataclass(frozen=True)
class Setting:
    """One key of a schema: its dotted name, default as YAML, and what its group's docstring says of it."""

    key: str
    default: str
    about: str


def list_settings(schema: type) -> list[Setting]:
    """Every setting of `schema`, in the order of its fields; each has a default."""
    found = []
    for key, group, field in _leaves(schema):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        about = _about(group)
        assert field.name in about, f"the docstring of {group.__name__} has no {field.name} among its Attributes"
        text = yaml.safe_dump(default, default_flow_style=True).split("\n...")[0].strip()
        found.append(Setting(key, text, about[field.name]))
    return found


def settings_markdown(schema: type) -> str:
    """The same in Markdown, a line each."""
    rows = [f"| `{one.key}` | `{one.default}` | {one.about.replace('|', '/')} |" for one in list_settings(schema)]
    return "\n".join(["| key | default | |", "| --- | --- | --- |", *rows]) + "\n"


def setting_keys(schema: type, prefix: str = "") -> Iterator[str]:
    """The keys of all settings of `schema`, which stands at `prefix`."""
    return (key for key, _, _ in _leaves(schema, prefix))


def suggest_key(path: str, known: list[str]) -> str:
    """A question that names the one of `known` that may have been meant by `path`; all of them where none is near."""
    last_words = {key.rpartition(".")[2] for key in known}
    last = difflib.get_close_matches(path.rpartition(".")[2], last_words, n=1, cutoff=0.7)
    named = [key for key in known if last and key.rpartition(".")[2] == last[0]]
    found = (
        difflib.get_close_matches(path, known, n=1, cutoff=0.8)
        or named
        or difflib.get_close_matches(path, known, n=1, cutoff=0.6)
    )
    return f"did you mean {' or '.join(map(repr, found))}?" if found else f"the settings are {', '.join(known)}"


def check_choices(config: Any, prefix: str) -> None:
    """Raise ValueError if a setting of a group, which stands at `prefix`, is none of the words that it can be."""
    for name, kind in get_type_hints(type(config)).items():
        if get_origin(kind) is Literal and getattr(config, name) not in get_args(kind):
            raise ValueError(f"{prefix}{name} ({getattr(config, name)!r}) must be one of {', '.join(get_args(kind))}")


def _leaves(schema: type, prefix: str = "") -> Iterator[tuple[str, type, dataclasses.Field[Any]]]:
    """Every setting under `schema`: its dotted key, the group that holds it, its field there."""
    kinds = get_type_hints(schema)
    for field in dataclasses.fields(schema):
        if dataclasses.is_dataclass(kinds[field.name]):
            yield from _leaves(kinds[field.name], f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", schema, field


def _about(schema: type) -> dict[str, str]:
    """What the docstrings of a schema and of those that it extends say of each name."""
    found: dict[str, str] = {}
    for one in reversed(schema.__mro__):
        found |= _attributes(one.__doc__ or "")
    return found


def _attributes(docstring: str) -> dict[str, str]:
    """What the `Attributes:` of a docstring say of each name."""
    about: dict[str, str] = {}
    names: list[str] = []
    for line in inspect.cleandoc(docstring).partition("Attributes:\n")[2].splitlines():
        if match := re.match(r" {4}(\w[\w, ]*): (.*)", line):
            names = match[1].split(", ")
            about.update(dict.fromkeys(names, match[2]))
        elif line.startswith(" " * 8):
            about.update((name, f"{about[name]} {line.strip()}") for name in names)
    return about
