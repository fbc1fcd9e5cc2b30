"""Configuration files and `key=value` overrides. The only module that imports OmegaConf.

A schema is a frozen dataclass. A YAML file may start with `extends: other.yaml`, with a path relative to its own folder. Its settings
override those of the other file.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeGuard, TypeVar, get_origin

import yaml
from omegaconf import BooleanNode, DictConfig, ListConfig, OmegaConf, StringNode
from omegaconf.errors import OmegaConfBaseException

from xlpre.common.errors import InputError
from xlpre.common.files import write_text
from xlpre.common.messages import as_yaml
from xlpre.config.key_suggestions import suggest_key
from xlpre.config.schema_docs import setting_keys

Schema = TypeVar("Schema")
DeriveOverrides = Callable[[Any], Sequence[str]]  # settings -> `key=value` overrides
NULL = ("", "null", "~")
# settings of a group: if a later file or override sets one of them, it replaces all of them instead of being merged
ALTERNATIVES = {"text": ("source", "mixture")}
NOT_DECIMAL = re.compile(r"[-+]?(\d+(:\d+)+(\.\d*)?|0\d+|\d+(_\d+)+)")  # YAML reads 1:30 as 90, 010 as 8 and 1_0 as 10
CONVERSION_RULES = (  # OmegaConf's messages, and what the value must be
    (r"Value '(?P<value>.*)' of type '\w+' could not be converted to Integer", "an integer"),
    (r"Value '(?P<value>.*)' of type '\w+' could not be converted to Float", "a number"),
    (r"Value '(?P<value>.*)' is not a valid bool", "true or false"),
    (r"Invalid value '(?P<value>.*)', expected one of \['(?P<choices>.*)'\]", r"one of '\g<choices>'"),
    (r"Incompatible value 'None' for field of type 'int'", "an integer"),
    (r"Incompatible value 'None' for field of type 'float'", "a number"),
    (r"Incompatible value 'None' for field of type 'bool'", "true or false"),
    (r"Incompatible value 'None' for field of type 'str'", "text"),
    (r"Invalid type assigned: NoneType is not a subclass of str", "text"),
)


def load_config(
    schema: type[Schema],
    path: str | Path | None = None,
    overrides: Sequence[str] = (),
    derive_overrides: DeriveOverrides | None = None,
) -> Schema:
    """Load settings from a YAML file and `key=value` overrides.

    Args:
        schema: dataclass of the settings.
        path: the YAML file, with `extends`. None: the defaults.
        overrides: `key=value` strings, which override the file.
        derive_overrides: returns further overrides for the loaded settings. They take precedence over the file, but not over `overrides`
            and, if the file extends another, not over its own settings.

    Raises:
        InputError: a file cannot be read, a key does not exist, or a value is invalid.
    """
    if derive_overrides is not None:
        own_keys = keys_over_base(path) if path is not None else set()
        derived = derive_overrides(load_config(schema, path, overrides))
        overrides = [*(x for x in derived if not keys_in_override(x) & own_keys), *overrides]
    layers = [(str(path), _read_yaml(Path(path), ()))] if path is not None else []
    defaults = OmegaConf.structured(schema)
    parsed = [(override, _parse_override(override, defaults)) for override in overrides]
    for (_, file), (_, override) in itertools.product(layers, parsed):
        _replace_alternatives(file, override)
    layers += parsed
    return _merge(defaults, layers, str(path or "settings"))  # type: ignore[return-value]


def config_from_mapping(schema: type[Schema], settings: Mapping[str, Any], origin: str) -> Schema:
    """Return the settings in a mapping that was read from the file `origin`.

    Raises:
        InputError: see `load_config`.
    """
    try:
        layer = OmegaConf.create(dict(settings))
    except OmegaConfBaseException as error:  # an unterminated interpolation, such as ${
        raise _omegaconf_error(error, origin) from None
    try:
        return _merge(OmegaConf.structured(schema), [(origin, layer)], origin)  # type: ignore[return-value]
    except InputError as error:  # checks inside the schema do not know the file
        raise InputError(str(error) if origin in str(error) else f"{origin}: {error}") from None
    except OverflowError as error:
        raise InputError(f"{origin}: a number is too large ({error}). Correct it.") from None


def save_config(config: Any, path: str | Path) -> None:
    """Write resolved settings as YAML. `load_config` returns an equal object from it."""
    write_text(path, to_yaml(config))


def to_yaml(config: Any) -> str:
    """Return settings as YAML."""
    return yaml.dump(_escaped(dataclasses.asdict(config)), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """Puts text that OmegaConf would read as a number, such as 1e-4, in quotes."""


_FIRST_CHARACTERS = [*"-+0123456789"]
_FLOAT = re.compile(r"[-+]?[0-9][0-9_]*\.?[0-9_]*[eE][-+]?[0-9]+$")
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, _FIRST_CHARACTERS)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(rf"(?:{NOT_DECIMAL.pattern})$"), _FIRST_CHARACTERS)


def _escaped(value: Any) -> Any:
    """Return `value` with the beginnings of interpolations in its texts escaped."""
    if isinstance(value, str):
        return value.replace("${", "\\${")
    if isinstance(value, Mapping):
        return {key: _escaped(item) for key, item in value.items()}
    return [_escaped(item) for item in value] if isinstance(value, list | tuple) else value


def keys_in_file(path: str | Path) -> set[str]:
    """Return the keys of the settings in a YAML file and in the files that it extends.

    Raises:
        InputError: see `load_config`.
    """
    return set(_leaf_keys(_read_yaml(Path(path), ())))


def keys_over_base(path: str | Path) -> set[str]:
    """Return the keys that a YAML file sets itself, if it extends another one; otherwise an empty set.

    Raises:
        InputError: see `load_config`.
    """
    _read_yaml(Path(path), ())  # checks it
    settings: Any = OmegaConf.load(path)
    return set(_leaf_keys(settings)) - {"extends"} if "extends" in settings else set()


def keys_in_override(override: str) -> set[str]:
    """Return the key of a `key=value` override, and those in its value if it is a mapping, such as `model={n_layer: 2}`."""
    key, _, text = override.partition("=")
    value = None
    if text.lstrip().startswith("{"):
        with suppress(yaml.YAMLError):  # reported when the override is parsed
            value = yaml.safe_load(text)
    return {key, *(_leaf_keys(OmegaConf.create({key: value})) if isinstance(value, dict) else ())}


def _merge(defaults: DictConfig, layers: Sequence[tuple[str, DictConfig]], name: str) -> object:
    """Merge the layers into the defaults and build the dataclass; `name` is the prefix of error messages about the merged settings."""
    for origin, layer in layers:
        _check_keys(defaults, layer, origin)
        _expand_home(layer)
    try:
        merged = OmegaConf.merge(defaults, *(layer for _, layer in layers))
    except OmegaConfBaseException:
        merged = _merge_one_by_one(defaults, layers)
    try:
        _check_finite(OmegaConf.to_container(merged, resolve=True))
        return OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise _omegaconf_error(error, name) from None


def _replace_alternatives(earlier: DictConfig, later: DictConfig) -> None:
    """If `later` sets one of the alternatives of a group, remove all of them from `earlier`: OmegaConf would merge the mappings."""
    for group, names in ALTERNATIVES.items():
        before, after = earlier._get_node(group), later._get_node(group)
        if isinstance(before, DictConfig) and isinstance(after, DictConfig) and any(name in after for name in names):
            for name in names:
                before.pop(name, None)


def _merge_one_by_one(merged: Any, layers: Sequence[tuple[str, DictConfig]]) -> Any:
    """Merge layer by layer to name the invalid one in the error. Slower: OmegaConf copies everything each time."""
    for origin, layer in layers:
        try:
            merged = OmegaConf.merge(merged, layer)
        except OmegaConfBaseException as error:
            raise _omegaconf_error(error, origin) from None
    return merged


def _expand_home(node: Any) -> None:
    """Expand `~/` at the start of values and keys. A shell does not expand it after `key=`."""
    for key in list(range(len(node)) if isinstance(node, ListConfig) else node):
        value = node._get_node(key)
        if isinstance(value, DictConfig | ListConfig) and not (value._is_none() or value._is_interpolation()):
            _expand_home(value)
        elif isinstance(value._value(), str) and value._value() != _expanded_path(value._value()):
            node[key] = _expanded_path(value._value())
        elif str(key) != _expanded_path(str(key)):
            node[_expanded_path(str(key))] = node.pop(key)


def _expanded_path(path: str) -> str:
    """Return `path` with `~/` expanded, at its start or after `hf:` (a dataset on disk)."""
    prefix, home, rest = path.partition("~/")
    return prefix + os.path.expanduser(home) + rest if prefix in ("", "hf:") else path


def _read_yaml(path: Path, extending: tuple[Path, ...]) -> DictConfig:
    """Read a YAML file merged into the file that it extends; `extending` are the files that led to this one."""
    if path.resolve() in extending:
        raise InputError(f"{path}: the file extends itself, directly or through another file. Remove one `extends`.")
    try:
        text = path.read_text("utf-8")
        _check_numbers(path, text)
        settings = OmegaConf.load(io.StringIO(text))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file. The presets are in configs/.") from None
    except (yaml.YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        message, remedy = " ".join(str(error).split()), "Correct the file."
        if path.is_dir():
            raise InputError(
                f"{path} is invalid: it is a folder. Name a file, such as {path / 'config.yaml'}."
            ) from None
        if "flow sequence" in message:
            remedy = "Put entries that contain brackets in quotes, as in ['data.text=[title]']."
        raise InputError(f"{path}: cannot be read as YAML ({message}). {remedy}") from None
    if not isinstance(settings, DictConfig):
        raise InputError(f"{path}: the file must hold `key: value` lines, not a {type(settings).__name__}.")
    base = settings.pop("extends", None)
    if base is None:
        return settings
    if not isinstance(base, str):
        raise InputError(
            f"{path}: extends={base} is invalid: it must be the path of another file, relative to this one."
        )
    base_settings = _read_yaml(path.parent / _expanded_path(base), (*extending, path.resolve()))
    _replace_alternatives(base_settings, settings)
    return OmegaConf.merge(base_settings, settings)  # type: ignore[return-value]


def _check_numbers(path: Path, text: str) -> None:
    """Raise InputError if a value in the text of a YAML file looks like a decimal number, but YAML reads it as another one."""
    pending, seen = [yaml.compose(text, Loader=yaml.SafeLoader)], set[int]()
    while pending:
        node = pending.pop()
        if id(node) in seen:  # an alias
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            pending += [value for _, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            pending += node.value
        elif isinstance(node, yaml.ScalarNode) and node.style is None and NOT_DECIMAL.fullmatch(node.value):
            raise InputError(
                f"{path}, line {node.start_mark.line + 1}: {node.value} is invalid: it must be a decimal number without colons, "
                "underscores and leading zeros. Correct it, or put text in quotes."
            )


def _leaf_keys(layer: DictConfig, prefix: str = "") -> Iterator[str]:
    for key in layer:
        value: Any = layer._get_node(key)
        if isinstance(value, DictConfig):
            yield from _leaf_keys(value, f"{prefix}{key!s}.")
        else:
            yield f"{prefix}{key!s}"


def _parse_override(override: str, defaults: DictConfig) -> DictConfig:
    key, equals, text = override.partition("=")
    if not equals or not re.fullmatch(r"\w+(\.[\w-]+)*", key):
        raise InputError(f"{override!r} is invalid: it must have the form key=value.")
    value: Any = text
    layer = OmegaConf.create()
    try:
        node = _find_node(defaults, key)
        if not isinstance(node, StringNode) and NOT_DECIMAL.fullmatch(text):
            raise InputError(f"{override!r} is invalid: the value must be a decimal number.")
        if isinstance(node, StringNode):  # a string is not parsed: 007 stays 007
            value = None if node._is_optional() and text in NULL else text
        else:
            parsed: Any = OmegaConf.create(f"value: {text}")
            value = parsed._get_node("value") if text else None
        OmegaConf.update(layer, key, value)
    except yaml.YAMLError:
        raise InputError(
            f"{override!r} is invalid: the value must be a number, true, false, null, a list or a mapping."
        ) from None
    except OmegaConfBaseException as error:
        raise _omegaconf_error(error, override) from None
    return layer


def _find_node(defaults: DictConfig, key: str) -> Any:
    """Return the node of a dotted key, or None if it does not exist."""
    node: Any = defaults
    for name in key.split("."):
        node = node._get_node(name) if isinstance(node, DictConfig) and name in node else None
    return node


def _check_keys(group: DictConfig, layer: DictConfig, origin: str, prefix: str = "") -> None:
    """Raise InputError if a key of `layer` does not exist in `group`, or a value has the wrong type.

    Args:
        group: default settings at `prefix`.
        layer: settings at `prefix` to check.
        origin: file or override that set them.
        prefix: dotted key of the group, with a dot at the end.
    """
    for key in map(str, layer):
        path = f"{prefix}{key}"
        value: Any = layer._get_node(key)
        if key not in group:
            path, known = _first_leaf(path, value), list(setting_keys(_root_schema(group)))
            if "." in key and path in known:
                nested = f"`{path.replace('.', ': {')}: ...{'}' * path.count('.')}`"
                raise InputError(f"{origin}: {path!r} must be written as a group in a file: {nested}")
            suggestion = suggest_key(path, known)
            if not suggestion and origin.startswith(f"{path}="):  # from the command line
                suggestion = "--help all lists the settings."
            raise InputError(f"{origin}: there is no setting {path!r}" + (f"; {suggestion}" if suggestion else ""))
        default = group._get_node(key)
        if _is_group(default):
            if not isinstance(value, DictConfig):
                inside = ", ".join(setting_keys(OmegaConf.get_type(default), f"{path}."))  # type: ignore[arg-type]
                raise InputError(f"{origin}: {path!r} is a group of settings. Set one of {inside}.")
            _check_keys(default, value, origin, path + ".")
        else:
            _check_kind(default, value, path, origin)


def _check_kind(default: Any, value: Any, key: str, origin: str) -> None:
    """Raise InputError if `default` is a list, mapping, boolean or text and `value` is of another kind."""
    setting = f"{key}={as_yaml(value._value())} is invalid:"
    if origin == f"{key}=":
        setting = f"{origin} is invalid: the value is empty;"
    prefix = "" if origin.startswith(f"{key}=") else f"{origin}: "  # an override shows key and value itself
    is_null = default._is_optional() and value._is_none()
    for kind, rule in ((ListConfig, "a list such as [a, b]"), (DictConfig, "a mapping such as {a: 1, b: 2}")):
        if not is_null and isinstance(default, kind) and not isinstance(value, kind) and not value._is_interpolation():
            remedy = _list_remedy(key, value) if kind is ListConfig else ""
            raise InputError(f"{prefix}{setting} it must be {rule}.{remedy}")
    if isinstance(default, BooleanNode) and type(value._value()) is int and value._value() not in (0, 1):
        raise InputError(f"{prefix}{setting} it must be true or false.")
    # YAML reads on as true and 1.10 as 1.1
    if isinstance(default, StringNode) and isinstance(value._value(), bool | float):
        raise InputError(f"{prefix}{setting} it must be text. Put it in quotes.")
    if isinstance(value, DictConfig):
        for name in value:
            item: Any = value._get_node(name)
            if ":" in str(name) and item._is_none():  # YAML reads {a:1} as the key `a:1`
                raise InputError(f"{origin}: {name!r} in {key} has no value. Put a space after its colon.")
            if not isinstance(name, str):
                raise InputError(f"{origin}: the name {name!r} in {key} is invalid: it must be text. Put it in quotes.")
            if get_origin(default._metadata.element_type) is list:
                if not isinstance(item, ListConfig):
                    raise InputError(
                        f"{origin}: {key}.{name}={as_yaml(_plain(item))} is invalid: it must be a list such as [a, b]."
                        f"{_list_remedy(f'{key}.{name}', item)}"
                    )
                _check_entries(item, f"{key}.{name}", origin)
    if isinstance(value, ListConfig) and not (value._is_none() or value._is_interpolation()):
        _check_entries(value, key, origin)


def _check_entries(values: ListConfig, key: str, origin: str) -> None:
    """Raise InputError if an entry of a list is a list or a mapping, as `optim.lr: 1` is in YAML."""
    for index in range(len(values)):
        entry = values._get_node(index)
        if isinstance(entry, DictConfig | ListConfig):
            raise InputError(
                f"{origin}: the entry {_plain(entry)} of {key} is invalid: it must be text or a number. Put it in quotes."
            )


def _list_remedy(key: str, value: Any) -> str:
    """Return the remedy for a list setting that is a single value; empty for null, empty text or a mapping."""
    is_item = not isinstance(value, DictConfig) and value._value() not in (None, "")
    return f" Set {key}=[{as_yaml(value._value())}]." if is_item else ""


def _plain(node: Any) -> Any:
    """Return the value of a node without classes of OmegaConf."""
    return OmegaConf.to_container(node) if isinstance(node, DictConfig | ListConfig) else node._value()


def _check_finite(value: Any, key: str = "") -> None:
    """Raise InputError if a number is infinite or NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{key}={value} is invalid: it must be a finite number.")
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        _check_finite(item, f"{key}.{name}" if key else str(name))


