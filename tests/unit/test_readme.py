"""README.md shows the tree of src/shardwise as it is."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src/shardwise"
ENTRY = re.compile(r"^(?P<indent> *)(?P<names>[\w./]+(?:, [\w./]+)*)(?:\s{2,}|\s*$)")


def tree_in(text: str) -> set[str]:
    """The paths under src/shardwise that the README's tree block names, folders with a trailing slash."""
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    block = next(block for block in blocks if block.startswith("src/shardwise/"))
    paths: set[str] = set()
    folders: list[tuple[int, str]] = []
    inside = False
    for line in block.splitlines():
        match = ENTRY.match(line)
        if match is None:
            continue
        indent, names = len(match["indent"]), match["names"].split(", ")
        if names == ["src/shardwise/"]:
            inside, folders = True, [(indent, "")]
            continue
        if inside and indent <= folders[0][0]:
            inside = False
        if not inside:
            continue
        while indent <= folders[-1][0]:
            folders.pop()
        for name in names:
            paths.add(folders[-1][1] + name)
        if names[0].endswith("/"):
            folders.append((indent, folders[-1][1] + names[0]))
    return paths


def tree_on_disk() -> set[str]:
    """Files and folders directly in the package; what is inside them stands in docs/architecture.md."""
    base = ROOT / "src/shardwise"
    files = {path.name for path in base.glob("*.py")}
    return files | {f"{path.parent.name}/" for path in base.glob("*/__init__.py")}


def test_tree_in_readme_is_the_tree_on_disk():
    shown, real = tree_in((ROOT / "README.md").read_text()), tree_on_disk()
    assert sorted(shown - real) == [], "README.md shows what is not there"
    assert sorted(real - shown) == [], "README.md does not show what is there"


def test_architecture_page_has_a_paragraph_for_every_package():
    page = (ROOT / "docs/architecture.md").read_text()
    described = set(re.findall(r"\*\*(\w+/)\*\*", page))
    packages = {name for name in tree_on_disk() if name.endswith("/")}
    assert described == packages


def test_every_file_says_what_it_is():
    silent = [path for path in SOURCE.rglob("*.py") if not ast.get_docstring(ast.parse(path.read_text()))]
    assert silent == []


def test_modules_are_whole_concepts_in_a_shallow_tree():
    sizes = {path: len(path.read_text().splitlines()) for path in SOURCE.rglob("*.py")}
    assert [str(path) for path, size in sizes.items() if size > 700] == []
    assert [str(path) for path in sizes if len(path.relative_to(SOURCE).parts) > 3] == []
    assert len(sizes) <= 240


def test_tree_is_read_with_its_folders():
    lines = ["```", "src/shardwise/", "  a.py   what a does", "  b/     what b does", "    c.py  x"]
    text = "\n".join([*lines, "    d.py, e.py  y", "tests/", "  f.py  z", "```"])
    assert tree_in(text) == {"a.py", "b/", "b/c.py", "b/d.py", "b/e.py"}


@pytest.mark.parametrize("command", ["make train", "make test"])
def test_readme_names_commands_that_exist(command: str):
    assert command in (ROOT / "README.md").read_text()
    assert re.search(rf"^{command.split()[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
