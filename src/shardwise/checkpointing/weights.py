"""load_weights(), save_weights(), load_full() and save_full(): full weights or runs, gathered and streamed."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from shardwise.checkpointing.contents import ITEM_BYTES, Contents, StoredTensor
from shardwise.checkpointing.formats import safetensors
from shardwise.checkpointing.formats.detect import open_checkpoint, require_names
from shardwise.checkpointing.formats.full import FullWriter, full_tree
from shardwise.checkpointing.formats.rank_files import TORCH_SUFFIXES
from shardwise.checkpointing.hugging_face import in_model_layout
from shardwise.checkpointing.loading import load_run, open_for
from shardwise.checkpointing.names import (
    KeyReport,
    ModelTensor,
    Rename,
    find_sections,
    model_tensors,
    refuse_unregistered,
    rename_contents,
)
from shardwise.checkpointing.reading import RequestReader, Verify, open_on_ranks
from shardwise.checkpointing.state import FlatState, RunObjects, Stateful, refuse_empty, refuse_unusable
from shardwise.checkpointing.storage import bytes_of, counting, place, trim_malloc
from shardwise.distributed.agreement import Channel, is_first, on_rank_zero, raise_on_all_ranks, run_on_all
from shardwise.distributed.mesh import widest_mesh
from shardwise.errors import CheckpointError, ConfigError, require_choice
from shardwise.models.configs import hugging_face_config
from shardwise.planning.settings import dtype_name
from shardwise.progress import Progress
from shardwise.sharding.adapters import CONFIG_FILE as ADAPTER_CONFIG
from shardwise.sharding.adapters import adapter_keys, peft_config, refuse_other_adapters, without_adapters
from shardwise.sharding.full_params import gather_in_buckets, in_first_rank_order
from shardwise.sharding.inventory import class_name, take_inventory
from shardwise.sharding.materialize import mesh_of
from shardwise.sharding.registry import names_elsewhere
from shardwise.units import parse_bytes


def sidecar_files(model: Any, dtype: str | None = None) -> dict[str, bytes]:
    """Return the files by name that transformers or diffusers needs to open this model's weights, cast to `dtype`."""
    config = getattr(model, "config", None)
    if config is None:
        return {}
    stored = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    stored = getattr(torch, dtype) if dtype is not None else stored
    if hasattr(config, "to_json_string"):  # transformers
        config = copy.deepcopy(config)
        config.architectures = [class_name(model)]
        config.dtype = stored
        found = {"config.json": config.to_json_string().encode()}
        generation = getattr(model, "generation_config", None)
        if generation is not None and hasattr(generation, "to_json_string"):
            found["generation_config.json"] = generation.to_json_string().encode()
        return found
    if (described := hugging_face_config(config)) is not None:
        return {"config.json": json.dumps({**described, "dtype": dtype_name(stored)}, indent=2).encode() + b"\n"}
    if not _is_of_diffusers(model):
        return {}
    written = {**json.loads(model.to_json_string()), "_class_name": class_name(model)}
    return {"config.json": json.dumps(written, indent=2, sort_keys=True).encode() + b"\n"}


def _is_of_diffusers(model: nn.Module) -> bool:
    return isinstance(getattr(model, "_internal_dict", None), dict) and hasattr(model, "to_json_string")


_BUCKET_BYTES = 32 << 20
_TRIM_BYTES = 64 << 20


