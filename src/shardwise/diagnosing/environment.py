"""The environment: torch, devices, launcher, known bad settings, bandwidth between ranks."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from shardwise import compat
from shardwise.config.schema import MeshConfig
from shardwise.distributed.launchers import read_launch
from shardwise.distributed.mesh import init_distributed, shutdown
from shardwise.errors import EnvironmentProblem, ShardwiseError
from shardwise.findings import Finding, Severity
from shardwise.units import format_bytes

CHECKED_ON = "2026-11-15"


@dataclass(frozen=True, slots=True)
class KnownBad:
    """Versions of a package with a known problem."""

    code: str
    package: str
    versions: str
    """Version specifier, as in `<2.6` or `==2.12.*`."""
    what: str
    fix: str
    source: str
    backend: str = ""
    """The affected communication backend; empty: all."""
    severity: Severity = Severity.WARNING


TABLE = (
    KnownBad(
        "SW611", "torch", "<2.6", "a registered method that forward itself calls makes backward fail",
        "torch 2.6 or later; shardwise.shard enters once on every version",
        "https://github.com/pytorch/pytorch/pull/137922",
    ),
    KnownBad(
        "SW612", "torch", "==2.6.*", "set_model_state_dict(broadcast_from_rank0=True) needs twice the memory",
        "torch 2.7 or later, or shardwise.load_weights", "https://github.com/verl-project/verl/issues/2464",
    ),
    KnownBad(
        "SW613", "torch", "<2.8", "the root ignores reshard_after_forward=True and stays gathered",
        "torch 2.8 or later", "https://github.com/pytorch/pytorch/issues/154655",
    ),
    KnownBad(
        "SW614", "torch", "<2.11", "FSDP2 may sum gradients over gloo instead of averaging them, silently",
        "torch 2.11 or later", "https://github.com/pytorch/pytorch/issues/162338", backend="gloo",
        severity=Severity.ERROR,
    ),
    KnownBad(
        "SW615", "torch", "==2.12.*", "optimizers with foreach=True leak memory on DTensors",
        "torch 2.13, or fused=True", "https://github.com/NVIDIA-NeMo/Automodel/issues/2888",
    ),
    KnownBad(
        "SW616", "torch", "<2.13", "tied weights in two groups silently come apart",
        "torch 2.13, which refuses, or shardwise.shard, which joins the groups",
        "https://github.com/pytorch/pytorch/issues/176076",
    ),
    KnownBad(
        "SW617", "torch", "<2.13", "activation checkpointing with mixed precision recomputes in another dtype",
        "torch 2.13, or wrap blocks before fully_shard; shardwise.checkpoint_activations does",
        "https://github.com/pytorch/pytorch/pull/182580",
    ),
    KnownBad(
        "SW618", "accelerate", ">=1.13,<1.16", "the promised upcast of 16-bit weights to float32 does nothing",
        "cast the model yourself before prepare(): model.float()",
        "https://github.com/huggingface/accelerate/issues/3979", severity=Severity.NOTE,
    ),
    KnownBad(
        "SW619", "accelerate", "<1.16", "without a GPU the FSDP plugin is dropped silently and DDP runs instead",
        "use shardwise on the CPU", "measured with accelerate 1.15.0", severity=Severity.NOTE,
    ),
    KnownBad(
        "SW620", "nccl", "<2.30", "several ranks on one GPU are refused (\"Duplicate GPU detected\")",
        "one rank a GPU, or the gloo backend for tests", "https://github.com/NVIDIA/nccl", severity=Severity.NOTE,
    ),
)  # fmt: skip


def find_known_bad(versions: Mapping[str, str], backend: str) -> list[Finding]:
    """Return the known problems of these package versions and communication backends."""
    found = []
    for row in TABLE:
        try:
            installed = Version(Version(versions.get(row.package, "")).public)  # without a local part such as +cpu
        except InvalidVersion:
            continue
        if row.backend in backend and installed in SpecifierSet(row.versions, prereleases=True):
            what = f"{row.package} {installed}: {row.what} (known on {CHECKED_ON}, {row.source})"
            found.append(_finding(row.code, what, row.fix, row.severity, row.package))
    return found


_REPEATS = 5
SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 24)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Measurement of one collective at one size."""

    collective: str
    num_bytes: int
    """Bytes of the full result."""
    seconds: float
    """Median duration of several runs."""

    @property
    def bytes_per_second(self) -> float:
        """Bandwidth, from the bytes of the full result."""
        return self.num_bytes / self.seconds


