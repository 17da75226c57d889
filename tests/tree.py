"""src/shardwise as a tree, each file with its first sentence: `python -m tests.tree` rewrites docs/architecture.md."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src/shardwise"
PAGE = ROOT / "docs/architecture.md"
# The order in which data flows, as in DESIGN and the README; files come by name.
ORDER = (
    "config", "models", "planning", "sharding", "checkpointing", "diagnosing", "comparing", "training", "fsdp1",
    "integrations", "explaining", "rules", "report", "cli",
)  # fmt: skip
_MARKER = re.compile(r"(?<=<!-- tree -->\n```\n).*?(?=```\n)", re.DOTALL)


def first_sentence(path: Path) -> str:
    """The first sentence of a file's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    sentence = re.split(r"(?<=[.!?])\s", " ".join(text.split()), maxsplit=1)[0]
    return sentence.rstrip(".")


def lines_of(folder: Path, depth: int = 0) -> list[str]:
    """One line for each file and folder below."""
    indent = "  " * depth
    files = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
    folders = sorted((path for path in folder.iterdir() if (path / "__init__.py").is_file()), key=_place)
    lines = [f"{indent}{path.name:<{30 - len(indent)}} {first_sentence(path)}" for path in files]
    for inner in folders:
        lines.append(f"{indent}{inner.name + '/':<{30 - len(indent)}} {first_sentence(inner / '__init__.py')}")
        lines += lines_of(inner, depth + 1)
    return [line.rstrip() for line in lines]


def page() -> str:
    """docs/architecture.md as it should be."""
    return _MARKER.sub(lambda _: "\n".join(lines_of(SOURCE)) + "\n", PAGE.read_text())


def _place(path: Path) -> tuple[int, str]:
    return (ORDER.index(path.name) if path.name in ORDER else len(ORDER), path.name)


if __name__ == "__main__":
    PAGE.write_text(page())
