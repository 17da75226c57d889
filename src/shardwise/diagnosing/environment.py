"""What this machine offers a training run: versions, GPUs, launcher, limits, disk. Reads environment variables."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from shardwise.diagnosing.known_bad import find_known_bad
from shardwise.errors import ShardwiseError
from shardwise.findings import Finding, Severity
from shardwise.launching import read_launch
from shardwise.units import format_bytes

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
    """Facts by subject, and what is wrong with them."""

    facts: dict[str, dict[str, Any]]
    findings: tuple[Finding, ...]


def look_around(variables: Mapping[str, str] | None = None) -> Environment:
    """Gather the facts of this process's machine.

    Args:
        variables: Environment variables; default: this process's.

    Ranks:
        Local. Starts no collective.
    """
    env = os.environ if variables is None else variables
    versions = _versions()
    facts: dict[str, dict[str, Any]] = {
        "machine": _machine(),
        "versions": versions,
        "gpus": _gpus(),
        "launcher": _launcher(env),
        "variables": {name: env[name] for name in _VARIABLES if name in env},
    }
    backend = "nccl" if facts["gpus"] else "gloo"
    findings = find_known_bad(versions, backend)
    for judge in (_judge_limits, _judge_gpus, _judge_variables, _judge_launcher):
        findings += judge(facts)
    return Environment(facts=facts, findings=tuple(findings))


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
    import torch

    if torch.cuda.is_available():
        versions["cuda"] = str(torch.version.cuda)
        if torch.distributed.is_nccl_available():
            versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        driver = _ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        versions |= {"driver": driver.splitlines()[0]} if driver else {}
    return versions


def _gpus() -> dict[str, Any]:
    import torch

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


def _launcher(env: Mapping[str, str]) -> dict[str, Any]:
    try:
        launch = read_launch(env)
    except ShardwiseError as error:
        return {"problem": error.what, "fix": error.fix}
    return {"source": launch.source, "rank": launch.rank, "num_ranks": launch.world_size}


def _judge_limits(facts: dict[str, dict[str, Any]]) -> list[Finding]:
    machine = facts["machine"]
    shared, files, free = machine["shared_memory_bytes"], machine["open_files"], machine["disk_free_bytes"]
    found = []
    if shared < _MIN_SHARED_BYTES:
        what = f"/dev/shm has {format_bytes(shared)}: data loader workers and NCCL need shared memory"
        found.append(_finding("SW601", what, "docker run --shm-size=16g, or --ipc=host"))
    if 0 < files[0] < _MIN_FILES:
        found.append(
            _finding("SW602", f"a process may open {files[0]} files only", f"ulimit -n {max(files[1], _MIN_FILES)}")
        )
    if free < _MIN_DISK_BYTES:
        what = f"{format_bytes(free)} are free here: a checkpoint of a 1B model with Adam needs 15 GB"
        found.append(_finding("SW603", what, "free space, or set the checkpoint folder elsewhere"))
    return found


def _judge_gpus(facts: dict[str, dict[str, Any]]) -> list[Finding]:
    found = []
    blocked = [pair for pair, works in facts["gpus"].get("peer_access", {}).items() if not works]
    if blocked:
        what = f"GPUs cannot reach each other's memory directly ({len(blocked)} pairs, first {blocked[0]})"
        found.append(_finding("SW604", what, "check the topology, ACS and the container's settings"))
    if len(set(facts["gpus"].get("devices", []))) > 1:
        what = "the GPUs are not all alike: the slowest, and the smallest memory, decide"
        found.append(_finding("SW605", what, "choose equal ones with CUDA_VISIBLE_DEVICES"))
    return found


def _judge_variables(facts: dict[str, dict[str, Any]]) -> list[Finding]:
    set_to = facts["variables"]
    found = []
    if set_to.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        what = "CUDA_DEVICE_MAX_CONNECTIONS=1: one hardware queue, gathers cannot overlap with computation"
        found.append(_finding("SW606", what, "unset it; Megatron's tensor parallelism needs it, FSDP2 does not"))
    if set_to.get("NCCL_P2P_DISABLE", "0") not in ("", "0"):
        found.append(
            _finding("SW607", "NCCL_P2P_DISABLE is set: GPUs of one machine talk through the host", "unset it")
        )
    if set_to.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        what = "TORCH_DISTRIBUTED_DEBUG=DETAIL checks every collective first: fine to find a bug, slow to train"
        found.append(_finding("SW608", what, "unset it when the bug is found; shardwise.guard costs next to nothing"))
    return found


def _judge_launcher(facts: dict[str, dict[str, Any]]) -> list[Finding]:
    found = []
    launcher = facts["launcher"]
    if "problem" in launcher:
        found.append(_finding("SW609", launcher["problem"], launcher["fix"], Severity.ERROR))
    port = facts["variables"].get("MASTER_PORT", "")
    if port.isdigit() and facts["launcher"].get("rank", 0) == 0 and not _is_free(int(port)):
        found.append(_finding("SW610", f"MASTER_PORT {port} is in use on this machine",
                              "choose another, or let torchrun choose: --standalone", Severity.ERROR))  # fmt: skip
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _finding(code: str, message: str, fix: str, severity: Severity = Severity.WARNING) -> Finding:
    return Finding(code=code, message=message, where="environment", severity=severity, fix=fix)


def _ask(*command: str) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""
