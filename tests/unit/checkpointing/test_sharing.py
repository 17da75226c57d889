"""Everything is written once, by a rank that has it, and the work is divided."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.checkpointing.contents import ChunkSpec, LocalChunk, StoredChunk, StoredTensor
from shardwise.checkpointing.saving import dedup_chunks, dedup_tensors, merge_values
from shardwise.errors import CheckpointError


def rows(name: str, start: int, count: int, of: int) -> LocalChunk:
    return LocalChunk(name, "float32", (of, 4), ChunkSpec((start, 0), (count, 4)))


def plain(shape: tuple[int, ...], checksum: int) -> StoredTensor:
    return StoredTensor("t", "float32", shape, (StoredChunk(ChunkSpec.whole(shape), checksums=(checksum,)),))


@given(st.integers(1, 4), st.integers(1, 4), st.lists(st.integers(1, 40), max_size=12))
def test_hsdp_writes_each_chunk_once(num_replicas: int, num_shards: int, sizes: list[int]):
    tables = [
        [rows(f"t{index}", shard * size, size, size * num_shards) for index, size in enumerate(sizes)]
        for _ in range(num_replicas)
        for shard in range(num_shards)
    ]
    chosen = dedup_chunks(tables)
    written = [
        (tables[rank][index].name, tables[rank][index].spec) for rank in range(len(tables)) for index in chosen[rank]
    ]
    assert len(written) == len(set(written)) == len(sizes) * num_shards
    loads = [sum(tables[rank][index].num_bytes for index in indices) for rank, indices in enumerate(chosen)]
    largest = max((size * 16 for size in sizes), default=0)
    assert max(loads) - min(loads) <= largest


def test_what_one_rank_alone_has_counts_first():
    alone, shared = rows("own", 0, 8, 8), [rows(f"t{index}", 0, 1, 1) for index in range(8)]
    chosen = dedup_chunks([[alone, *shared], shared])
    assert chosen == [[0], list(range(8))]


def test_one_name_for_two_tensors_is_refused():
    with pytest.raises(CheckpointError, match="do not agree on t"):
        dedup_chunks([[rows("t", 0, 2, 4)], [rows("t", 0, 2, 6)]])


def test_equal_tensors_once_differing_ones_by_rank():
    same, other = plain((4,), 1), plain((4,), 2)
    tables = [{"a": same, "b": same}, {"a": same, "b": other}, {"a": same, "b": other, "c": same}]
    written = dedup_tensors(tables)
    assert written[1]["b"] == "per_rank.1.b"
    assert written[2] == {"b": "per_rank.2.b", "c": "per_rank.2.c"}
    assert written[0] == {"a": "a", "b": "b"} or (written[0] == {"b": "b"} and written[1]["a"] == "a")
    names = [name for table in written for name in table.values()]
    assert sorted(names) == ["a", "b", "per_rank.1.b", "per_rank.2.b", "per_rank.2.c"]


def test_plain_tensors_are_divided():
    table = {f"t{index}": plain((index + 1,), index) for index in range(20)}
    written = dedup_tensors([table, table, table])
    loads = [sum(table[name].num_bytes for name in each) for each in written]
    assert sum(len(each) for each in written) == 20
    assert max(loads) - min(loads) <= 80


def test_values_of_ranks_that_differ():
    merged = merge_values([{"a": 1, "b": [1]}, {"a": 1, "b": [2]}, {"a": 1.0, "c": None}])
    assert merged == {"a": 1, "b": [1], "per_rank.1.b": [2], "per_rank.2.a": 1.0, "per_rank.2.c": None}
    assert type(merged["per_rank.2.a"]) is float
