"""collect_environment() and doctor: each judgement at its limit, with its numbers; facts of GPUs that are played."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from shardwise.diagnosing.environment import TABLE, Environment, collect_environment, find_known_bad
from shardwise.findings import Finding, Severity
from tests.unit.cli.test_main import shardwise

GIB = 1 << 30


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """A machine that has enough of everything, but for what a test takes away."""

    def have(shared: int = GIB, free: int = 10 * GIB, files: tuple[int, int] = (4096, 1 << 20)) -> None:
        def usage(path: str) -> Any:
            return SimpleNamespace(total=shared, used=0, free=free if path == "." else 7)

        monkeypatch.setattr(shutil, "disk_usage", usage)
        monkeypatch.setattr(os.path, "isdir", lambda path: True)
        monkeypatch.setattr(resource, "getrlimit", lambda which: files if which == resource.RLIMIT_NOFILE else (0, 0))

    return have


def told(variables: dict[str, str] | None = None) -> list[tuple[str, str, str, str]]:
    known = {row.code for row in TABLE}
    found = collect_environment(variables or {}).findings
    return [(each.code, each.severity.value, each.message, each.fix) for each in found if each.code not in known]


@pytest.mark.parametrize(
    ("has", "code", "message", "fix"),
    [
        ({}, "", "", ""),
        ({"shared": GIB - 1}, "SW601", "/dev/shm has 1 GiB", "--shm-size=16g"),
        ({"shared": 64 << 20}, "SW601", "/dev/shm has 64 MiB", "--shm-size=16g"),
        ({"shared": 0}, "SW601", "/dev/shm has 0 B", "--ipc=host"),
        ({"files": (4095, 4095)}, "SW602", "a process may open 4095 files only", "ulimit -n 4096"),
        ({"files": (1024, 1 << 16)}, "SW602", "a process may open 1024 files only", "ulimit -n 65536"),
        ({"files": (-1, -1)}, "", "", ""),
        ({"files": (1, 1 << 16)}, "SW602", "a process may open 1 files only", "ulimit -n 65536"),
        ({"free": 10 * GIB - 1}, "SW603", "10 GiB are free here", "free space"),
        ({"free": GIB}, "SW603", "1 GiB are free here", "the checkpoint folder elsewhere"),
    ],
)
def test_limits(machine: Any, has: dict[str, Any], code: str, message: str, fix: str):
    machine(**has)
    found = told()
    assert [each[:2] for each in found] == ([(code, "warning")] if code else [])
    assert all(message in each[2] and fix in each[3] for each in found)


def test_a_machine_without_shared_memory(machine: Any, monkeypatch: pytest.MonkeyPatch):
    machine()
    monkeypatch.setattr(os.path, "isdir", lambda path: path != "/dev/shm")
    assert [each[0] for each in told()] == ["SW601"]
    assert collect_environment({}).facts["machine"]["shared_memory_bytes"] == 0


def test_facts_of_the_machine(machine: Any):
    machine(shared=3, free=5, files=(7, 9))
    facts = collect_environment({"NCCL_DEBUG": "INFO", "HOME": "/x", "RANK": "0", "WORLD_SIZE": "1"}).facts
    assert list(facts) == ["machine", "versions", "gpus", "launcher", "variables"]
    assert facts["machine"] == {
        "host": socket.gethostname(),
        "system": facts["machine"]["system"],
        "python": ".".join(map(str, sys.version_info[:3])),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "shared_memory_bytes": 3,
        "open_files": [7, 9],
        "disk_free_bytes": 5,
    }
    assert facts["variables"] == {"NCCL_DEBUG": "INFO", "RANK": "0", "WORLD_SIZE": "1"}
    assert facts["gpus"] == {}
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["launcher"] == {"source": "torchrun", "rank": 0, "num_ranks": 1}


@pytest.mark.parametrize(
    ("variables", "codes"),
    [
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, ["SW606"]),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "10"}, []),
        ({"NCCL_P2P_DISABLE": "1"}, ["SW607"]),
        ({"NCCL_P2P_DISABLE": ""}, []),
        ({"NCCL_P2P_DISABLE": "0"}, []),
        ({"TORCH_DISTRIBUTED_DEBUG": "Detail"}, ["SW608"]),
        ({"TORCH_DISTRIBUTED_DEBUG": "INFO"}, []),
        ({"RANK": "1"}, ["SW609"]),
        ({"MASTER_PORT": "tcp"}, []),
        ({"RANK": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_P2P_DISABLE": "2"}, ["SW606", "SW607", "SW609"]),
    ],
)
def test_variables(machine: Any, variables: dict[str, str], codes: list[str]):
    machine()
    found = told(variables)
    assert [each[0] for each in found] == codes
    assert all(each[1] == ("error" if each[0] == "SW609" else "warning") for each in found)


def test_only_rank_zero_needs_the_port(machine: Any):
    machine()
    rank = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert told({**rank, "MASTER_PORT": port, "RANK": "0"}) == [
            (
                "SW610",
                "error",
                f"MASTER_PORT {port} is in use on this machine",
                "choose another, or let torchrun choose: --standalone",
            )
        ]
        assert told({**rank, "MASTER_PORT": port, "RANK": "1"}) == []


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Two GPUs, and an `nvidia-smi` that answers."""

    def have(names: list[str], reach: bool, driver: str = "echo 570.1; echo 570.1") -> None:
        properties = [SimpleNamespace(name=name, total_memory=80 * GIB) for name in names]
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties[index])
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: reach or (one, other) == (0, 1))
        monkeypatch.setattr(torch.version, "cuda", "12.8")
        monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
        monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
        script = tmp_path / "nvidia-smi"
        script.write_text(f"#!/bin/sh\nif [ $1 = topo ]; then echo table; else {driver}; fi\n")
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return have


