"""From a MODEL argument to a module: a reference name, a Hugging Face config, or `module:callable`.

Nothing is fetched from a network, and weights are not read: the model is built from its description.
"""

from __future__ import annotations

import difflib
import importlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.errors import ConfigError, EnvironmentProblem
from shardwise.models import llama, moe, multimodal, transformer
from shardwise.models.options import check_names, reshape, with_arguments

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
    """Build the model that `name` means, on `device`.

    Args:
        name: A reference name (`llama3-8b`), a local folder with a `config.json` or such a file, or
            `module:callable`, which returns a module.
        device: Where parameters are created; on `meta` they cost nothing.
        options: Changes to a reference model's shape or to what a config says, or arguments of the callable.

    Raises:
        ConfigError: There is no such model or option, or it cannot be built.
        EnvironmentProblem: The library that describes it is not installed.

    Ranks:
        Local.
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
    """What builds the model that `name` means; see `load_model`."""
    options = options or {}
    for kind, shapes in _FAMILIES:
        if name in shapes:
            shape = reshape(shapes[name], options)
            return lambda: kind(shape)
    if Path(name).exists():
        return _from_config_file(Path(name), options)
    if is_callable_name(name):
        return with_arguments(find_callable(name), options, name)
    if "/" in name or name.endswith(".json"):
        raise ConfigError(
            f"{name} does not exist",
            where=name,
            why="a Hugging Face model is read from a local folder or config.json; nothing is downloaded",
            fix=f"download it first, or name one of {', '.join(reference_names())}",
        )
    raise _unknown(name, reference_names(), "reference model", "MODEL")


def is_callable_name(name: str) -> bool:
    """Whether `name` has the form `module:callable`."""
    return ":" in name and not Path(name).exists()


def find_callable(name: str) -> Callable[..., Any]:
    """The object that `module:callable` names.

    Raises:
        ConfigError: The module cannot be imported, or has no such callable.
    """
    module_name, _, attribute = name.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists; something that it imports does not
        raise ConfigError(
            f"there is no module {module_name!r}",
            where=name,
            why="`module:callable` is imported as Python would",
            fix="run it from the folder that holds the module, or install it",
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
            why="it is called to build what is needed",
            fix="name a function or class",
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
            why="a model folder holds a config.json that describes the model",
            fix="name a folder with a config.json, or the file itself",
        ) from None
    if "_class_name" in described:  # how diffusers writes it
        library = _import("diffusers", str(file))
        kind = _class(library, described["_class_name"], file)
        check_names(options, described, str(file))
        return lambda: kind.from_config({**described, **options})
    library = _import("transformers", str(file))
    # from_pretrained of a file or folder reads only the description, never a network.
    config = library.AutoConfig.from_pretrained(str(file), local_files_only=True)
    check_names(options, [*config.to_dict(), *config.attribute_map], str(file))
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
            why="the config names the class that builds the model",
            fix=f"install a {library.__name__} that has it, or name a `module:callable` that builds it",
        )
    return kind


def _import(library: str, where: str) -> Any:
    try:
        return importlib.import_module(library)
    except ModuleNotFoundError:
        raise EnvironmentProblem(
            f"{library} is not installed",
            where=where,
            why=f"the config is one of {library}'s",
            fix=f"pip install {library}",
        ) from None


def _unknown(name: str, names: list[str], kind: str, where: str) -> ConfigError:
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return ConfigError(
        f"there is no {kind} {name!r}" + (f" (did you mean {near[0]!r}?)" if near else ""),
        where=where,
        why="MODEL is a reference name, a local Hugging Face folder or config, or `module:callable`",
        fix=f"use {near[0]}" if near else f"use one of {', '.join(names) or 'its functions'}",
    )
