"""`shardwise ckpt`: look into, check, convert and compare checkpoints of any format. No torch until it runs."""

from __future__ import annotations

import enum
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.options import Format, FormatOption, drawn_progress, show, status_of
from shardwise.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

ckpt = typer.Typer(
    help="Look into, check, convert and compare checkpoints of any format.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


class Target(enum.StrEnum):
    """What `convert` writes."""

    DCP = "dcp"
    FULL = "full"
    SAFETENSORS = "safetensors"


PathArgument = Annotated[str, typer.Argument(metavar="PATH", help="A checkpoint: a folder, a file or a URL.")]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="What it was saved from, where its files do not name the parameters (FSDP1's LOCAL state dicts): "
        "a reference name, a local Hugging Face folder or config, or module:callable.",
    ),
]


@ckpt.command()
def inspect(
    path: PathArgument,
    model: ModelOption = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    format: FormatOption = Format.TEXT,
) -> None:
    """Say what is in a checkpoint: names, shapes, dtypes, bytes, step, ranks, and what is plainly wrong."""
    from shardwise.checkpointing.inspecting import inspect_checkpoint

    found = inspect_checkpoint(path, model=_load(model))
    show(found, format)
    for tensor in found.tensors if tensors and format is Format.TEXT else ():
        typer.echo(f"  {tensor.name}  {tensor.dtype} {list(tensor.shape)}")
    raise typer.Exit(status_of(found.findings))


@ckpt.command()
def verify(path: PathArgument, format: FormatOption = Format.TEXT) -> None:
    """Read a checkpoint through: checksums, coverage, truncation. Exit status 1 when something is wrong."""
    from shardwise.checkpointing.inspecting import verify_checkpoint

    with drawn_progress(in_bytes=True, wanted=format is Format.TEXT) as progress:
        findings = verify_checkpoint(path, progress=progress)
    if format is Format.JSON:
        names = ("code", "message", "where", "fix", "severity")  # a severity is a string
        rows = [{name: getattr(finding, name) for name in names} for finding in findings]
        typer.echo(json.dumps({"path": path, "findings": rows}))
    else:
        typer.echo("\n".join(map(str, findings)) or f"{path}: nothing wrong")
    raise typer.Exit(status_of(findings))


@ckpt.command()
def convert(
    src: Annotated[str, typer.Argument(metavar="SRC", help="A checkpoint of any format.")],
    dst: Annotated[str, typer.Argument(metavar="DST", help="A new folder; a file for full; a URL for dcp.")],
    to: Annotated[Target, typer.Option("--to", help="What to write.")] = Target.DCP,
    dtype: Annotated[
        str | None, typer.Option(help="What floating-point weights become, as in bfloat16; default: as they are.")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Of one safetensors file, as in 5GB.")] = "5GB",
    model: ModelOption = None,
    config: Annotated[
        Path | None, typer.Option(help="Where config.json and the tokenizer are, for safetensors; else beside SRC.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace weights or a file that are there.")] = False,
    format: FormatOption = Format.TEXT,
) -> None:
    """Convert a checkpoint to another format, a bounded part at a time."""
    from shardwise.checkpointing.convert import convert_checkpoint
    from shardwise.units import format_bytes, parse_bytes

    try:
        max_shard_bytes = parse_bytes(max_shard_size)
    except ValueError as error:
        raise ConfigError(str(error), where="--max-shard-size", fix="write it as in 5GB") from None
    with drawn_progress(in_bytes=True, wanted=format is Format.TEXT) as progress:
        done = convert_checkpoint(
            src,
            dst,
            to.value,
            dtype=dtype,
            max_shard_bytes=max_shard_bytes,
            model=_load(model),
            config=config,
            overwrite=overwrite,
            progress=progress,
        )
    if format is Format.JSON:
        names = ("path", "format", "source_format", "num_tensors", "num_bytes", "left_out")
        typer.echo(json.dumps({name: getattr(done, name) for name in names}, default=str))
        return
    typer.echo(f"{done.path}: {done.format}, {done.num_tensors} tensors, {format_bytes(done.num_bytes)}")
    if done.left_out:
        names = list(done.left_out)
        typer.echo(f"left out {len(names)} names of {src}: {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}")


@ckpt.command()
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint of any format.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another, of the same format or not.")],
    model: ModelOption = None,
    format: FormatOption = Format.TEXT,
) -> None:
    """Compare two checkpoints: names, shapes, largest difference. Exit status 1 when they differ."""
    from shardwise.checkpointing.inspecting import diff_checkpoints

    with drawn_progress(in_bytes=True, wanted=format is Format.TEXT) as progress:
        found = diff_checkpoints(a, b, model=_load(model), progress=progress)
    show(found, format)
    raise typer.Exit(0 if found.is_empty else 1)


def _load(name: str | None) -> nn.Module | None:
    """The model on the meta device, or none."""
    if name is None:
        return None
    from shardwise.cli.running import add_to_path
    from shardwise.models.load import load_model

    add_to_path(os.getcwd())
    return load_model(name)
