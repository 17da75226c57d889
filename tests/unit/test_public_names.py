"""The public names: each loads, and is what its home calls by that name."""

import ast
from pathlib import Path

import pytest

import shardwise


@pytest.mark.parametrize("name", shardwise.__all__)
def test_public_name_loads(name: str):
    assert getattr(shardwise, name) is not None


def test_type_checkers_see_the_names_that_load():
    stub = ast.parse(Path(shardwise.__file__).with_suffix(".pyi").read_text())
    imported = [
        str(alias.asname) for node in ast.walk(stub) if isinstance(node, ast.ImportFrom) for alias in node.names
    ]
    assert ["__version__", *sorted(imported)] == shardwise.__all__


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'shrad'"):
        shardwise.shrad  # noqa: B018  # pyrefly: ignore[missing-attribute]
