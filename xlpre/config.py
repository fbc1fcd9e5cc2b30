"""Configuration: frozen dataclasses are the schema, YAML and `key=value` words fill it. The one door to OmegaConf.

Every command speaks the same grammar: `COMMAND --config FILE.yaml key=value other.key=value`. A YAML file may open with
`extends: other.yaml` (a path beside it), whose settings it then changes.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import inspect
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import yaml
from omegaconf import BooleanNode, DictConfig, ListConfig, OmegaConf, StringNode
from omegaconf.errors import OmegaConfBaseException

from xlpre.atomic import new_file

Schema = TypeVar("Schema")
Recipe = Callable[[Any], Sequence[str]]  # from settings to words that they ask for


@dataclasses.dataclass(frozen=True)
class Given:
    """Keys that somebody set, to whatever value.

    Attributes:
        words: on the command line.
        file: in its file, or in one which that extends.
    """

    words: frozenset[str] = frozenset()
    file: frozenset[str] = frozenset()


NOTHING = Given()


def from_command_line(schema: type[Schema], description: str, argv: Sequence[str] | None = None) -> Schema:
    """Read `--config FILE key=value ...`; `--local_rank`, which the deepspeed launcher puts first, is accepted and unused."""
    return with_flags(schema, description, {}, argv)[0]


def with_flags(
    schema: type[Schema],
    description: str,
    flags: Mapping[str, str],
    argv: Sequence[str] | None = None,
    recipe: Recipe | None = None,
) -> tuple[Schema, set[str]]:
    """The same for a command that has `flags` besides: what each does, by its name without dashes. Returns those given, too."""
    words = _command_line(description, flags, argv)
    return load(schema, words.config, words.overrides, recipe), set(words.flags)


def given_keys(flags: Mapping[str, str], argv: Sequence[str] | None = None) -> Given:
    """Those that the command line of a command with such flags, and its file, set."""
    words = _command_line("", flags, argv)
    file = _keys_set(_read(Path(words.config), ())) if words.config else ()
    return Given(frozenset(word.partition("=")[0] for word in words.overrides), frozenset(file))


def _command_line(description: str, flags: Mapping[str, str], argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", help="a YAML file, see configs/")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that win over the file's")
    parser.set_defaults(flags=[])
    for flag, what in flags.items():
        parser.add_argument(f"--{flag}", action="append_const", const=flag, dest="flags", help=what)
    return parser.parse_intermixed_args(argv)


def load(
    schema: type[Schema],
    path: str | Path | None = None,
    overrides: Sequence[str] = (),
    recipe: Recipe | None = None,
) -> Schema:
    """Fill `schema` from a YAML file (with its `extends`), then from `key=value` words.

    Args:
        schema: a dataclass.
        path: the file.
        overrides: the words.
        recipe: given the settings, more words, which win over the file and lose against `overrides`.

    Raises:
        ValueError: a file that cannot be read, a key that does not exist, a value of the wrong type or against a rule.
    """
    if recipe is not None:
        overrides = [*recipe(load(schema, path, overrides)), *overrides]
    layers = [(str(path), _read(Path(path), ()))] if path is not None else []
    known = OmegaConf.structured(schema)
    layers += [(word, _parse(word, known)) for word in overrides]
    return _filled(known, layers, str(path or "settings"))  # type: ignore[return-value]


def from_mapping(schema: type[Schema], settings: Mapping[str, Any], origin: str) -> Schema:
    """Fill `schema` from settings that were read from the file `origin`.

    Raises:
        ValueError: as load.
    """
    try:
        given = OmegaConf.create(dict(settings))
    except OmegaConfBaseException as error:  # a text that starts what only a YAML file may have, as in ${
        raise ValueError(f"{origin}: {_one_line(error)}") from None
    try:
        return _filled(OmegaConf.structured(schema), [(origin, given)], origin)  # type: ignore[return-value]
    except ValueError as error:  # a schema knows no file
        raise ValueError(str(error) if origin in str(error) else f"{origin}: {error}") from None


def dump(config: Any, path: str | Path) -> None:
    """Write the resolved settings as YAML that `load` reads back to an equal object."""
    with new_file(path) as partial:
        partial.write_text(as_yaml(config), encoding="utf-8")


def as_yaml(config: Any) -> str:
    """The settings as YAML."""
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False, allow_unicode=True)


@dataclasses.dataclass(frozen=True)
class Setting:
    """One key of a schema: its dotted name, default as YAML, and what its group's docstring says of it."""

    key: str
    default: str
    about: str


