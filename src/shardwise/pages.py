"""Where the pages about rules and errors lie: in the wheel beside this file, in a clone under docs/. No torch."""

from pathlib import Path

_HERE = Path(__file__).parent


def page_folder(kind: str) -> Path:
    """The folder of the pages of one kind, `rules` or `errors`."""
    shipped = _HERE / "docs" / kind
    return shipped if shipped.is_dir() else _HERE.parents[1] / "docs" / kind
