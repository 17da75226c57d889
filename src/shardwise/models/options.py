"""`model_options`: changes to the shape of a model, checked by name, type and sense before anything is built."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import nn

from shardwise.errors import ConfigError


def reshape(shape: Any, options: Mapping[str, Any], where: str = "model_options") -> Any:
    """`shape`, a frozen dataclass, with some of its fields changed; a mapping changes the fields of an inner shape.

    Raises:
        ConfigError: There is no such field, its type is another, or the heads do not divide the width. All at once.
    """
    problems: list[str] = []
    changed = _reshape(shape, options, where, problems) if options else shape
    problems += _senseless(changed, where) if not problems else []
    if problems:
        raise ConfigError(
            f"{len(problems)} problem{'s' if len(problems) > 1 else ''} in {where}",
            where="\n".join(problems),
            why=f"they are fields of {type(shape).__name__}",
            fix=f"use {', '.join(field.name for field in fields(shape))}",
        )
    return changed


def with_arguments(build: Callable[..., nn.Module], options: Mapping[str, Any], name: str) -> Callable[[], nn.Module]:
    """`build` with `options` as keyword arguments.

    Raises:
        ConfigError: It does not take one of them, or needs one that is absent.
    """
    try:
        inspect.signature(build).bind(**options)
    except TypeError as error:
        raise ConfigError(
            f"{name} cannot be called with {', '.join(options) or 'nothing'}: {error}",
            where="model, model_options",
            why="model_options are the keyword arguments of a `module:callable`",
            fix=f"give what it takes: {name.partition(':')[2]}{inspect.signature(build)}",
        ) from None
    except ValueError:  # written in C: no signature to read
        pass
    return lambda: build(**options)


def check_names(options: Mapping[str, Any], names: Iterable[str], where: str) -> None:
    """Refuse options that a config file has no name for.

    Raises:
        ConfigError: There are some. All at once.
    """
    known = list(names)
    problems = [_unknown(name, known, "model_options") for name in options if name not in known]
    if problems:
        raise ConfigError(
            f"{len(problems)} of model_options cannot be used",
            where="\n".join(problems),
            why=f"they change what {where} says",
            fix=f"write it into {where}, or use one of the names there",
        )


def _reshape(shape: Any, options: Mapping[str, Any], where: str, problems: list[str]) -> Any:
    known = {field.name: getattr(shape, field.name) for field in fields(shape)}
    changes: dict[str, Any] = {}
    for name, value in options.items():
        path = f"{where}.{name}"
        if name not in known:
            problems.append(_unknown(name, known, where))
        elif is_dataclass(known[name]) and isinstance(value, Mapping):
            changes[name] = _reshape(known[name], value, path, problems)
        elif (wanted := _as_kind_of(known[name], value)) is None:
            problems.append(f"{path}: {value!r} is not {_words(known[name])}")
        else:
            changes[name] = wanted
    return replace(shape, **changes)


def _as_kind_of(old: Any, new: Any) -> Any:
    """`new` in the type of `old`, or None."""
    match old:
        case bool():
            return new if isinstance(new, bool) else None
        case int():
            return new if isinstance(new, int) and not isinstance(new, bool) and new > 0 else None
        case float():
            return float(new) if isinstance(new, (int, float)) and not isinstance(new, bool) else None
        case tuple():
            fine = isinstance(new, (list, tuple)) and new and all(_as_kind_of(old[0], item) is not None for item in new)
            return tuple(new) if fine else None
        case _:
            return None


def _words(value: Any) -> str:
    match value:
        case bool():
            return "true or false"
        case int():
            return "a whole number of at least 1"
        case float():
            return "a number"
        case tuple():
            return f"a list, each {_words(value[0])}"
        case _:
            return f"a mapping of fields of {type(value).__name__}"


def _senseless(shape: Any, where: str) -> list[str]:
    """Heads that do not divide what they share."""
    width = getattr(shape, "hidden_size", getattr(shape, "width", None))
    heads, kv_heads = getattr(shape, "num_heads", None), getattr(shape, "num_kv_heads", None)
    problems = []
    if width and heads and width % heads:
        problems.append(f"{where}.num_heads: {heads} heads do not divide a width of {width}")
    if heads and kv_heads and heads % kv_heads:
        problems.append(f"{where}.num_kv_heads: {kv_heads} do not divide {heads} heads")
    experts, per_token = getattr(shape, "num_experts", None), getattr(shape, "experts_per_token", None)
    if experts and per_token and per_token > experts:
        problems.append(f"{where}.experts_per_token: {per_token} of {experts} experts")
    return problems


def _unknown(name: str, names: Iterable[str], where: str) -> str:
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f"{where}.{name}: there is no such option" + (f" (did you mean {near[0]!r}?)" if near else "")
