"""`shardwise skill`: the skill that teaches a coding agent to use FSDP2. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.options import Format, FormatOption

skill = typer.Typer(
    help="Show the skill that teaches a coding agent to use FSDP2, or install it where agents look.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@skill.command()
def install(
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="DIR", help="A folder of skills; default: those of the agents used in this project."),
    ] = None,
    home: Annotated[bool, typer.Option("--home", help="Install for all projects, in the home folder.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that were changed.")] = False,
    listing: Annotated[bool, typer.Option("--list", help="List the standard places; install nothing.")] = False,
    format: FormatOption = Format.TEXT,
) -> None:
    """Copy the skill where coding agents look for skills.

    An unchanged copy of another version is replaced. A changed one is an error unless --force is given.
    """
    from shardwise.skill_copies import AGENTS, default_places, inspect_copy, install_skill

    if listing:
        places = [(base / name, agents) for base in (Path.cwd(), Path.home()) for name, agents in AGENTS.items()]
        copies = [(inspect_copy(place), agents) for place, agents in places]
        rows = [{"path": str(copy.path), "state": copy.state, "agents": agents} for copy, agents in copies]
        lines = [f"{row['state']:<9} {row['path']}  ({row['agents']})" for row in rows]
    else:
        folders = [folder] if folder else default_places(Path.home() if home else Path.cwd())
        rows = [{"path": str(copy.path), "before": copy.state} for copy in install_skill(folders, force=force)]
        lines = [f"installed {row['path']}" for row in rows]
    key = "places" if listing else "installed"
    typer.echo(json.dumps({key: rows}) if format is Format.JSON else "\n".join(lines))


@skill.command()
def show(
    topic: Annotated[str | None, typer.Argument(metavar="TOPIC", help="A reference; default: the main page.")] = None,
    format: FormatOption = Format.TEXT,
) -> None:
    """Print the skill's main page, or one of its references."""
    from difflib import get_close_matches

    from shardwise.errors import ConfigError
    from shardwise.skill_copies import skill_files

    pages = {Path(name).stem: data.decode() for name, data in skill_files().items()}
    name = topic or "SKILL"
    if name not in pages:
        close = get_close_matches(name, pages, n=1)
        fix = f"did you mean {close[0]!r}?" if close else "choose one of the topics"
        raise ConfigError(f"the skill has no topic {name!r}", where="TOPIC", why=f"topics: {', '.join(pages)}", fix=fix)
    typer.echo(json.dumps({"topic": name, "page": pages[name]}) if format is Format.JSON else pages[name].rstrip())
