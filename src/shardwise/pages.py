"""The pages that ship with shardwise: in the wheel beside this file, in a clone at its root. No torch."""

from pathlib import Path

from shardwise.errors import ConfigError

_HERE = Path(__file__).parent


def page_folder(path: str) -> Path:
    """The folder at a path of the repository: `docs/rules`, `docs/errors`, or that of the agent skill."""
    shipped = _HERE / path
    return shipped if shipped.is_dir() else _HERE.parents[1] / path


def read_pages(path: str) -> dict[str, str]:
    """The text of every page `SWnnn.md` of a folder, by its code.

    Raises:
        ConfigError: The folder has none.
    """
    pages = {page.stem: page.read_text(encoding="utf-8") for page in sorted(page_folder(path).glob("SW*.md"))}
    if not pages:
        raise ConfigError(
            f"the pages of {path} are missing",
            where=str(page_folder(path)),
            why="they are part of the package",
            fix="install shardwise again",
        )
    return pages
