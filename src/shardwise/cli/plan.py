"""`shardwise plan`: print the sharding plan of a model. No torch until it runs."""

from __future__ import annotations

import json
import traceback
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.options import Format, FormatOption, SetOption
from shardwise.errors import ConfigError, ShardwiseError, nearest

if TYPE_CHECKING:
    from torch import nn

    from shardwise.config.run import RunConfig
    from shardwise.config.schema import MeshConfig
    from shardwise.planning.plan import Group, Plan

_RUN_FILES = (".yaml", ".yml")


def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A reference name, a local Hugging Face folder or config, module:callable, or a run file (RUN.yaml).",
        ),
    ],
    settings: SetOption = None,
    nproc: Annotated[
        int | None,
        typer.Option(min=1, help="Number of ranks to plan for, on this machine's device; default: as for `train`."),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="Number of ranks to plan for, with one GPU each; needs no GPU.")
    ] = None,
    explain: Annotated[
        str | None,
        typer.Option(
            metavar="GROUP", help="Print the details of a group, given by its name or by a module or parameter."
        ),
    ] = None,
    format: FormatOption = Format.TEXT,
) -> None:
    """Show how a model will be sharded, and why, without starting ranks.

    The model is built on the meta device: no weights are read and the ranks need not exist.

    \b
    shardwise plan llama3-70b --gpus 64
    shardwise plan llama3-70b --gpus 64 --set mesh.replicate=8
    shardwise plan llama3-70b --gpus 64 --explain model.layers.0
    shardwise plan run.yaml --set shard.offload=true
    shardwise plan my_module:build_model --nproc 2 --format json
    """
    from shardwise.cli.running import user_code
    from shardwise.config.load import load
    from shardwise.config.run import RunConfig

    is_run = model.endswith(_RUN_FILES)
    config = load(RunConfig, Path(model) if is_run else {"model": model}, settings or ())
    from shardwise.distributed.mesh import draw_mesh
    from shardwise.planning.plan import render_group
    from shardwise.planning.planner import plan as plan_model
    from shardwise.training.run import plan_run

    with user_code():
        mesh = _mesh(config.mesh, nproc, gpus)
        if is_run:  # the same plan as in `train`
            made = plan_run(_build(config), config.shard, mesh)
        else:
            made = plan_model(_build(config), config.shard, mesh=mesh)
    group = None if explain is None else _find(made, explain)
    if format is Format.JSON:
        typer.echo(made.to_json() if group is None else json.dumps(asdict(group), sort_keys=True))
    elif group is not None:
        typer.echo(render_group(made, group))
    else:
        drawn = draw_mesh(mesh)
        typer.echo(f"{made}\n{drawn}" if drawn.count("\n") > 1 else str(made))  # more than one axis


def _mesh(mesh: MeshConfig, nproc: int | None, gpus: int | None) -> MeshConfig:
    """Return the mesh of the run, with all its sizes."""
    from shardwise.cli.running import number_of_ranks

    if nproc is not None and gpus is not None:
        raise ConfigError(
            f"--nproc is {nproc} and --gpus is {gpus}",
            where="--nproc, --gpus",
            why="both say how many ranks the run has; --gpus also says that each has a GPU",
            fix=f"pass --gpus {gpus} or --nproc {nproc}",
        )
    if gpus is not None and mesh.device == "cpu":
        raise ConfigError(
            f"--gpus is {gpus}, but mesh.device is cpu",
            where="--gpus, mesh.device",
            why="the ranks of such a run use no GPU",
            fix=f"pass --nproc {gpus}, or --set mesh.device=auto",
        )
    if gpus is not None and mesh.device == "auto":
        mesh = replace(mesh, device="cuda")
    sized = mesh.num_ranks if mesh.shard is not None else None  # the mesh gives the number of ranks
    return replace(mesh, shard=mesh.sizes(nproc or gpus or sized or number_of_ranks())["shard"])


def _build(config: RunConfig) -> nn.Module:
    from shardwise.training.run import load_run_model

    try:
        return load_run_model(config)
    except ShardwiseError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        frame = [frame for frame in frames if "/torch/" not in frame.filename][-1]  # the innermost frame outside torch
        raise ConfigError(
            f"{config.model} cannot be built: {type(error).__name__}: {error}",
            where=f"{frame.filename}:{frame.lineno} in {frame.name}",
            why="the model is built on the meta device, where tensors have shapes and no values",
            fix='make it work under `with torch.device("meta"):`',
        ) from error


def _find(made: Plan, name: str) -> Group:
    """Return the group of this name, or the only one with this module, parameter, or descendants of it."""
    wanted = name.partition("+")[0]  # the first module of a group of several
    known = [(group, {group.name, *group.modules, *_parameters(group)}) for group in made.groups]
    exact = [group for group, names in known if wanted in names]
    below = [group for group, names in known if any(each.startswith(f"{wanted}.") for each in names)]
    for found in (exact, below):
        if len(found) == 1:
            return found[0]
    names = [group.name for group in made.groups]
    near = below[0].name if below else nearest(name, names, cutoff=0.5)
    raise ConfigError(
        f"there is no group {name!r}" + (f" (did you mean {near!r}?)" if near else ""),
        where="--explain",
        why="a group is named as the plan prints it, or by a module or parameter that no other group has",
        fix=f"--explain '{near or names[-1]}'; without --explain, the plan lists every group",
    )


def _parameters(group: Group) -> list[str]:
    return [name for parameter in group.parameters for name in (parameter.fqn, *parameter.aliases)]
