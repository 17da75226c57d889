"""The public names: each loads, and is what its home calls by that name."""

import ast
from pathlib import Path

import pytest

import shardwise

SOURCE = Path(shardwise.__file__).read_text()


@pytest.mark.parametrize("name", shardwise.__all__)
def test_public_name_loads(name: str):
    assert getattr(shardwise, name) is not None


def test_type_checkers_see_the_names_that_load():
    imported = {
        alias.asname: f"{node.module}"
        for node in ast.walk(ast.parse(SOURCE))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }
    assert imported == shardwise._HOME_OF


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'shrad'"):
        shardwise.shrad  # noqa: B018  # pyrefly: ignore[missing-attribute]
