"""Where the pages that ship with shardwise lie: in the wheel beside this file, in a clone at its root. No torch."""

from pathlib import Path

_HERE = Path(__file__).parent


def page_folder(path: str) -> Path:
    """The folder at a path of the repository: `docs/rules`, `docs/errors`, or that of the agent skill."""
    shipped = _HERE / path
    return shipped if shipped.is_dir() else _HERE.parents[1] / path