def save_weights(
    model: nn.Module,
    path: str | Path,
    format: Literal["safetensors", "torch", "peft"] = "safetensors",
    dtype: torch.dtype | str | None = None,
    *,
    max_shard_bytes: int | str | None = safetensors.DEFAULT_SHARD_BYTES,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> None:
    """Write full, unsharded weights: parameters and persistent buffers, under the names of the unsharded model.

    Tensors are all-gathered in buckets and written immediately, so no rank holds the full model. A tied tensor is
    written once (`torch`: under each of its names, sharing memory). Files appear only when complete.

    Args:
        model: Sharded (by shardwise or by hand) or unsharded model.
        path: For safetensors a file `x.safetensors`, or a folder that transformers and diffusers can open: weights,
            index, and the model's config if it has one. For torch a file such as `weights.pt`.
        format: `safetensors`; `torch` for a state dict that `torch.load(weights_only=True)` reads; `peft` for a folder
            that peft opens, with only the adapters.
        dtype: Dtype to cast floating-point tensors to, such as `bfloat16`.
        max_shard_bytes: Maximum bytes of tensors in one file of a folder, as in `"2GB"`; None: a single file.
        overwrite: Replace existing weights; other files in a folder are kept.
        progress: Receives the written bytes.

    Raises:
        ConfigError: The format or dtype is unknown, or the path has the suffix of another format.
        CheckpointError: The weights cannot be written, or the model has no values or corrupt values.

    Ranks:
        Collective over the ranks that share the model; the first rank writes. Every rank raises.
    """
    mesh = mesh_of(model, take_inventory(model))
    tensors = run_on_all(lambda: _check(model, path, format), mesh, CheckpointError)
    target = float_dtype(dtype, "save_weights(dtype=...)")
    adapters = adapter_keys(model) if format == "peft" else {}
    named = {adapters.get(tensor.name, tensor.name): tensor.tensor for tensor in tensors}
    infos = [
        StoredTensor(name, target if target and each.is_floating_point() else dtype_name(each.dtype), tuple(each.shape))
        for name, each in named.items()
    ]
    options: dict[str, Any] = {"overwrite": overwrite}
    if format == "torch":
        tree = {name: info for tensor, info in zip(tensors, infos, strict=True) for name in tensor.names}
        writer = FullWriter(local_path(path), tree, **options)
    else:
        if format == "peft":
            described = json.dumps(peft_config(model), indent=2, sort_keys=True).encode() + b"\n"
            options |= {"stem": "adapter_model", "sidecars": {ADAPTER_CONFIG: described}, "max_shard_bytes": None}
        else:
            stem = "diffusion_pytorch_model" if _is_of_diffusers(model) else "model"
            sidecars = sidecar_files(model, target)
            options |= {"stem": stem, "sidecars": sidecars, "max_shard_bytes": _limit(max_shard_bytes)}
        writer = safetensors.SafetensorsWriter(local_path(path), infos, **options)
    stream_gathered(writer, named, mesh, progress)


def stream_gathered(
    writer: safetensors.SafetensorsWriter | FullWriter,
    tensors: Mapping[str, torch.Tensor],
    mesh: DeviceMesh | None,
    progress: Progress | None = None,
) -> None:
    """All-gather tensors in buckets and write them on the first rank; collective over the mesh.

    The first rank's writer determines the tensors, their dtypes and their order.
    """
    on_rank_zero(writer.check, group=mesh)  # before anything is gathered
    named = [(info.name, tensors[info.name]) for info in writer.order]
    infos = {info.name: info for info in writer.order}
    ordered = [
        (infos.get(name) or StoredTensor(name, dtype_name(tensor.dtype), tuple(tensor.shape)), tensor)
        for name, tensor in in_first_rank_order(named, mesh)
    ]
    writes, error = is_first(mesh), None
    with counting(progress if writes else None, sum(info.num_bytes for info, _ in ordered), "saving") as count:
        chunks = _gathered(ordered, writes, count)
        try:
            if writes:
                writer.write(chunks)
        except Exception as caught:
            error = caught
        try:
            for _ in chunks:  # the other ranks are still gathering: this rank must take part until the end
                pass
        except Exception as caught:
            error = error or caught
    raise_on_all_ranks(error, group=mesh, kind=CheckpointError)


def _gathered(
    named: Sequence[tuple[StoredTensor, torch.Tensor]], keep: bool, count: Callable[[int], None]
) -> Iterator[tuple[StoredTensor, memoryview]]:
    passed = 0
    # Groups of consecutive tensors of one dtype: the cast is done before the all-gather.
    for dtype, group in itertools.groupby(named, key=lambda pair: pair[0].dtype):
        infos, tensors = zip(*group, strict=True)
        pairs = ((info.name, tensor.detach()) for info, tensor in zip(infos, tensors, strict=True))
        gathered = gather_in_buckets(pairs, bucket_bytes=_BUCKET_BYTES, dtype=getattr(torch, dtype), keep=keep)
        for info, (_, full) in zip(infos, gathered, strict=True):
            yield info, memoryview(b"") if full is None else bytes_of(full.to("cpu").contiguous())
            count(info.num_bytes)
            passed += info.num_bytes
            if passed >= _TRIM_BYTES:
                passed = 0
                trim_malloc()


def refuse_suffix(path: str | Path, format: str, torch_format: str) -> None:
    """Raise a ConfigError if the path has the suffix of another format."""
    is_torch = str(path).endswith(TORCH_SUFFIXES)
    if format in ("safetensors", "dcp") and is_torch:
        fix = f"pass {torch_format}, or name a folder" + (" or a file that ends in .safetensors" * (format != "dcp"))
    elif format != "safetensors" and str(path).endswith(".safetensors"):
        fix = 'pass format="safetensors", or name ' + ("a folder" if format == "dcp" else "a file that ends in .pt")
    else:
        return
    raise ConfigError(
        f"format is {format!r}, but the path ends in {Path(path).suffix}",
        where=str(path),
        why="readers detect the format from the file extension",
        fix=fix,
    )


def _check(model: nn.Module, path: str | Path, format: str) -> list[ModelTensor]:
    require_choice(format, ("safetensors", "torch", "peft"), where="save_weights(format=...)")
    refuse_suffix(path, format, 'format="torch"')
    local_path(path)
    refuse_unusable(model)
    refuse_stage(model)
    tensors = model_tensors(model)
    if format == "peft":
        peft_config(model)  # raises if there are no adapters
        tensors = [tensor for tensor in tensors if tensor.name in adapter_keys(model)]
    else:
        refuse_unregistered(model)
    refuse_empty(tensors)
    return tensors


def refuse_stage(model: nn.Module) -> None:
    """Raise if the model is a pipeline stage: weights are gathered only over the ranks of one stage."""
    if others := names_elsewhere(model):
        raise CheckpointError(
            f"{type(model).__name__} is a stage of a pipeline",
            where=f"{len(others)} tensors of other stages",
            why="weights are gathered over the ranks that share a model, and each stage is a separate model",
            fix='save with Checkpointer, then shardwise.convert_checkpoint(checkpoint, path, format="safetensors")',
        )


def local_path(path: str | Path) -> Path:
    """Return the path; raise for a URL of an object store: single files are written only to a local disk."""
    if isinstance(found := place(path), Path):
        return found
    raise CheckpointError(
        "weights are written to a local disk only",
        where=found,
        why="a file is committed by an atomic rename, which object stores lack",
        fix="save to a local folder and upload that; Checkpointer writes to object stores",
    )


_SHORT_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "half": "float16"}


