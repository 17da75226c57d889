"""Load a config from YAML and `--set a.b=c`; all problems are reported together. No torch."""

from __future__ import annotations

import copy
import dataclasses
import json
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from shardwise.errors import ConfigError, did_you_mean, raise_listed

C = TypeVar("C")
_FIX = "shardwise train --print-config shows every setting with its default"


class _UniqueKeyLoader(yaml.SafeLoader):
    """Rejects duplicate keys; YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} occurs twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def load(cls: type[C], source: str | Path | Mapping[str, Any] | None = None, overrides: Iterable[str] = ()) -> C:
    """Read a config.

    Args:
        cls: A dataclass of `config.schema`.
        source: A YAML file, a mapping, or None for the defaults.
        overrides: Strings `a.b=value`, applied in order; each value is parsed as YAML.

    Raises:
        ConfigError: Lists all problems, with the nearest name for unknown settings.
    """
    name = str(source) if isinstance(source, (str, Path)) else "the config"
    values = copy.deepcopy(dict(source)) if isinstance(source, Mapping) else read_yaml(source)
    problems = [f"--set {one}: {problem}" for one in overrides if (problem := _apply(values, one)) is not None]
    config: C | None = None
    try:
        config = TypeAdapter(cls).validate_python(values)
    except ValidationError as error:
        problems += _explain(error.errors(), cls)
    num = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
    if problems or config is None:
        raise ConfigError(f"{num} in {name}", where="\n".join(problems), fix=_FIX)
    return config


def check_ranges(config: object, section: str = "") -> None:
    """Raise if a setting is out of the range of its type; `section` is its path in a run file."""
    try:
        TypeAdapter(type(config)).validate_python(_plain(config))
    except ValidationError as error:
        items = [item for item in error.errors() if item["type"].startswith(("greater_than", "less_than"))]
        prefix = f"{section}." if section else ""
        problems = [prefix + line for line in _explain(items, type(config))]
        raise_listed(problems, "{num} setting(s) out of range", fix="set them in range", most=len(problems))


def change_config(config: C, changes: Mapping[str, Any], section: str) -> C:
    """Return a config with some settings changed, those of an inner config by a mapping."""
    cls: Any = type(config)
    values = json.dumps(_merged(_plain(config), changes), default=repr)
    try:
        return TypeAdapter(cls).validate_json(values, strict=True)
    except ValidationError as error:
        problems = [f"{section}.{line}" for line in _explain(error.errors(), cls)]
        num = f"{{num}} problem{'s' if len(problems) > 1 else ''} in {section}"
        names = ", ".join(field.name for field in dataclasses.fields(cls))
        raise_listed(problems, num, why=f"they are fields of {cls.__name__}", fix=f"use {names}", most=len(problems))
        raise


def _merged(values: Any, changes: Any) -> Any:
    if not isinstance(values, dict) or not isinstance(changes, Mapping):
        return changes
    return values | {name: _merged(values.get(name), change) for name, change in changes.items()}


def to_yaml(config: object, notes: Mapping[str, Iterable[str]] | None = None) -> str:
    """Return the config as YAML for `load`; `notes` are comments above the settings at their paths."""
    return "".join(line + "\n" for line in _yaml_lines(_plain(config), notes or {}, ""))


def _yaml_lines(values: Mapping[str, Any], notes: Mapping[str, Iterable[str]], prefix: str) -> Iterator[str]:
    for name, value in values.items():
        path = prefix + name
        yield from (f"# {line}".rstrip() for note in notes.get(path, ()) for line in note.splitlines())
        if isinstance(value, dict) and any(note.startswith(f"{path}.") for note in notes):
            yield f"{name}:"
            yield from (f"  {line}" for line in _yaml_lines(value, notes, f"{path}."))
        else:
            yield from yaml.safe_dump({name: value}, sort_keys=False, allow_unicode=True).splitlines()


def read_yaml(path: str | PathLike[str] | None) -> dict[str, Any]:
    """Return the mapping in a YAML file; empty without a file."""
    if path is None:
        return {}
    try:
        values = yaml.load(Path(path).read_text(), _UniqueKeyLoader)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        fix = "name an existing YAML file, or none"
        raise ConfigError(f"cannot read {path}: {reason.lower()}", where=str(path), fix=fix) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        text = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"not YAML: {text}", where=f"{path}{line}", fix=_FIX) from None
    if not isinstance(values, dict | None):
        what = f"{path} holds a {type(values).__name__}, not settings"
        raise ConfigError(what, where=str(path), why="a run file maps names to values", fix=_FIX)
    return values or {}


def _apply(values: dict[str, Any], override: str) -> str | None:
    """Set one `a.b=value`, creating mappings as needed; return an error or None."""
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        return "not of the form a.b=value"
    place: Any = values
    for depth, key in enumerate(keys[:-1]):
        inner = place[int(key)] if isinstance(place, list) and _is_index(place, key) else None
        if isinstance(place, dict):
            inner = place.setdefault(key, {})
        if not isinstance(inner, (dict, list)):
            return f"{'.'.join(keys[: depth + 1])} holds no settings of its own"
        place = inner
    if isinstance(place, list) and not _is_index(place, keys[-1]):
        return f"{'.'.join(keys[:-1])} is a list of {len(place)}"
    last: Any = int(keys[-1]) if isinstance(place, list) else keys[-1]
    try:
        place[last] = yaml.load(text, _UniqueKeyLoader)
    except yaml.YAMLError:
        return "the value is not YAML; put it in quotes"
    return None


def _is_index(items: list[Any], key: str) -> bool:
    return key.isdigit() and int(key) < len(items)


def _explain(items: Iterable[Mapping[str, Any]], cls: type) -> Iterator[str]:
    """Yield one line per field; pydantic reports each branch of a union separately."""
    by_path: dict[tuple[str | int, ...], list[str]] = {}
    for item in items:
        path, owner = _locate(cls, item["loc"])
        text = item["msg"][0].lower() + item["msg"][1:]
        if item["type"] == "unexpected_keyword_argument":
            names = [field.name for field in dataclasses.fields(owner)] if owner is not None else []  # pyrefly: ignore
            text = "unknown setting" + did_you_mean(str(path[-1]), names, f" (there are: {', '.join(names)})")
        elif item["type"] != "missing":
            text = f"{text.partition(', unable to ')[0]}, got {item['input']!r}"
        by_path.setdefault(path, []).append(text)
    for path, texts in by_path.items():
        # `input should be 'a', got 1` and `input should be 'b', got 1` share their start and end.
        start, end = "input should be ", f", got {texts[0].rpartition(', got ')[2]}"
        if len(texts) > 1 and all(text.startswith(start) and text.endswith(end) for text in texts):
            wanted = dict.fromkeys(text[len(start) : -len(end)] for text in texts)
            texts = [f"{start}{' or '.join(wanted)}{end}"]
        yield f"{'.'.join(map(str, path)) or 'the whole config'}: {' or '.join(dict.fromkeys(texts))}"


def _locate(cls: type, loc: tuple[str | int, ...]) -> tuple[tuple[str | int, ...], type | None]:
    """Return the setting's path, without pydantic's names of union branches, and its class."""
    path: list[str | int] = []
    candidates: list[type] = [cls]
    owner: type | None = cls
    for position, part in enumerate(loc):
        if isinstance(part, int):
            path.append(part)
            continue
        holder = next((kind for kind in candidates if part in typing.get_type_hints(kind)), None)
        if holder is not None:
            path.append(part)
            owner = holder
            candidates = _dataclasses_in(typing.get_type_hints(holder)[part])
        elif position == len(loc) - 1 and candidates:
            path.append(part)  # unknown to all these dataclasses: a misspelled name
            owner = candidates[0]
    return tuple(path), owner


def _dataclasses_in(hint: Any) -> list[type]:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint) and not isinstance(hint, types.GenericAlias):
        return [hint]
    return [found for argument in typing.get_args(hint) for found in _dataclasses_in(argument)]


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
        return {name: _plain(inner) for name, inner in pairs if not callable(inner)}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return {key: _plain(inner) for key, inner in value.items()} if isinstance(value, dict) else value
