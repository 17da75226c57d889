"""collect_environment() and the table of versions: facts are there, and each judgement comes and goes with its fact."""

import json
import socket

import pytest

from shardwise.diagnosing.environment import TABLE, collect_environment, find_known_bad
from tests.unit.cli.test_main import shardwise


def codes(variables: dict[str, str]) -> set[str]:
    return {finding.code for finding in collect_environment(variables).findings}


def test_facts_are_those_of_this_machine():
    facts = collect_environment({}).facts
    assert facts["machine"]["host"] == socket.gethostname()
    assert facts["machine"]["memory_bytes"] > 1 << 28
    assert facts["versions"]["torch"][0].isdigit()
    assert facts["launcher"] == {"source": "single", "rank": 0, "num_ranks": 1}


@pytest.mark.parametrize(
    ("name", "bad", "good", "code"),
    [
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", "8", "SW606"),
        ("NCCL_P2P_DISABLE", "1", "0", "SW607"),
        ("TORCH_DISTRIBUTED_DEBUG", "detail", "INFO", "SW608"),
    ],
)
def test_variables_that_hurt(name: str, bad: str, good: str, code: str):
    assert code in codes({name: bad})
    assert code not in codes({name: good})
    assert code not in codes({})


def test_launcher_that_contradicts_itself():
    assert "SW609" in codes({"RANK": "5", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"})


def test_port_in_use():
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert "SW610" in codes({**rank, "MASTER_PORT": port})
    assert "SW610" not in codes({**rank, "MASTER_PORT": port})


@pytest.mark.parametrize(
    ("versions", "backend", "expected"),
    [
        ({"torch": "2.13.0+cpu"}, "gloo", set()),
        ({"torch": "2.5.1"}, "nccl", {"SW611", "SW613", "SW616", "SW617"}),
        ({"torch": "2.10.0"}, "gloo", {"SW614", "SW616", "SW617"}),
        ({"torch": "2.10.0"}, "nccl", {"SW616", "SW617"}),
        ({"torch": "2.12.1"}, "nccl", {"SW615", "SW616", "SW617"}),
        ({"nccl": "2.29.7"}, "nccl", {"SW620"}),
        ({"nccl": "2.30.7"}, "nccl", set()),
        ({"torch": "not a version"}, "nccl", set()),
    ],
)
def test_versions_known_to_go_wrong(versions: dict[str, str], backend: str, expected: set[str]):
    assert {finding.code for finding in find_known_bad(versions, backend)} == expected


def test_every_row_names_its_source():
    assert all(row.source and row.fix for row in TABLE)
    assert len({row.code for row in TABLE}) == len(TABLE)


def test_doctor_runs_real_collectives_and_prints_json():
    result = shardwise("doctor", "--ranks", "2", "--format", "json")
    assert result.returncode in (0, 1), result.stderr
    found = json.loads(result.stdout)
    assert {row["collective"] for row in found["collectives"]} == {"all-gather", "reduce-scatter", "all-reduce"}
    assert all(row["seconds"] > 0 for row in found["collectives"])
    assert result.returncode == int(any(finding["severity"] != "note" for finding in found["findings"]))


def test_doctor_prints_a_page_for_people():
    result = shardwise("doctor", "--ranks", "0")
    assert "torch: 2." in result.stdout
    assert "Traceback" not in result.stderr
