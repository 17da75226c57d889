"""The one record that we add to `torch.save` files: checksums of the pickle and of every storage. No torch.

`torch.load` looks up records by name and does not see this one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from shardwise.checkpointing.pickles.zip_index import ZipIndex
from shardwise.checkpointing.storage.checksums import BLOCK_BYTES, checksum, from_hex, to_hex
from shardwise.errors import CheckpointError

RECORD = "shardwise.json"
_MAX_BYTES = 1 << 28


def checksum_record(pickled: bytes, storages: Mapping[str, Iterable[int]]) -> bytes:
    """The record's data.

    Args:
        pickled: `data.pkl`.
        storages: Checksums of the blocks of each storage, by its key.
    """
    hexadecimal = {key: to_hex(blocks) for key, blocks in storages.items()}
    ours = {"block_bytes": BLOCK_BYTES, "pickle": to_hex([checksum(pickled)]), "xxh3": hexadecimal}
    return json.dumps(ours, separators=(",", ":")).encode()


def read_checksums(index: ZipIndex, pickled: bytes, where: str) -> tuple[int, dict[str, tuple[int, ...]]]:
    """Bytes under one checksum, and the checksums of each storage by its key; 0 and none in files of others.

    Raises:
        CheckpointError: The record is damaged, or the pickle does not have its checksum.
    """
    if RECORD not in index.records:
        return 0, {}
    try:
        ours = json.loads(index.read_record(RECORD, _MAX_BYTES))
        block_bytes = ours["block_bytes"]
        if not isinstance(block_bytes, int) or not 1 << 10 <= block_bytes <= 1 << 30:
            raise ValueError("strange block size")
        (pickle_checksum,) = from_hex(ours["pickle"])
        checksums = {key: from_hex(text) for key, text in ours["xxh3"].items()}
        for key, blocks in checksums.items():
            if len(blocks) != -(-index.locate(f"data/{key}")[1] // block_bytes):
                raise ValueError(f"record data/{key} does not have a checksum for each of its blocks")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(where, f"its checksums cannot be read: {error}") from None
    if checksum(pickled) != pickle_checksum:
        raise _damaged(where, "its pickle does not have its checksum")
    return block_bytes, checksums


def _damaged(where: str, why: str) -> CheckpointError:
    return CheckpointError("the file is damaged", where=where, why=why, fix="copy the file again, or load an older one")