def _first_leaf(path: str, value: Any) -> str:
    """Return the dotted key of the first setting under `path`, which is `path` if `value` is not a mapping."""
    while isinstance(value, DictConfig) and len(value):
        key = next(iter(value))
        path, value = f"{path}.{key!s}", value._get_node(key)
    return path


def _root_schema(node: DictConfig) -> Any:
    """Return the schema of the whole configuration that contains `node`."""
    while node._get_parent() is not None:
        node = node._get_parent()  # type: ignore[assignment]
    return OmegaConf.get_type(node)


def _is_group(node: Any) -> TypeGuard[DictConfig]:
    return isinstance(node, DictConfig) and dataclasses.is_dataclass(OmegaConf.get_type(node))


def _omegaconf_error(error: OmegaConfBaseException, origin: str) -> InputError:
    """Translate an error of OmegaConf; `origin` is the file or the override that caused it."""
    message, key = (error.msg or str(error)).splitlines()[0], error.full_key
    for pattern, rule in CONVERSION_RULES:
        if key and (match := re.match(pattern, message)):
            value = match["value"] if "value" in match.groupdict() else "null"
            is_integral = rule == "an integer" and re.fullmatch(r"-?\d+\.0", value)
            if origin == f"{key}=":
                return InputError(f"{origin} is invalid: the value is empty; it must be {match.expand(rule)}.")
            remedy = f" Set {key}={value[:-2]}." if is_integral else ""  # 1e8 is a float in YAML
            message = f"{key}={value} is invalid: it must be {match.expand(rule)}.{remedy}"
            return InputError(message if origin.startswith(f"{key}=") else f"{origin}: {message}")
    return InputError(f"{origin}: {key}: {message}" if key else f"{origin}: {message}")
