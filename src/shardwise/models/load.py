"""Build the model of a MODEL argument: a reference name, a Hugging Face config, or `module:callable`.

Nothing is downloaded and no weights are read.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.config.load import change_config
from shardwise.errors import ConfigError, did_you_mean, import_optional, nearest, raise_listed
from shardwise.models import llama, moe, multimodal, transformer

Builder = Callable[[], nn.Module]

_FAMILIES: tuple[tuple[Callable[[Any], nn.Module], dict[str, Any]], ...] = (
    (transformer.Transformer, dict(transformer.SHAPES)),
    (llama.Llama, dict(llama.SHAPES)),
    (moe.Moe, dict(moe.SHAPES)),
    (multimodal.Multimodal, dict(multimodal.SHAPES)),
)


def reference_names() -> list[str]:
    """The names of the reference models, smallest first within a family."""
    return [name for _, shapes in _FAMILIES for name in shapes]


def load_model(
    name: str, *, device: str | torch.device = "meta", options: Mapping[str, Any] | None = None
) -> nn.Module:
    """Build the model `name` on `device`.

    Args:
        name: A reference name (`llama3-8b`), a `config.json` or its local folder, or `module:callable`, which returns a
            module.
        device: Device of the parameters; on `meta` they take no memory.
        options: Overrides of a reference model's shape or of a config, or arguments of the callable.

    Raises:
        ConfigError: The model or option does not exist, or the model cannot be built.
        EnvironmentProblem: The library of the config is not installed.
    """
    build = find_model(name, options)
    with torch.device(device):
        model = build()
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"{name} returned a {type(model).__name__}",
            where=name,
            why="a model is a torch.nn.Module",
            fix="return the module itself",
        )
    return model


def find_model(name: str, options: Mapping[str, Any] | None = None) -> Builder:
    """Return the builder of the model `name`; see `load_model`."""
    options = options or {}
    for kind, shapes in _FAMILIES:
        if name in shapes:
            shape = _reshape(shapes[name], options)
            return lambda: kind(shape)
    if Path(name).exists():
        return _from_config_file(Path(name), options)
    if is_callable_name(name):
        return _with_arguments(find_callable(name), options, name)
    if "/" in name or name.endswith(".json"):
        raise ConfigError(
            f"{name} does not exist",
            where=name,
            why="a Hugging Face model is loaded from a local folder or config.json; nothing is downloaded",
            fix=f"download it first, or use one of {', '.join(reference_names())}",
        )
    raise _unknown(name, reference_names(), "reference model", "MODEL")


def is_callable_name(name: str) -> bool:
    """Whether `name` has the form `module:callable`."""
    return ":" in name and not Path(name).exists()


def find_callable(name: str) -> Callable[..., Any]:
    """Import the object `module:callable`; a ConfigError if it does not exist."""
    module_name, _, attribute = name.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists, but one of its imports does not
        raise ConfigError(
            f"there is no module {module_name!r}",
            where=name,
            why="`module:callable` is imported as in Python",
            fix="run it in the folder of the module, or install the module",
        ) from None
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = [n for n, value in vars(found).items() if callable(value) and not n.startswith("_")]
            raise _unknown(part, names, f"callable of {module_name}", name)
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(
            f"{name} is a {type(found).__name__}, not callable",
            where=name,
            why="it must be a function or class",
            fix="use a function or class",
        )
    return found


def _from_config_file(path: Path, options: Mapping[str, Any]) -> Builder:
    file = path / "config.json" if path.is_dir() else path
    try:
        described = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{file} cannot be read: {error}",
            where=str(path),
            why="a model folder needs a config.json",
            fix="use a folder with a config.json, or the file itself",
        ) from None
    if "_class_name" in described:  # a config of diffusers
        library = _import("diffusers", str(file))
        kind = _class(library, described["_class_name"], file)
        _check_names(options, described, str(file))
        return lambda: kind.from_config({**described, **options})
    library = _import("transformers", str(file))
    # from_pretrained reads only the local config, without network access.
    config = library.AutoConfig.from_pretrained(str(file), local_files_only=True)
    _check_names(options, [*config.to_dict(), *config.attribute_map], str(file))
    for option, value in options.items():
        setattr(config, option, value)
    architectures = described.get("architectures") or []
    if architectures:
        kind = _class(library, architectures[0], file)
        return lambda: kind._from_config(config)
    return lambda: library.AutoModel.from_config(config)


def _class(library: Any, name: str, file: Path) -> Any:
    kind = getattr(library, name, None)
    if kind is None:
        raise ConfigError(
            f"{library.__name__} {library.__version__} has no class {name}",
            where=str(file),
            why="the config names the class of the model",
            fix=f"install a {library.__name__} that has it, or use a `module:callable`",
        )
    return kind


def _import(library: str, where: str) -> Any:
    return import_optional(library, where=where, why=f"the config is one of {library}'s", fix=f"pip install {library}")


def _unknown(name: str, names: list[str], kind: str, where: str) -> ConfigError:
    near = nearest(name, names, cutoff=0.5)
    return ConfigError(
        f"there is no {kind} {name!r}{did_you_mean(name, names, cutoff=0.5)}",
        where=where,
        why="MODEL is a reference name, a local Hugging Face folder or config, or `module:callable`",
        fix=f"use {near}" if near else f"use one of {', '.join(names) or 'its functions'}",
    )


def _with_arguments(build: Callable[..., nn.Module], options: Mapping[str, Any], name: str) -> Builder:
    """Bind `options` as keyword arguments of `build`, which must accept them."""
    try:
        inspect.signature(build).bind(**options)
    except TypeError as error:
        raise ConfigError(
            f"{name} cannot be called with {', '.join(options) or 'nothing'}: {error}",
            where="model, model_options",
            why="model_options are the keyword arguments of a `module:callable`",
            fix=f"its signature: {name.partition(':')[2]}{inspect.signature(build)}",
        ) from None
    except ValueError:  # written in C: no signature
        pass
    return lambda: build(**options)


def _check_names(options: Mapping[str, Any], names: Iterable[str], where: str) -> None:
    """Raise a ConfigError for options that a config file does not have."""
    known = list(names)
    problems = [
        f"model_options.{name}: there is no such option{did_you_mean(name, known, cutoff=0.5)}"
        for name in options
        if name not in known
    ]
    why, fix = f"they change what {where} says", f"write it into {where}, or use one of the names there"
    raise_listed(problems, "{num} of model_options cannot be used", why=why, fix=fix, most=len(problems))


def _reshape(shape: Any, options: Mapping[str, Any]) -> Any:
    """Return `shape`, a frozen dataclass, with fields replaced; numbers of heads and experts must be consistent."""
    changed = change_config(shape, options, "model_options")
    names = ", ".join(field.name for field in fields(shape))
    raise_listed(
        _senseless(changed),
        "{num} of model_options are invalid",
        why=f"they are fields of {type(shape).__name__}",
        fix=f"use {names}",
    )
    return changed


def _senseless(shape: Any) -> list[str]:
    """Heads that do not divide what they share."""
    width = getattr(shape, "hidden_size", getattr(shape, "width", None))
    heads, kv_heads = shape.num_heads, getattr(shape, "num_kv_heads", None)
    experts, per_token = getattr(shape, "num_experts", None), getattr(shape, "experts_per_token", None)
    problems = []
    if width % heads:
        problems.append(f"model_options.num_heads: {heads} heads do not divide a width of {width}")
    if kv_heads and heads % kv_heads:
        problems.append(f"model_options.num_kv_heads: {kv_heads} do not divide {heads} heads")
    if experts and per_token > experts:
        problems.append(f"model_options.experts_per_token: {per_token} of {experts} experts")
    return problems
