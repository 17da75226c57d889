"""The end product of a run: a folder with weights, config and tokenizer that transformers opens."""

from __future__ import annotations

import shutil
from pathlib import Path

from torch import nn

from shardwise.checkpointing.exporting import save_weights
from shardwise.errors import CheckpointError
from shardwise.ranks import on_rank_zero

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


def export(model: nn.Module, folder: Path, tokenizer: str) -> None:
    """Write a model's weights as safetensors, with its config and its tokenizer beside them.

    Args:
        model: Sharded or not.
        folder: Weights that lie there are replaced.
        tokenizer: `data.tokenizer` of the run; `bytes` has no file.

    Raises:
        CheckpointError: The folder cannot be written; the same on every rank.

    Ranks:
        Collective.
    """
    save_weights(model, folder, overwrite=True)
    if tokenizer != "bytes":
        on_rank_zero(lambda: _copy_tokenizer(Path(tokenizer), folder))


def _copy_tokenizer(tokenizer: Path, folder: Path) -> None:
    source = tokenizer if tokenizer.is_dir() else tokenizer.parent
    try:
        for name in _TOKENIZER_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        if tokenizer.is_file():  # whatever its name was
            shutil.copyfile(tokenizer, folder / "tokenizer.json")
    except OSError as error:
        raise CheckpointError(
            f"cannot copy the tokenizer: {error.strerror or error}",
            where=str(folder),
            why="the exported folder holds what transformers needs: weights, config and tokenizer",
            fix=f"copy {tokenizer} there by hand",
        ) from None