def settings_of(schema: type) -> list[Setting]:
    """Every setting of `schema`, in the order of its fields."""
    found = []
    for key, group, name in _leaves(OmegaConf.structured(schema)):
        default = OmegaConf.to_container(group, resolve=False)[name]  # type: ignore[index, call-overload]
        text = yaml.safe_dump(default, default_flow_style=True).split("\n...")[0].strip()
        found.append(Setting(key, text, _about(OmegaConf.get_type(group))[name]))
    return found


def settings_table(schema: type) -> str:
    """The same in Markdown, a line each."""
    rows = [f"| `{one.key}` | `{one.default}` | {one.about.replace('|', '/')} |" for one in settings_of(schema)]
    return "\n".join(["| key | default | |", "| --- | --- | --- |", *rows]) + "\n"


def _about(schema: Any) -> dict[str, str]:
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


def _filled(empty: DictConfig, layers: Sequence[tuple[str, DictConfig]], named: str) -> object:
    for origin, layer in layers:
        _check_keys(empty, layer, origin)
        _go_home(layer)
    try:
        merged = OmegaConf.merge(empty, *(layer for _, layer in layers))
    except OmegaConfBaseException:
        merged = _merged_in_turn(empty, layers)
    try:
        _check_finite(OmegaConf.to_container(merged, resolve=True))
        return OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ValueError(f"{named}: {_one_line(error)}") from None


def _go_home(node: Any) -> None:
    """Put the home folder where a path begins with `~/`, which a shell does not do behind the dotted key of a word."""
    for key in list(range(len(node)) if isinstance(node, ListConfig) else node):
        value = node._get_node(key)
        if isinstance(value, DictConfig | ListConfig) and not (value._is_none() or value._is_interpolation()):
            _go_home(value)
        elif isinstance(value._value(), str) and value._value() != _at_home(value._value()):
            node[key] = _at_home(value._value())
        elif str(key) != _at_home(str(key)):
            node[_at_home(str(key))] = node.pop(key)


def _at_home(path: str) -> str:
    """A path, or `hf:` and the path of a dataset on disk."""
    kind, home, rest = path.partition("~/")
    return kind + os.path.expanduser(home) + rest if kind in ("", "hf:") else path


def _merged_in_turn(merged: Any, layers: Sequence[tuple[str, DictConfig]]) -> Any:
    """The same as OmegaConf.merge, which copies everything each time, but it says whose fault it is."""
    for origin, layer in layers:
        try:
            merged = OmegaConf.merge(merged, layer)
        except OmegaConfBaseException as error:
            raise ValueError(f"{origin}: {_one_line(error)}") from None
    return merged


