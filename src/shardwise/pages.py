"""Where the pages that ship with shardwise lie: in the wheel beside this file, in a clone at its root. No torch."""

from pathlib import Path

SKILL = "shardwise-fsdp2"
"""Name of the agent skill, and of its folder."""

_HERE = Path(__file__).parent


def page_folder(kind: str) -> Path:
    """The folder of the pages of one kind, `rules` or `errors`."""
    return _shipped(f"docs/{kind}")


def skill_folder() -> Path:
    """The folder of the agent skill: SKILL.md and references/."""
    return _shipped(f"skills/{SKILL}")


def _shipped(path: str) -> Path:
    shipped = _HERE / path
    return shipped if shipped.is_dir() else _HERE.parents[1] / path