def test_gpus_that_are_alike(machine: Any, gpus: Any):
    machine()
    gpus(["H200", "H200"], True)
    facts = collect_environment({}).facts
    assert facts["gpus"] == {
        "devices": ["H200, 80 GiB", "H200, 80 GiB"],
        "peer_access": {"0->1": True, "1->0": True},
        "topology": "table",
    }
    assert {name: facts["versions"][name] for name in ("cuda", "nccl", "driver")} == {
        "cuda": "12.8", "nccl": "2.29.7", "driver": "570.1",
    }  # fmt: skip
    assert told() == []
    assert ("SW620", Severity.NOTE) in {
        (finding.code, finding.severity) for finding in collect_environment({}).findings
    }


def test_gpus_that_differ_and_cannot_reach_each_other(machine: Any, gpus: Any):
    machine()
    gpus(["H200", "L4", "L4"], False, driver="exit 3")
    assert [each[:3] for each in told()] == [
        ("SW604", "warning", "GPUs cannot reach each other's memory directly (5 pairs, first 0->2)"),
        ("SW605", "warning", "GPU models differ: the slowest limits the speed, the smallest memory the model"),
    ]
    assert "driver" not in collect_environment({}).facts["versions"]


VERSIONS = {
    "SW611": ("torch", ["2.5.1", "2.6.0"]),
    "SW612": ("torch", ["2.6.3", "2.7.0"]),
    "SW613": ("torch", ["2.7.1", "2.8.0"]),
    "SW614": ("torch", ["2.10.9", "2.11.0"]),
    "SW615": ("torch", ["2.12.0", "2.13.0"]),
    "SW616": ("torch", ["2.12.1", "2.13.0"]),
    "SW617": ("torch", ["2.12.1", "2.13.0"]),
    "SW618": ("accelerate", ["1.15.0", "1.16.0"]),
    "SW619": ("accelerate", ["1.15.0", "1.16.0"]),
    "SW620": ("nccl", ["2.29.9", "2.30.0"]),
}
ERRORS, NOTES = {"SW614"}, {"SW618", "SW619", "SW620"}  # notes: `doctor` exits with 0