def _read(path: Path, seen: tuple[Path, ...]) -> DictConfig:
    if path.resolve() in seen:
        raise ValueError(f"{path}: extends itself; break the circle")
    try:
        settings = OmegaConf.load(path)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; see configs/ for those that exist") from None
    except (yaml.YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(settings, DictConfig):
        raise ValueError(f"{path}: must hold `key: value` lines, not a {type(settings).__name__}")
    base = settings.pop("extends", None)
    if base is None:
        return settings
    if not isinstance(base, str):
        raise ValueError(f"{path}: extends ({base}) must be the path of another file, beside this one")
    return OmegaConf.merge(_read(path.parent / base, (*seen, path.resolve())), settings)  # type: ignore[return-value]


def _keys_set(layer: DictConfig, prefix: str = "") -> Iterator[str]:
    for key in layer:
        value: Any = layer._get_node(key)
        if isinstance(value, DictConfig):
            yield from _keys_set(value, f"{prefix}{key!s}.")
        else:
            yield f"{prefix}{key!s}"


def _parse(word: str, schema: DictConfig) -> DictConfig:
    key, equals, value = word.partition("=")
    if not equals or not re.fullmatch(r"\w+(\.[\w-]+)*", key):
        raise ValueError(f"{word!r} is not of the form key=value")
    parsed: Any = value
    branch = OmegaConf.create()
    try:
        if not isinstance(_node(schema, key), StringNode):  # a string is what was typed: 007 stays 007
            holder: Any = OmegaConf.create(f"value: {value}")
            parsed = holder._get_node("value") if value else None
        OmegaConf.update(branch, key, parsed)
    except yaml.YAMLError:
        raise ValueError(f"{word!r}: the value is neither a number, true, false, null nor a list") from None
    except OmegaConfBaseException as error:
        raise ValueError(f"{word!r}: {_one_line(error)}") from None
    return branch


def _node(schema: DictConfig, key: str) -> Any:
    node: Any = schema
    for name in key.split("."):
        node = node._get_node(name) if isinstance(node, DictConfig) and name in node else None
    return node


def _check_keys(schema: DictConfig, given: DictConfig, origin: str, prefix: str = "") -> None:
    for key in map(str, given):
        path = f"{prefix}{key}"
        value: Any = given._get_node(key)
        if key not in schema:
            path, known = _longest(path, value), list(_keys(_root(schema)))
            if "." in key and path in known:
                raise ValueError(
                    f"{origin}: {path!r} is written as a group, `{path.replace('.', ': {')}: ...{'}' * path.count('.')}`"
                )
            raise ValueError(f"{origin}: there is no setting {path!r}; {nearest(path, known)}")
        inner = schema._get_node(key)
        if _is_group(inner):
            if not isinstance(value, DictConfig):
                raise ValueError(
                    f"{origin}: {path!r} is a group of settings; name one of {', '.join(_keys(inner, path + '.'))}"
                )
            _check_keys(inner, value, origin, path + ".")
        else:
            _check_kind(inner, value, f"{origin}: {path}")


def _check_kind(wanted: Any, value: Any, origin: str) -> None:
    """Raise ValueError if `value` is no list or no mapping where one is wanted."""
    for kind, what in ((ListConfig, "a list, as [a, b]"), (DictConfig, "a mapping, as {a: 1, b: 2}")):
        if isinstance(wanted, kind) and not isinstance(value, kind) and not value._is_interpolation():
            raise ValueError(f"{origin} ({value._value()}) must be {what}")
    if isinstance(wanted, BooleanNode) and type(value._value()) is int and value._value() not in (0, 1):
        raise ValueError(f"{origin} ({value._value()}) must be true or false")
    if isinstance(value, DictConfig):
        for key in value:
            inside: Any = value._get_node(key)
            if ":" in str(key) and inside._is_none():  # as YAML reads {a:1}
                raise ValueError(f"{origin}: {key!r} has no value; put a space after its colon")


def _check_finite(value: Any, path: str = "") -> None:
    """Raise ValueError for a number that is none, or infinite: no setting means anything with it."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{path} ({value}) must be a finite number")
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inside:
        _check_finite(one, f"{path}.{key}" if path else str(key))


def _longest(path: str, value: Any) -> str:
    """`path` and the keys under it, down to the first setting."""
    while isinstance(value, DictConfig) and len(value):
        key = next(iter(value))
        path, value = f"{path}.{key!s}", value._get_node(key)
    return path


def _root(node: DictConfig) -> DictConfig:
    while node._get_parent() is not None:
        node = node._get_parent()  # type: ignore[assignment]
    return node


def _keys(schema: DictConfig, prefix: str = "") -> Iterator[str]:
    return (key for key, _, _ in _leaves(schema, prefix))


def _leaves(group: DictConfig, prefix: str = "") -> Iterator[tuple[str, DictConfig, str]]:
    """Every setting under `group`: its dotted key, the group that holds it, its name there."""
    for name in map(str, group):
        inner = group._get_node(name)
        if _is_group(inner):
            yield from _leaves(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", group, name


def _is_group(node: Any) -> TypeGuard[DictConfig]:
    return isinstance(node, DictConfig) and dataclasses.is_dataclass(OmegaConf.get_type(node))


def nearest(path: str, known: list[str]) -> str:
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


def _one_line(error: OmegaConfBaseException) -> str:
    """OmegaConf's message, led by the key it is about."""
    message = (error.msg or str(error)).splitlines()[0]
    return f"{error.full_key}: {message}" if error.full_key else message
