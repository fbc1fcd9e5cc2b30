"""Configuration: frozen dataclasses are the schema, YAML and `key=value` words fill it. The one door to OmegaConf.

A YAML file may open with `extends: other.yaml` (a path beside it), whose settings it then changes.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import yaml
from omegaconf import BooleanNode, DictConfig, ListConfig, OmegaConf, StringNode
from omegaconf.errors import OmegaConfBaseException

from xlpre.common.files import write_text
from xlpre.config.schema_docs import setting_keys, suggest_key

Schema = TypeVar("Schema")
Recipe = Callable[[Any], Sequence[str]]  # from settings to words that they ask for


def load_config(
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
        overrides = [*recipe(load_config(schema, path, overrides)), *overrides]
    layers = [(str(path), _read(Path(path), ()))] if path is not None else []
    known = OmegaConf.structured(schema)
    layers += [(word, _parse(word, known)) for word in overrides]
    return _filled(known, layers, str(path or "settings"))  # type: ignore[return-value]


def config_from_mapping(schema: type[Schema], settings: Mapping[str, Any], origin: str) -> Schema:
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


def save_config(config: Any, path: str | Path) -> None:
    """Write the resolved settings as YAML that `load` reads back to an equal object."""
    write_text(path, to_yaml(config))


def to_yaml(config: Any) -> str:
    """The settings as YAML."""
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False, allow_unicode=True)


def keys_in(path: str | Path) -> set[str]:
    """The keys that a YAML file, or one which it extends, sets, to whatever value.

    Raises:
        ValueError: as load.
    """
    return set(_keys_set(_read(Path(path), ())))


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
            path, known = _longest(path, value), list(setting_keys(_root(schema)))
            if "." in key and path in known:
                group = f"`{path.replace('.', ': {')}: ...{'}' * path.count('.')}`"
                raise ValueError(f"{origin}: {path!r} is written as a group, {group}")
            raise ValueError(f"{origin}: there is no setting {path!r}; {suggest_key(path, known)}")
        inner = schema._get_node(key)
        if _is_group(inner):
            if not isinstance(value, DictConfig):
                inside = ", ".join(setting_keys(OmegaConf.get_type(inner), f"{path}."))  # type: ignore[arg-type]
                raise ValueError(f"{origin}: {path!r} is a group of settings; name one of {inside}")
            _check_keys(inner, value, origin, path + ".")
        else:
            _check_kind(inner, value, f"{origin}: {path}")


def _check_kind(wanted: Any, value: Any, origin: str) -> None:
    """Raise ValueError if `value` is no list, no mapping or neither true nor false where one is wanted."""
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


def _root(node: DictConfig) -> Any:
    """The schema of which a node is a part."""
    while node._get_parent() is not None:
        node = node._get_parent()  # type: ignore[assignment]
    return OmegaConf.get_type(node)


def _is_group(node: Any) -> TypeGuard[DictConfig]:
    return isinstance(node, DictConfig) and dataclasses.is_dataclass(OmegaConf.get_type(node))


def _one_line(error: OmegaConfBaseException) -> str:
    """OmegaConf's message, led by the key it is about."""
    message = (error.msg or str(error)).splitlines()[0]
    return f"{error.full_key}: {message}" if error.full_key else message