def float_dtype(dtype: torch.dtype | str | None, where: str) -> str | None:
    """Return the name of a floating-point dtype, or None for None; raise a ConfigError for any other dtype."""
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    name = _SHORT_NAMES.get(name, name)
    if name not in ITEM_BYTES or not name.startswith(("float", "bfloat")):
        raise ConfigError(
            f"{name!r} is not a floating-point dtype",
            where=where,
            why="floating-point tensors are cast to it",
            fix="pass one such as torch.bfloat16 or 'float32'",
        )
    return name


def _limit(max_shard_bytes: int | str | None) -> int | None:
    try:
        limit = None if max_shard_bytes is None else parse_bytes(max_shard_bytes)
        if limit is not None and limit < 1:
            raise ValueError(f"max_shard_bytes is {limit}")
    except ValueError as error:
        raise ConfigError(str(error), where="save_weights(max_shard_bytes=...)", fix="pass e.g. '5GB'") from None
    return limit


def load_weights(
    model: nn.Module,
    path: str | Path,
    strict: bool = True,
    rename: Rename | None = None,
    *,
    verify: Verify = "while",
    broadcast: bool = False,
    progress: Progress | None = None,
) -> KeyReport:
    """Load weights of any format into a model; each rank reads only its own shards.

    Names, shapes and the files' completeness are checked before anything is modified. A tied tensor is loaded once,
    under any of its names. Prefixes added by wrappers (`module.`, `_orig_mod.` and the like) are ignored. A model on
    the meta device is allocated; tensors that are not in the file (computed tables, missing tensors with
    `strict=False`) are then initialized as in `materialize`.

    Adapters (`add_lora`, peft) may be missing from weights of their base model; they are then unchanged. From a
    peft folder only the adapters are loaded.

    Args:
        model: Sharded (by shardwise or by hand) or unsharded model, on the meta device or with values.
        path: A safetensors file, a Hugging Face folder, a `torch.save` file, a Distributed Checkpoint folder, an FSDP1
            checkpoint, or a peft folder.
        strict: Raise unless the tensors of the model and the stored tensors match exactly. If False, load matching
            tensors; shapes must still match.
        rename: Maps stored names to the model's: `{"old.prefix": "new.prefix"}`, a compiled pattern for `re.sub`,
            or a function; None as the new name omits a tensor.
        verify: `while`: verify checksums as bytes are read; if one is wrong, the model refuses to run until it is
            loaded again. `before`: read everything twice, and verify it before the model is modified.
        broadcast: Only the first rank opens the files and broadcasts tensors to the others; for files that only one
            machine has.
        progress: Receives the bytes that this rank reads.

    Returns:
        The names that were loaded, missing, unexpected, tied, renamed and cast.

    Raises:
        CheckpointError: Names or shapes do not match (all are listed), or a file is damaged.

    Ranks:
        Collective over the ranks that share the model. Every rank raises.
    """
    mesh = mesh_of(model, take_inventory(model))
    contents = open_on_ranks(lambda: _open(model, path, rename), mesh, broadcast=broadcast)
    loaded = load_run(
        RunObjects(model),
        contents,
        mesh,
        strict=strict,
        verify=verify,
        weights_only=True,
        progress=progress,
        reader=RequestReader(broadcast, mesh),
    )
    report = loaded.matched[""].report
    ignored = (*report.ignored, *contents.details.get("renamed_away", ()))
    return replace(report, rebuilt=tuple(loaded.rebuilt), ignored=ignored)


