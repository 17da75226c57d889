"""Public names, their signatures, and the paths by which pages and examples import them."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest

from tests.contract.drift import check
from tests.contract.import_paths import describe_import_paths, named_paths, resolve
from tests.contract.python_names import PACKAGES, describe_python


@pytest.fixture(scope="module", autouse=True)
def _everything_imported():
    """Once, before any test is watched for leaks: other libraries set environment variables when imported."""
    for path in named_paths():
        with contextlib.suppress(ImportError):
            resolve(path)


def test_public_names_are_as_recorded():
    check("python", describe_python())


def test_import_paths_are_as_recorded():
    check("import paths", describe_import_paths())


def test_every_path_on_pages_and_in_examples_imports():
    problems = []
    for path, place in named_paths().items():
        try:
            resolve(path)
        except ImportError as error:
            problems.append(f"{place}: {path}: {error}")
    assert not problems, "\n".join(problems)


def test_public_functions_say_on_which_ranks_to_call_them():
    functions = public_functions()
    assert len(functions) > 75
    silent = [name for name, function in functions.items() if "Ranks:" not in (inspect.getdoc(function) or "")]
    assert not silent, silent


def public_functions() -> dict[str, Callable[..., Any]]:
    """Public functions and methods of ours by name; methods that a base class documents are that class's."""
    found: dict[str, Callable[..., Any]] = {}
    for package in PACKAGES:
        for name in import_module(package).__all__:
            value = getattr(import_module(package), name)
            members = vars(value).items() if isinstance(value, type) else ()
            found |= {f"{name}.{key}": inspect.unwrap(getattr(value, key)) for key, _ in members if key[0] != "_"}
            found[name] = value
    return {
        name: function
        for name, function in found.items()
        if (inspect.isfunction(function) or inspect.ismethod(function)) and function.__module__.startswith("shardwise")
    }


def test_a_path_that_leads_nowhere_is_an_import_error():
    for path in ("shardwise.shrad", "shardwise.planning.absent", "shardwise.config.load.laod"):
        with pytest.raises(ImportError):
            resolve(path)