def measure_collectives(sizes: tuple[int, ...] = SIZES) -> list[Measured]:
    """Run each collective that FSDP2 uses at several sizes, and check its results; a target of `start_local`."""
    mesh = init_distributed(MeshConfig())
    device, num_ranks, rank = mesh.device_type, mesh.size(), mesh.get_rank()
    rows = [row for size in sizes for row in _measure(max(size // 4 // num_ranks, 1), rank, num_ranks, device)]
    shutdown()
    return rows


def _measure(count: int, rank: int, num_ranks: int, device: str) -> list[Measured]:
    """Measure each collective with parts of `count` elements."""
    world: Any = dist.group.WORLD
    part = torch.full((count,), float(rank + 1), device=device)
    whole, sent = (torch.full((count * num_ranks,), float(rank + 1), device=device) for _ in range(2))
    numbers, rows = [float(number) for number in range(1, num_ranks + 1)], []
    for name, run, result, right in (
        ("all-gather", lambda: compat.all_gather_flat(whole, part, world), whole[::count], numbers),
        ("reduce-scatter", lambda: compat.reduce_scatter_flat(part, sent, world), part[:1], [sum(numbers)]),
        ("all-reduce", lambda: dist.all_reduce(whole.fill_(1.0)), whole[:1], numbers[-1:]),
    ):
        seconds = []
        for _ in range(_REPEATS + 1):
            start = time.perf_counter()
            run()
            if whole.is_cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        if result.tolist() != right:
            raise EnvironmentProblem(
                f"{name} returned {result.tolist()[:8]} where {right[:8]} is right",
                where=f"{dist.get_backend()} on {device}",
                why="the communication library, the driver or the network corrupts data",
                fix="update them; with NCCL try NCCL_P2P_DISABLE=1 to find the cause",
            )
        usual = sorted(seconds[1:])[_REPEATS // 2]
        rows.append(Measured(collective=name, num_bytes=whole.nbytes, seconds=usual))
    return rows


_PACKAGES = (
    "torch", "shardwise", "transformers", "accelerate", "safetensors", "torchao", "torchtitan", "lightning", "peft",
)  # fmt: skip
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_DEBUG", "NCCL_P2P_DISABLE", "NCCL_IB_DISABLE",
    "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF",
    "TORCH_DISTRIBUTED_DEBUG", "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK",
)  # fmt: skip
_MIN_SHARED_BYTES = 1 << 30
_MIN_FILES = 4096
_MIN_DISK_BYTES = 10 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """Facts by subject, and findings."""

    facts: dict[str, dict[str, Any]]
    findings: tuple[Finding, ...]


def collect_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Collect facts about this machine; environment variables default to this process's."""
    env = os.environ if variables is None else variables
    versions = _versions()
    try:
        launch = read_launch(env)
        launcher = {"source": launch.source, "rank": launch.rank, "num_ranks": launch.world_size}
    except ShardwiseError as error:
        launcher = {"problem": error.what, "fix": error.fix}
    facts: dict[str, dict[str, Any]] = {
        "machine": _machine(),
        "versions": versions,
        "gpus": _gpus(),
        "launcher": launcher,
        "variables": {name: env[name] for name in _VARIABLES if name in env},
    }
    backend = "nccl" if facts["gpus"] else "gloo"
    return Environment(facts=facts, findings=(*find_known_bad(versions, backend), *_judge(facts)))


def _machine() -> dict[str, Any]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shared = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    here = shutil.disk_usage(".")
    return {
        "host": socket.gethostname(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "shared_memory_bytes": shared.total if shared else 0,
        "open_files": [soft, hard],
        "disk_free_bytes": here.free,
    }


def _versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        versions["cuda"] = str(torch.version.cuda)
        if torch.distributed.is_nccl_available():
            versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        driver = _ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        versions |= {"driver": driver.splitlines()[0]} if driver else {}
    return versions


def _gpus() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {}
    names = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        names.append(f"{properties.name}, {format_bytes(properties.total_memory)}")
    peers = {
        f"{one}->{other}": torch.cuda.can_device_access_peer(one, other)
        for one in range(len(names))
        for other in range(len(names))
        if one != other
    }
    return {"devices": names, "peer_access": peers, "topology": _ask("nvidia-smi", "topo", "-m")}


def _judge(facts: dict[str, dict[str, Any]]) -> Iterator[Finding]:
    """Return findings about limits, GPUs, environment variables and the launcher."""
    machine, gpus, variables, launcher = (facts[name] for name in ("machine", "gpus", "variables", "launcher"))
    shared, (files, most_files), free = (
        machine[name] for name in ("shared_memory_bytes", "open_files", "disk_free_bytes")
    )
    if shared < _MIN_SHARED_BYTES:
        what = f"/dev/shm has {format_bytes(shared)}: data loader workers and NCCL need shared memory"
        yield _finding("SW601", what, "docker run --shm-size=16g, or --ipc=host")
    if 0 < files < _MIN_FILES:
        yield _finding("SW602", f"a process may open {files} files only", f"ulimit -n {max(most_files, _MIN_FILES)}")
    if free < _MIN_DISK_BYTES:
        what = f"{format_bytes(free)} are free here: a checkpoint of a 1B model with Adam needs 15 GB"
        yield _finding("SW603", what, "free space, or set the checkpoint folder elsewhere")
    blocked = [pair for pair, works in gpus.get("peer_access", {}).items() if not works]
    if blocked:
        what = f"GPUs cannot reach each other's memory directly ({len(blocked)} pairs, first {blocked[0]})"
        yield _finding("SW604", what, "check the topology, ACS and the container's settings")
    if len(set(gpus.get("devices", []))) > 1:
        what = "GPU models differ: the slowest limits the speed, the smallest memory the model"
        yield _finding("SW605", what, "choose equal ones with CUDA_VISIBLE_DEVICES")
    if variables.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        what = "CUDA_DEVICE_MAX_CONNECTIONS=1: one hardware queue, gathers cannot overlap with computation"
        yield _finding("SW606", what, "unset it; Megatron's tensor parallelism needs it, FSDP2 does not")
    if variables.get("NCCL_P2P_DISABLE", "0") not in ("", "0"):
        yield _finding("SW607", "NCCL_P2P_DISABLE is set: GPUs of one machine talk through the host", "unset it")
    if variables.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        what = "TORCH_DISTRIBUTED_DEBUG=DETAIL checks every collective first: fine to find a bug, slow to train"
        yield _finding("SW608", what, "unset it when the bug is found; shardwise.guard costs next to nothing")
    if "problem" in launcher:
        yield _finding("SW609", launcher["problem"], launcher["fix"], Severity.ERROR)
    port = variables.get("MASTER_PORT", "")
    if port.isdigit() and launcher.get("rank", 0) == 0:
        with socket.socket() as probe:
            try:
                probe.bind(("", int(port)))
            except OSError:
                fix = "choose another, or let torchrun choose: --standalone"
                yield _finding("SW610", f"MASTER_PORT {port} is in use on this machine", fix, Severity.ERROR)


def _finding(
    code: str, message: str, fix: str, severity: Severity = Severity.WARNING, where: str = "environment"
) -> Finding:
    return Finding(code=code, message=message, where=where, severity=severity, fix=fix)


def _ask(*command: str) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""
