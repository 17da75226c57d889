"""The command line's side of the contract: commands, arguments, options, defaults; and how to run it from here."""

from __future__ import annotations

import contextlib
import enum
import inspect
import io
import os
import sys
import tomllib
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
import yaml

from tests.contract.annotations import evaluate, type_text

ROOT = Path(__file__).parents[2]
SCRIPT = "shardwise"


@dataclass(frozen=True)
class Ran:
    """What a command did."""

    status: int
    output: str
    errors: str


def pyproject() -> dict[str, Any]:
    """The project's own description."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def entry_point() -> Any:
    """The function behind the `shardwise` command."""
    module, _, name = pyproject()["project"]["scripts"][SCRIPT].partition(":")
    return getattr(import_module(module), name)


def run(*arguments: str | Path, stdin: str = "", folder: Path | None = None) -> Ran:
    """Run the command in this process, as its script does: through the same function, to its exit status."""
    output, errors, status = io.StringIO(), io.StringIO(), 0
    given = io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8")
    with _standing_in(folder), contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        before, sys.stdin = sys.stdin, given
        try:
            entry_point()([str(argument) for argument in arguments])
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:  # the script would show it and end with 1
            traceback.print_exc(file=errors)
            status = 1
        finally:
            sys.stdin = before
    return Ran(status, output.getvalue(), errors.getvalue())


@contextlib.contextmanager
def _standing_in(folder: Path | None) -> Iterator[None]:
    """In a folder, with the path for imports given back: commands add the folder to it."""
    before, path = os.getcwd(), list(sys.path)
    os.chdir(folder or before)
    try:
        yield
    finally:
        os.chdir(before)
        sys.path[:] = path


def describe_command_line() -> dict[str, Any]:
    """Every command with its parameters, the scripts, extras and hooks that an installation offers."""
    project = pyproject()["project"]
    hooks = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    return {
        "commands": dict(_commands(SCRIPT, typer.main.get_command(_app()))),
        "scripts": sorted(project["scripts"]),
        "extras": sorted(set(project["optional-dependencies"]) - {"dev"}),
        "pre-commit hooks": {hook["id"]: hook["entry"] for hook in hooks},
    }


def _app() -> typer.Typer:
    """The application that the entry point runs: the one in its module that commands were added to."""
    apps = [value for value in entry_point().__globals__.values() if isinstance(value, typer.Typer)]
    return max(apps, key=lambda app: len(app.registered_commands) + len(app.registered_groups))


def _commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    callback = inspect.unwrap(command.callback) if command.callback is not None else None
    described: dict[str, Any] = {}
    for parameter in command.params:
        if parameter.name != "help":
            described[_spelled(parameter)] = _parameter(parameter, callback)
    if getattr(command, "hidden", False):
        described["hidden"] = "true"
    yield name, described
    for below, each in sorted(getattr(command, "commands", {}).items()):
        yield from _commands(f"{name} {below}", each)


def _spelled(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"argument {parameter.name}"
    return " / ".join([*parameter.opts, *parameter.secondary_opts])


def _parameter(parameter: Any, callback: Any) -> dict[str, Any]:
    described: dict[str, Any] = {"type": _type(parameter.name, callback), "default": _default(parameter.default)}
    for name in ("required", "multiple", "is_flag", "hidden"):
        if getattr(parameter, name, False):
            described[name] = True
    if parameter.nargs != 1:
        described["nargs"] = parameter.nargs
    if getattr(parameter, "envvar", None):
        described["environment"] = parameter.envvar
    return described


def _type(name: str, callback: Any) -> str:
    """As the command's own function says it: how typer keeps it differs between its versions."""
    annotation = inspect.signature(callback).parameters[name].annotation
    met: list[type] = []
    text = type_text(annotation, callback.__module__, met=met.append)
    evaluated = evaluate(annotation, callback.__module__)
    limits = [
        f"{limit}={value}"
        for info in getattr(evaluated, "__metadata__", ())
        for limit in ("min", "max")
        if (value := getattr(info, limit, None)) is not None
    ]
    for kind in met:
        if issubclass(kind, enum.Enum):
            text = text.replace(kind.__name__, "one of " + ", ".join(str(member.value) for member in kind))
    return " ".join([text.removesuffix(" | None"), *limits])


def _default(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, list | tuple):
        return [_default(part) for part in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