@pytest.mark.parametrize("code", sorted(VERSIONS))
def test_each_bad_version_and_the_first_good_one(code: str):
    package, (bad, good) = VERSIONS[code]
    (found,) = [finding for finding in find_known_bad({package: f"{bad}+cu128"}, "gloo") if finding.code == code]
    assert found.message.startswith(f"{package} {bad}: ")
    assert found.where == package
    assert found.severity.value == ("error" if code in ERRORS else "note" if code in NOTES else "warning")
    assert code not in {finding.code for finding in find_known_bad({package: good}, "gloo")}
    assert code in {finding.code for finding in find_known_bad({package: f"{bad}rc1"}, "cpu:gloo,cuda:nccl")}
    assert (code in {finding.code for finding in find_known_bad({package: bad}, "nccl")}) == (code != "SW614")


def test_the_table_is_all_of_it():
    assert {row.code for row in TABLE} == set(VERSIONS)
    assert "SW618" not in {finding.code for finding in find_known_bad({"accelerate": "1.12.0"}, "gloo")}


@pytest.mark.slow
def test_doctor_says_what_a_limited_shell_lacks():
    command = [sys.executable, "-m", "shardwise.cli.main", "doctor", "--ranks", "0", "--format", "json"]
    limited = f"ulimit -Sn 512; exec {' '.join(command)}"
    result = subprocess.run(["sh", "-c", limited], capture_output=True, text=True, timeout=120)
    assert result.returncode == 1, result.stderr
    found = json.loads(result.stdout)
    assert found["machine"]["open_files"][0] == 512
    assert found["collectives"] == []
    (finding,) = [finding for finding in found["findings"] if finding["code"] == "SW602"]
    assert finding["message"] == "a process may open 512 files only"
    assert (finding["where"], finding["severity"]) == ("environment", "warning")


@pytest.mark.slow
def test_doctor_measures_every_size_that_ranks_can_share():
    result = shardwise("doctor", "--ranks", "3", "--format", "json")
    rows = json.loads(result.stdout)["collectives"]
    names = ["all-gather", "reduce-scatter", "all-reduce"]
    assert [row["collective"] for row in rows] == names * 4
    sizes = [size // 4 // 3 * 3 * 4 for size in (1 << 10, 1 << 16, 1 << 20, 1 << 24)]
    assert [row["num_bytes"] for row in rows] == [size for size in sizes for _ in names]
    assert all(row["bytes_per_second"] == pytest.approx(row["num_bytes"] / row["seconds"]) for row in rows)


def printed(environment: Environment, rows: list[Any], num_ranks: int) -> list[str]:
    from shardwise.report.terminal import print_examination

    with open(os.devnull, "w") as nowhere:
        console = Console(file=nowhere, width=120, record=True)
        print_examination(console, environment, rows, num_ranks)
        return [line.rstrip() for line in console.export_text().splitlines()]


def test_the_page_of_doctor():
    facts: dict[str, dict[str, Any]] = {
        "machine": {"memory_bytes": 3 * GIB, "open_files": [1, 2]},
        "gpus": {},
        "launcher": {"num_ranks": 2},
    }
    rows = [
        SimpleNamespace(collective="all-gather", num_bytes=1024, seconds=0.001, bytes_per_second=1024000.0),
        SimpleNamespace(collective="all-reduce", num_bytes=1024, seconds=0.5, bytes_per_second=2048.0),
        SimpleNamespace(collective="all-gather", num_bytes=2048, seconds=2.0, bytes_per_second=1024.0),
    ]
    finding = Finding(code="SW601", message="too small", where="environment", fix="more")
    lines = printed(Environment(facts=facts, findings=(finding,)), rows, 4)
    assert lines[:5] == ["machine", "  memory: 3 GiB", "  open files: [1, 2]", "launcher", "  num ranks: 2"]
    text = "\n".join(lines)
    assert "collectives between 4 local ranks" in text
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert cells == [["1 KiB", "1 ms, 1000 KiB/s", "500 ms, 2 KiB/s"], ["2 KiB", "2 s, 1 KiB/s", ""]]
    assert lines[-1] == "environment: warning SW601: too small (fix: more)"
    assert printed(Environment(facts={}, findings=()), [], 0) == ["nothing wrong was found"]
