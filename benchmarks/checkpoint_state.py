"""What the checkpoint benchmarks save and load, the raw system calls they are held against, and the page cache."""

import contextlib
import ctypes
import gc
import json
import mmap
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shardwise.checkpointing.storage import bytes_of

Work = Callable[[], object]
Read = tuple[Path, int, memoryview]
"""A file, the first byte, and the memory that it and those after it go to."""
CHUNK_BYTES = 16 << 20
DIRECT_BYTES = 2 << 20
PAGE = 4096
HUGE_PAGE = 2 << 20


@dataclass(frozen=True)
class Size:
    """Of the model: `num_blocks` feed-forward blocks."""

    num_blocks: int
    width: int


SIZES = {"toy": Size(2, 64), "full": Size(8, 2048)}  # full: 268 million numbers, 1.07 GB, matrices of 67 MB


class Block(nn.Module):
    """Two large matrices and a few small tensors, as a transformer has them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def build_model(size: str, device: str) -> nn.Sequential:
    """A sharded model with weights in memory that has been written before.

    Ranks:
        Collective.
    """
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("shard",))
    with torch.device("meta"):
        model = nn.Sequential(*(Block(SIZES[size].width) for _ in range(SIZES[size].num_blocks)))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    for parameter in model.parameters():
        local_of(parameter).normal_(generator=generator)
    return model


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's own memory of a tensor."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def local_bytes(model: nn.Module) -> int:
    return sum(local_of(parameter).nbytes for parameter in model.parameters())


def write_hugging_face_folder(folder: Path, size: str, num_files: int = 2) -> None:
    """The model's weights as safetensors files with an index, and as one `torch.save` file beside them."""
    folder.mkdir(parents=True)
    model = nn.Sequential(*(Block(SIZES[size].width) for _ in range(SIZES[size].num_blocks)))
    state = dict(model.state_dict())
    torch.save(state, folder.with_suffix(".pt"))
    names = sorted(state)
    share = -(-len(names) // num_files)
    weight_map: dict[str, str] = {}
    for number in range(num_files):
        file = f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"
        part = names[number * share : (number + 1) * share]
        save_file({name: state[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    sync_all(folder)
    sync_all(folder.with_suffix(".pt"))


def raw_reads_of_safetensors(folder: Path, model: nn.Module) -> list[Read]:
    """Which bytes of which file belong to this rank's memory: what `preadv` alone would have to do."""
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    headers: dict[str, tuple[int, dict[str, dict[str, list[int]]]]] = {}
    for file in set(weight_map.values()):
        with (folder / file).open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            headers[file] = (8 + length, json.loads(opened.read(length)))
    reads = []
    for name, parameter in model.named_parameters():
        start, header = headers[weight_map[name]]
        local = local_of(parameter)
        rows = -(-parameter.shape[0] // dist.get_world_size()) * dist.get_rank()
        row_bytes = local.nbytes // max(local.shape[0], 1)
        offset = start + header[name]["data_offsets"][0] + rows * row_bytes
        reads.append((folder / weight_map[name], offset, bytes_of(local)))
    return sorted(reads, key=lambda read: (str(read[0]), read[1]))


def raw_reads_of_file(path: Path, model: nn.Module) -> list[Read]:
    """As many bytes from the front of a file as this rank's memory has, into that memory."""
    reads, at = [], 0
    for parameter in model.parameters():
        memory = bytes_of(local_of(parameter))
        reads.append((path, at, memory))
        at += len(memory)
    return reads


def read_raw(reads: list[Read], *, num_threads: int = 1, direct: bool = False) -> None:
    """`preadv` in the order on the disk, one call for each chunk.

    Args:
        reads: See `raw_reads_of_safetensors`.
        num_threads: That read at the same time.
        direct: Past the page cache, into an aligned buffer of each thread and no further: what the disk gives.
    """
    flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
    files = {path: os.open(path, flags) for path in {path for path, _, _ in reads}}
    chunk = DIRECT_BYTES if direct else CHUNK_BYTES
    todo = iter([(files[path], offset, memory, at) for path, offset, memory in reads
                 for at in range(0, len(memory), chunk)])  # fmt: skip

    def work() -> None:
        buffer = aligned_memory(chunk + 2 * PAGE) if direct else memoryview(b"")
        for descriptor, offset, memory, at in todo:  # taking one is atomic
            place, start = memory[at : at + chunk], offset + at
            if direct:
                begin, end = start // PAGE * PAGE, -(-(start + len(place)) // PAGE) * PAGE
                place, start = buffer[: end - begin], begin
            os.preadv(descriptor, [place], start)

    with ThreadPoolExecutor(num_threads) as pool:
        for future in [pool.submit(work) for _ in range(num_threads)]:
            future.result()
    for descriptor in files.values():
        os.close(descriptor)


def write_raw(path: Path, model: nn.Module) -> None:
    """`write` of this rank's memory through the page cache, then `fsync`."""
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL)
    for parameter in model.parameters():
        memory = bytes_of(local_of(parameter))
        for at in range(0, len(memory), CHUNK_BYTES):
            os.write(descriptor, memory[at : at + CHUNK_BYTES])
    os.fsync(descriptor)
    os.close(descriptor)


def write_raw_direct(path: Path, memory: memoryview) -> None:
    """`write` past the page cache, from memory that is aligned and filled already, then `fsync`."""
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL | os.O_DIRECT)
    for at in range(0, len(memory), CHUNK_BYTES):
        os.write(descriptor, memory[at : at + CHUNK_BYTES])
    os.fsync(descriptor)
    os.close(descriptor)


def aligned_memory(num_bytes: int) -> memoryview:
    """As a disk likes it best: whole huge pages, where the system gives them."""
    memory = mmap.mmap(-1, num_bytes + HUGE_PAGE + PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % HUGE_PAGE
    return memoryview(memory)[start : start + -(-num_bytes // PAGE) * PAGE]


def aligned_copy(model: nn.Module) -> memoryview:
    """This rank's memory, one tensor after another."""
    memory, at = aligned_memory(local_bytes(model)), 0
    for parameter in model.parameters():
        source = bytes_of(local_of(parameter))
        memory[at : at + len(source)] = source
        at += len(source)
    return memory


def sync_all(path: Path) -> None:
    """Have the disk take the files, so that the page cache can be emptied of them."""
    for each in _files(path):
        with each.open("rb") as file:
            os.fsync(file.fileno())


def fill_cache(path: Path) -> None:
    """Have the page cache hold these files: not everybody who reads them does."""
    buffer = memoryview(bytearray(CHUNK_BYTES))
    for each in _files(path):
        with each.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def evict(path: Path) -> None:
    """Empty the page cache of these files. A virtual machine's host may keep them in its own."""
    for each in _files(path):
        with each.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _files(path: Path) -> list[Path]:
    return [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path]


def remove(path: Path) -> None:
    """By rank 0, while the others wait.

    Ranks:
        Collective.
    """
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
        path.unlink(missing_ok=True)
    dist.barrier()


@dataclass(frozen=True)
class Stretch:
    """How long one work took once."""

    wall_s: float
    cpu_s: float
    """Of all threads of this rank: what it worked, without what it waited for or shared cores with."""


Times = dict[str, list[Stretch]]


def take_turns(
    works: Mapping[str, Work], num_rounds: int, *, prepare: Callable[[str], object] = lambda name: None
) -> Times:
    """How long each work took in each round, in an order drawn for each round.

    With a fixed order each would always find the memory as the same one before left it.

    Args:
        works: By name.
        num_rounds: How often each is run.
        prepare: Called with the name before each, and not timed.

    Ranks:
        Collective: each stretch lasts from when all have begun until all are done.
    """
    times: Times = {name: [] for name in works}
    chance = random.Random(0)  # the same on all ranks
    for _ in range(num_rounds):
        for name in chance.sample(list(works), len(works)):
            prepare(name)
            gc.collect()
            dist.barrier()
            start, start_cpu = time.perf_counter(), time.process_time()
            works[name]()
            cpu_s = time.process_time() - start_cpu
            dist.barrier()
            times[name].append(Stretch(time.perf_counter() - start, cpu_s))
    return times


@contextlib.contextmanager
def watch_host_memory() -> Iterator[Callable[[], int]]:
    """Follow this process's own memory (not the page cache's): the most it grew by, in bytes."""
    stop, peak, before = threading.Event(), 0, _anonymous_bytes()

    def follow() -> None:
        nonlocal peak
        while not stop.wait(0.002):
            peak = max(peak, _anonymous_bytes() - before)

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        yield lambda: peak
    finally:
        stop.set()
        thread.join()


def _anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0
