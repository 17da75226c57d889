"""`shardwise ckpt`: inspect, verify, convert and compare checkpoints of any format. No torch until it runs."""

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
    help="Inspect, verify, convert and compare checkpoints of any format.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


class Target(enum.StrEnum):
    """Output format of `convert`."""

    DCP = "dcp"
    FULL = "full"
    SAFETENSORS = "safetensors"


PathArgument = Annotated[str, typer.Argument(metavar="PATH", help="A checkpoint: a folder, a file or a URL.")]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="The model it was saved from; needed if its files do not name the parameters (FSDP1's LOCAL state dicts): "
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
    """Show the contents of a checkpoint: names, shapes, dtypes, bytes, step, ranks, and obvious errors."""
    from shardwise.checkpointing.inspecting import inspect_checkpoint

    found = inspect_checkpoint(path, model=_load(model))
    show(found, format)
    for tensor in found.tensors if tensors and format is Format.TEXT else ():
        typer.echo(f"  {tensor.name}  {tensor.dtype} {list(tensor.shape)}")
    raise typer.Exit(status_of(found.findings))


@ckpt.command()
def verify(path: PathArgument, format: FormatOption = Format.TEXT) -> None:
    """Verify a checkpoint: checksums, coverage, truncation. Exit status 1 if it has errors."""
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
    to: Annotated[Target, typer.Option("--to", help="Output format.")] = Target.DCP,
    dtype: Annotated[
        str | None, typer.Option(help="Dtype of floating-point weights, as in bfloat16; default: unchanged.")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Maximum size of one safetensors file, as in 5GB.")] = "5GB",
    model: ModelOption = None,
    config: Annotated[
        Path | None,
        typer.Option(help="Folder of config.json and the tokenizer, for safetensors; default: SRC's folder."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace existing weights or an existing file.")
    ] = False,
    format: FormatOption = Format.TEXT,
) -> None:
    """Convert a checkpoint to another format with bounded memory."""
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
    b: Annotated[str, typer.Argument(metavar="B", help="Another checkpoint of any format.")],
    model: ModelOption = None,
    format: FormatOption = Format.TEXT,
) -> None:
    """Compare two checkpoints: names, shapes, largest difference. Exit status 1 if they differ."""
    from shardwise.checkpointing.inspecting import diff_checkpoints

    with drawn_progress(in_bytes=True, wanted=format is Format.TEXT) as progress:
        found = diff_checkpoints(a, b, model=_load(model), progress=progress)
    show(found, format)
    raise typer.Exit(0 if found.is_empty else 1)


def _load(name: str | None) -> nn.Module | None:
    """Load the model on the meta device, or return None."""
    if name is None:
        return None
    from shardwise.cli.running import add_to_path
    from shardwise.models.load import load_model

    add_to_path(os.getcwd())
    return load_model(name)
