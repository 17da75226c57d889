"""The small files that belong to weights: a model's config, a tokenizer. No torch."""

from __future__ import annotations

import re

from shardwise.checkpointing.storage import files
from shardwise.errors import CheckpointError

_MAX_BYTES = 64 << 20
_NAMES = re.compile(
    r"(config|generation_config|preprocessor_config|processor_config|tokenizer|tokenizer_config|special_tokens_map|"
    r"added_tokens|vocab|chat_template)\.json|tokenizer\.model|merges\.txt|vocab\.txt|chat_template\.jinja|LICENSE(\..*)?"
)


def read_companions(place: files.Place) -> dict[str, bytes]:
    """The files beside weights that transformers looks for, by name.

    Args:
        place: The folder, or one such file (then only that).

    Raises:
        CheckpointError: It is not there, or a file is far larger than such files are.

    Ranks:
        Local.
    """
    if files.size_of(place) is not None:
        return {files.split(place)[1]: files.read_small(place, _MAX_BYTES)}
    if not files.exists(place):
        raise CheckpointError("there is no such file or folder", where=str(place), fix="check the path of the config")
    return {
        name: files.read_small(files.join(place, name), _MAX_BYTES)
        for name in files.names_in(place)
        if _NAMES.fullmatch(name) and files.size_of(files.join(place, name)) is not None
    }