def _open(model: nn.Module, path: str | Path, rename: Rename | None) -> Contents:
    """Open the checkpoint's weights under the model's names, prefixed with `model.`."""
    contents = open_checkpoint(path, model=model)
    require_names(contents, optimizers=False)
    renamed = contents if rename is None else rename_contents(contents, rename)
    root = find_sections(contents)[0]
    details = {**renamed.details, "section": ".".join(map(str, root)) + "."} if root else renamed.details
    if isinstance(contents.folder, Path) and (contents.folder / ADAPTER_CONFIG).is_file():
        refuse_other_adapters(model, contents.folder)
        name_of = {key: name for name, key in adapter_keys(model).items()}
        details = {**details, "adapters": True}
    else:
        names = [name for tensor in model_tensors(model) for name in tensor.names]
        base, name_of = without_adapters(model, names)
        renamed = in_model_layout(renamed, base, list(name_of))
    tensors = {f"model.{name_of.get(name, name)}": tensor for name, tensor in renamed.tensors.items()}
    return replace(renamed, tensors=tensors, values={}, structure={}, details=details)


Optimizers = Optimizer | Iterable[Optimizer] | Mapping[str, Optimizer]


def save_full(
    path: str | Path,
    *,
    model: nn.Module | Mapping[str, nn.Module],
    optimizers: Optimizers = (),
    extra: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    **objects: Stateful,
) -> None:
    """Write `{"model": ..., "optim": ..., "extra": ..., ...}` with full tensors, for `torch.load(weights_only=True)`.

    Optimizer state is stored by parameter names, as in `get_optimizer_state_dict`. If values differ between ranks
    (batch statistics), the first rank's are written. Tied parameters are stored under each of their names.

    Args:
        path: Path of the file.
        model: Sharded or unsharded model, or several by name.
        optimizers: One optimizer, several, or several by name; their current state is written.
        extra: Other plain values and tensors to store, such as the step.
        overwrite: Replace an existing file. It is kept until the new file is complete and synced.
        progress: Receives the written bytes.
        objects: Anything with `state_dict` and `load_state_dict`, by name: `scheduler=...`.

    Raises:
        CheckpointError: Something cannot be stored, or the file cannot be written.

    Ranks:
        Collective. No rank holds more than two buckets in addition to its own shards; the first rank writes.
    """
    run = RunObjects(model, optimizers, objects)
    mesh = _mesh(run)
    local = run_on_all(lambda: local_path(path), mesh, CheckpointError)
    run_on_all(lambda: [refuse_stage(each) for each in run.models.values()], mesh, CheckpointError)
    tree, tensors = run_on_all(lambda: _as_tree(run.collect(extra=extra)), mesh, CheckpointError)
    stream_gathered(FullWriter(local, tree, overwrite=overwrite), tensors, mesh, progress)


