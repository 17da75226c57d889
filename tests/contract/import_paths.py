"""Every path by which the README, the pages and the examples reach into shardwise."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.contract.command_line import ROOT
from tests.contract.drift import read_record
from tests.contract.python_names import PACKAGES, Describer

_FENCE = re.compile(r"^( *)```+ ?(?:python|py)\b[^\n]*\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
_IN_PROSE = re.compile(r"`(shardwise(?:\.[a-z_0-9]+)+(?:\.[A-Za-z_]\w*)?)")
_PIECE = "import paths"
# Named apart from its module on docs/diagnosing.md.
_ALSO = ("shardwise.diagnosing.recording.dump_collectives",)


def describe_import_paths() -> dict[str, Any]:
    """Each path that the pages name today or named when the contract was recorded, with what it leads to."""
    describer = Describer()
    described: dict[str, Any] = {}
    for path in sorted({*named_paths(), *_in_prose(), *_ALSO, *read_record().get(_PIECE, {})}):
        try:
            value = resolve(path)
        except (ImportError, AttributeError):
            continue  # `test_python.py` says which of the pages' paths these are
        module, _, name = path.rpartition(".")
        is_public = module in PACKAGES and name in import_module(module).__all__
        described[path] = "a public name" if is_public else describer.describe(value)
    return described


def resolve(path: str) -> Any:
    """What a dotted path leads to: a module, or a name in one.

    Raises:
        ImportError: Nothing.
    """
    try:
        return import_module(path)
    except ModuleNotFoundError as error:
        above, _, name = path.rpartition(".")
        if not above or error.name is None or not path.startswith(error.name):
            raise
        try:
            return getattr(resolve(above), name)
        except AttributeError:
            raise ImportError(f"{above} has no {name}") from None


def named_paths() -> dict[str, str]:
    """Each path that a piece of code imports or uses, and a place where it stands."""
    found: dict[str, str] = {}
    for place, code in _pieces_of_code():
        for path in _paths_in(code):
            found.setdefault(path, place)
    return found


def _pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")),
            *sorted((ROOT / "examples").rglob("*.md"))]  # fmt: skip


def _in_prose() -> Iterator[str]:
    for page in _pages():
        yield from _IN_PROSE.findall(page.read_text(encoding="utf-8"))


def _pieces_of_code() -> Iterator[tuple[str, str]]:
    for page in _pages():
        for indent, code in _FENCE.findall(page.read_text(encoding="utf-8")):
            del indent
            yield str(page.relative_to(ROOT)), textwrap.dedent(code)
    for script in sorted((ROOT / "examples").rglob("*.py")):
        yield str(script.relative_to(ROOT)), script.read_text(encoding="utf-8")


def _paths_in(code: str) -> Iterator[str]:
    """`shardwise...` as imported, and names used through `import shardwise as sw`; code that is cut short has none."""
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return
    names = {"sw": "shardwise"}  # pages say `sw.` without repeating the import
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "shardwise":
                    names[alias.asname or "shardwise"] = alias.name if alias.asname else "shardwise"
                    yield alias.name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "shardwise":
            yield from (f"{node.module}.{alias.name}" for alias in node.names if alias.name != "*")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if names.get(node.value.id) != "shardwise":
                continue
            yield f"shardwise.{node.attr}"
