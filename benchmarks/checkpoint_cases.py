"""Saving, loading, resharding and reading safetensors, on one set of ranks: what each rank measures."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import distribute_tensor

from benchmarks.checkpoint_state import (
    Read,
    Times,
    aligned_copy,
    build_model,
    evict,
    fill_cache,
    local_bytes,
    local_of,
    raw_reads_of_file,
    raw_reads_of_safetensors,
    read_raw,
    remove,
    sync_all,
    take_turns,
    watch_host_memory,
    write_raw,
    write_raw_direct,
)
from benchmarks.processes import join
from shardwise.checkpointing.formats.sharded import file_name
from shardwise.checkpointing.manager import Checkpointer
from shardwise.checkpointing.storage import BLOCK_BYTES, bytes_of, checksum
from shardwise.checkpointing.weights import load_weights

MIN_DIRECT_THREADS = 4  # a disk is busy only with several requests at a time


@dataclass(frozen=True)
class Setup:
    """One set of ranks."""

    num_ranks: int
    device: str
    size: str
    folder: Path
    num_rounds: int
    layouts: tuple[int, ...] = ()
    """Numbers of ranks whose checkpoints this one reads, beside its own."""
    only_layouts: bool = False


@dataclass(frozen=True)
class Measured:
    """Times by case and by who did it, and what else was found."""

    times: dict[str, Times] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)


def measure(setup: Setup) -> Measured:
    """All cases on this rank.

    Ranks:
        Collective.
    """
    join(setup.device, setup.num_ranks)
    model = build_model(setup.size, setup.device)
    measured = Measured(numbers={"bytes": sum(p.nbytes for p in model.parameters()), "local": local_bytes(model)})
    if not setup.only_layouts:
        _saving(setup, model, measured)
        _loading(setup, model, measured)
        if (setup.folder / "hf").exists():
            _safetensors(setup, model, measured)
    _layouts(setup, model, measured)
    dist.destroy_process_group()
    return measured


def _saving(setup: Setup, model: nn.Module, measured: Measured) -> None:
    root = setup.folder / "saving"
    state = {"model": dict(model.named_parameters())}
    works: dict[str, Callable[[], object]] = {}
    with Checkpointer(root / "ours", keep_last=None, asynchronous=False) as checkpointer:
        works["ours"] = lambda: checkpointer.save(1, model=model)
        works["dcp"] = lambda: dcp.save(state, checkpoint_id=root / "dcp")
        if setup.device == "cpu":
            aligned = aligned_copy(model)
            works["raw"] = lambda: write_raw(root / f"raw-{dist.get_rank()}", model)
            works["raw direct"] = lambda: write_raw_direct(root / f"raw-{dist.get_rank()}", aligned)

        def prepare(name: str) -> None:
            remove(root)
            if dist.get_rank() == 0:
                root.mkdir(parents=True)
            dist.barrier()

        measured.numbers["hashing"] = _hashing_s(model)
        take_turns(works, 1, prepare=prepare)
        measured.times["save"] = take_turns(works, setup.num_rounds, prepare=prepare)
    remove(root)


def _hashing_s(model: nn.Module) -> float:
    """Seconds that the checksums of what this rank saves take by themselves; in a save the disk works meanwhile."""
    memory = [bytes_of(local_of(parameter).cpu()) for parameter in model.parameters()]
    start = time.perf_counter()
    for each in memory:
        for begin in range(0, len(each), BLOCK_BYTES):
            checksum(each[begin : begin + BLOCK_BYTES])
    return time.perf_counter() - start


def _loading(setup: Setup, model: nn.Module, measured: Measured) -> None:
    root = setup.folder / "loading"
    state = {"model": dict(model.named_parameters())}
    with Checkpointer(root / "ours", asynchronous=False) as checkpointer:
        checkpointer.save(1, model=model)
        dcp.save(state, checkpoint_id=root / "dcp")
        expected = [local_of(parameter).clone() for parameter in model.parameters()]
        works: dict[str, Callable[[], object]] = {
            "ours": lambda: checkpointer.load(model=model),
            "ours unchecked": lambda: checkpointer.load(model=model, verify="no"),
            "dcp": lambda: dcp.load(state, checkpoint_id=root / "dcp"),
        }
        for name, work in works.items():  # is right
            _scramble(model)
            work()
            same = all(torch.equal(local_of(p), e) for p, e in zip(model.parameters(), expected, strict=True))
            assert same, f"{name} loads something else"
        _fill_cache(root)
        measured.times["load, warm"] = take_turns(works, setup.num_rounds)
        sync_all(root)
        if setup.device == "cpu":
            own = checkpointer.folder / "step-00000001" / file_name(dist.get_rank())
            works |= _raw(raw_reads_of_file(own, model))
        measured.times["load, cold"] = take_turns(works, setup.num_rounds, prepare=lambda name: _evict(root))
    remove(root)


def _safetensors(setup: Setup, model: nn.Module, measured: Measured) -> None:
    folder = setup.folder / "hf"
    parameters = dict(model.named_parameters())
    works: dict[str, Callable[[], object]] = {
        "ours": lambda: load_weights(model, folder),
        "torch reader": lambda: dcp.load(dict(parameters), storage_reader=HuggingFaceStorageReader(str(folder))),
    }
    if setup.device == "cpu":
        works |= _raw(raw_reads_of_safetensors(folder, model))
    for work in works.values():
        work()
    _fill_cache(folder)
    through_cache = {name: work for name, work in works.items() if name != "raw direct"}
    measured.times["safetensors, warm"] = take_turns(through_cache, setup.num_rounds)
    measured.times["safetensors, cold"] = take_turns(works, setup.num_rounds, prepare=lambda name: _evict(folder))
    others: dict[str, Callable[[], object]] = {
        "ours": works["ours"],
        "rank 0 broadcast": lambda: _broadcast(model, folder),
        "every rank torch.load(mmap)": lambda: _torch_load(model, folder.with_suffix(".pt")),
    }
    _fill_cache(folder)
    measured.times["safetensors, other ways"] = take_turns(others, min(setup.num_rounds, 3))
    with watch_host_memory() as peak:
        load_weights(model, folder)
    measured.numbers["safetensors extra"] = peak()


def _raw(reads: list[Read]) -> dict[str, Callable[[], object]]:
    """System calls alone: as a program would make them, and the two ways that get the most out of the machine."""
    num_threads = max(os.cpu_count() or 1, MIN_DIRECT_THREADS)
    return {
        "raw": lambda: read_raw(reads),
        "raw on all cores": lambda: read_raw(reads, num_threads=os.cpu_count() or 1),
        "raw direct": lambda: read_raw(reads, num_threads=num_threads, direct=True),
    }


def _layouts(setup: Setup, model: nn.Module, measured: Measured) -> None:
    """Read what other numbers of ranks have written, beside what as many have."""
    root = setup.folder / "layouts"
    with Checkpointer(root / str(setup.num_ranks), asynchronous=False) as checkpointer:
        checkpointer.save(1, model=model)
        works: dict[str, Callable[[], object]] = {"same": lambda: checkpointer.load(model=model)}
        others = {number: Checkpointer(root / str(number), asynchronous=False) for number in setup.layouts}
        for number, other in others.items():
            works[f"{number} to {setup.num_ranks}"] = lambda other=other: other.load(model=model)
        for work in works.values():
            work()
        _fill_cache(root)
        if others:
            measured.times["reshard"] = take_turns(works, setup.num_rounds)
        for other in others.values():
            other.close()


def _broadcast(model: nn.Module, folder: Path) -> None:
    state: dict[str, torch.Tensor] = {}
    if dist.get_rank() == 0:
        for file in sorted(folder.glob("*.safetensors")):
            state |= load_file(file)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)


def _torch_load(model: nn.Module, file: Path) -> None:
    state = torch.load(file, mmap=True, weights_only=True)
    for name, parameter in model.named_parameters():
        placed = distribute_tensor(state[name].to(parameter.device), parameter.device_mesh, parameter.placements)  # pyrefly: ignore
        local_of(parameter).copy_(placed.to_local())


def _scramble(model: nn.Module) -> None:
    for parameter in model.parameters():
        local_of(parameter).fill_(-1)


def _fill_cache(path: Path) -> None:
    if dist.get_rank() == 0:
        fill_cache(path)
    dist.barrier()


def _evict(path: Path) -> None:
    if dist.get_rank() == 0:
        evict(path)
    dist.barrier()