def load_full(
    path: str | Path,
    *,
    model: nn.Module | Mapping[str, nn.Module],
    optimizers: Optimizers = (),
    strict: bool = True,
    verify: Verify = "while",
    broadcast: bool = False,
    progress: Progress | None = None,
    **objects: Stateful,
) -> Any:
    """Load a file of `save_full`, or any checkpoint with a model and optimizers, into a sharded or unsharded run.

    Args:
        path: The file, or a checkpoint of any format that contains the requested objects.
        model: As saved; on the meta device or with values, on any number of ranks.
        optimizers: As saved. They need no state yet.
        strict: Require that the stored state of each object and the object itself match exactly.
        verify: When to verify checksums, as in `load_weights`.
        broadcast: Only the first rank opens the file and broadcasts tensors to the others.
        progress: Receives the bytes that this rank reads.
        objects: Anything with `load_state_dict`, by name.

    Returns:
        The value saved as `extra`.

    Raises:
        CheckpointError: The same on every rank; nothing was modified, unless the data turned out to be corrupt.

    Ranks:
        Collective over all ranks.
    """
    run = RunObjects(model, optimizers, objects)
    mesh = _mesh(run)
    channel = Channel(CheckpointError)
    try:
        contents = open_on_ranks(lambda: open_for(run, path), mesh, broadcast=broadcast)
        reader = RequestReader(broadcast, mesh)
        loaded = load_run(
            run, contents, channel, strict=strict, verify=verify, rng=False, progress=progress, reader=reader
        )
    finally:
        channel.close()
    return loaded.extra


def _as_tree(found: FlatState) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the nested dictionary with tensor descriptions in place of tensors, and the tensors by name."""
    infos = {
        name: StoredTensor(name, dtype_name(tensor.dtype), tuple(tensor.shape))
        for name, tensor in found.tensors.items()
    }
    infos |= {alias: infos[name] for alias, name in found.aliases.items()}
    return full_tree(infos, found.values, found.paths), found.tensors


def _mesh(run: RunObjects) -> DeviceMesh | None:
    return widest_mesh((), *(mesh_of(model, take_inventory(model)) for model in run.models.values()))
