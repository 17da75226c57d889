"""Copies of the agent skill in the folders where coding agents look for skills. No torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import ConfigError
from shardwise.pages import page_folder

SKILL = "shardwise-fsdp2"
AGENTS = {
    ".agents/skills": "Codex, Cursor, Gemini CLI, GitHub Copilot and others that follow agentskills.io",
    ".claude/skills": "Claude Code",
}
"""Folders of skills, in a project or the home folder, and the agents that read them."""
_DIGESTS = ".shardwise"  # digests of the files as installed: tells a copy of another version from a changed one


@dataclass(frozen=True, kw_only=True, slots=True)
class SkillCopy:
    """The copy at one place, compared with what shardwise ships."""

    path: Path
    state: str
    """`absent`, `current`, `outdated` (an unchanged copy of another version) or `changed`."""
    changed: tuple[str, ...] = ()
    """Files that were changed since they were installed."""
    stale: tuple[str, ...] = ()
    """Unchanged files of another version that this one no longer has."""


def skill_files(folder: Path | None = None) -> dict[str, bytes]:
    """Contents by relative path of a skill's pages, by default of the one that ships with shardwise."""
    folder = folder or page_folder(f"skills/{SKILL}")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*.md"))}


def default_places(base: Path) -> list[Path]:
    """Folders of skills of the agents that `base` has a folder for, or of all agents when it has none."""
    return [base / name for name in AGENTS if (base / name).parent.is_dir()] or [base / name for name in AGENTS]


def inspect_copy(folder: Path) -> SkillCopy:
    """Compare the copy in a folder of skills with what shardwise ships."""
    path = folder / SKILL
    new, found = skill_files(), skill_files(path)
    installed = set((path / _DIGESTS).read_text().split()) if (path / _DIGESTS).is_file() else set()
    differing = [name for name in found if found[name] != new.get(name)]
    unchanged = [name for name in differing if _digest(found[name]) in installed]
    changed = tuple(name for name in differing if name in new and name not in unchanged)
    stale = tuple(name for name in unchanged if name not in new)
    same = found.items() >= new.items() and not stale
    state = "changed" if changed else "current" if same else "outdated" if found.keys() & new.keys() else "absent"
    return SkillCopy(path=path, state=state, changed=changed, stale=stale)


def install_skill(folders: Iterable[Path], *, force: bool = False) -> list[SkillCopy]:
    """Put the skill into folders of skills, beside files of the user's own; return what was there before.

    Raises:
        ConfigError: Files were changed since they were installed, and `force` is not set; nothing was written.
    """
    before = [inspect_copy(folder) for folder in folders]
    changed = [str(copy.path / name) for copy in before for name in copy.changed]
    if changed and not force:
        raise ConfigError(
            "the installed skill was changed",
            where="\n".join(changed),
            why="the contents are neither this version's nor those that an earlier version installed",
            fix="keep your changes elsewhere and add --force, or install into another DIR",
        )
    new = skill_files()
    for copy in before:
        for name in copy.stale:
            (copy.path / name).unlink()
        for name, data in new.items():
            (copy.path / name).parent.mkdir(parents=True, exist_ok=True)
            (copy.path / name).write_bytes(data)
        (copy.path / _DIGESTS).write_text("".join(f"{_digest(data)}\n" for data in new.values()))
    return before


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
