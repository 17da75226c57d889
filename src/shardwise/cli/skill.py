"""`shardwise skill`: install or print the skill for coding agents."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.options import Format, FormatOption
from shardwise.errors import ConfigError, fix_name
from shardwise.pages import page_folder

SKILL = "shardwise-fsdp2"
AGENTS = {
    ".agents/skills": "Codex, Cursor, Gemini CLI, GitHub Copilot and others that follow agentskills.io",
    ".claude/skills": "Claude Code",
}
"""Folders of skills, in a project or the home folder, and the agents that read them."""
_DIGESTS = ".shardwise"  # digests of the installed files, to distinguish outdated copies from modified ones


@dataclass(frozen=True, kw_only=True, slots=True)
class SkillCopy:
    """State of an installed copy, compared with the shipped skill."""

    path: Path
    state: str
    """`absent`, `current`, `outdated` (an unmodified copy of another version) or `changed`."""
    changed: tuple[str, ...] = ()
    """Files that were modified after installation."""
    stale: tuple[str, ...] = ()
    """Unmodified files of another version that this version lacks."""


def skill_files(folder: Path | None = None) -> dict[str, bytes]:
    """Return the contents of a skill's pages by relative path; default: the shipped skill."""
    folder = folder or page_folder(f"skills/{SKILL}")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*.md"))}


def inspect_copy(folder: Path) -> SkillCopy:
    """Compare the copy in a folder of skills with the shipped skill."""
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
    """Install the skill into folders of skills unless a copy was modified; return the previous states."""
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


skill = typer.Typer(
    help="Show or install the skill that teaches coding agents to use FSDP2.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@skill.command()
def install(
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="DIR", help="Folder of skills; default: those of the agents used in this project."),
    ] = None,
    home: Annotated[bool, typer.Option("--home", help="Install for all projects, in the home folder.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite modified files.")] = False,
    listing: Annotated[bool, typer.Option("--list", help="List the standard folders; install nothing.")] = False,
    format: FormatOption = Format.TEXT,
) -> None:
    """Install the skill for coding agents.

    An unmodified copy of another version is replaced. A modified one is an error unless --force is given.
    """

    if listing:
        places = [(base / name, agents) for base in (Path.cwd(), Path.home()) for name, agents in AGENTS.items()]
        copies = [(inspect_copy(place), agents) for place, agents in places]
        rows = [{"path": str(copy.path), "state": copy.state, "agents": agents} for copy, agents in copies]
        lines = [f"{row['state']:<9} {row['path']}  ({row['agents']})" for row in rows]
    else:
        places = [(Path.home() if home else Path.cwd()) / name for name in AGENTS]
        folders = [folder] if folder else [place for place in places if place.parent.is_dir()] or places
        rows = [{"path": str(copy.path), "before": copy.state} for copy in install_skill(folders, force=force)]
        lines = [f"installed {row['path']}" for row in rows]
    key = "places" if listing else "installed"
    typer.echo(json.dumps({key: rows}) if format is Format.JSON else "\n".join(lines))


@skill.command()
def show(
    topic: Annotated[
        str | None, typer.Argument(metavar="TOPIC", help="Reference page; default: the main page.")
    ] = None,
    format: FormatOption = Format.TEXT,
) -> None:
    """Print the skill's main page, or one of its references."""
    pages = {Path(name).stem: data.decode() for name, data in skill_files().items()}
    name = topic or "SKILL"
    if name not in pages:
        fix = fix_name(name, pages, "choose one of the topics")
        raise ConfigError(f"the skill has no topic {name!r}", where="TOPIC", why=f"topics: {', '.join(pages)}", fix=fix)
    typer.echo(json.dumps({"topic": name, "page": pages[name]}) if format is Format.JSON else pages[name].rstrip())
