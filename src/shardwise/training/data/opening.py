"""`open_data` and `open_evaluation`: from the settings to what hands out batches."""

from __future__ import annotations

import torch

from shardwise.config.run import DataConfig
from shardwise.errors import ConfigError
from shardwise.progress import NoProgress, Progress
from shardwise.training.data.loader import Evaluation, Loader
from shardwise.training.data.reading import open_samples
from shardwise.training.data.samples import Samples


def open_data(
    config: DataConfig,
    *,
    batch_size: int,
    rank: int,
    num_ranks: int,
    seed: int,
    vocab_size: int | None,
    device: torch.device | str,
    progress: Progress | None = None,
) -> Loader:
    """Open what is trained on.

    Text and, where they are packed, JSONL and datasets are tokenised here, once, into a compact array on every rank;
    bytes of large text files, and files of tokens, are mapped and not read. For more than a few GB of text and a
    tokenizer of its own, files of tokens are the better source.

    Args:
        config: The data.
        batch_size: Rows of a global batch.
        rank: Of this process, among those that see different data.
        num_ranks: How many there are.
        seed: Of the order.
        vocab_size: Tokens that the model knows; None: not checked.
        device: Where batches go.
        progress: Hears of files and records that are tokenised.

    Raises:
        ConfigError: The data is missing, empty, unreadable, too short, or does not fit the model or the ranks.
        EnvironmentProblem: It needs a library that is not installed.

    Ranks:
        Local. Errors of files that only one machine has are raised there only: see `raise_together`.
    """
    _check_settings(config, batch_size, num_ranks)
    opened = open_samples(config, config.source, "data.source", vocab_size, progress or NoProgress())
    num_samples = opened.samples.num_samples - _num_held_out(config, opened.samples)
    return Loader(
        opened.samples,
        num_samples=num_samples,
        tokenizer=opened.tokenizer,
        batch_size=batch_size,
        rank=rank,
        num_ranks=num_ranks,
        seed=seed,
        shuffle=config.shuffle,
        device=device,
        workers=config.workers,
        prefetch=config.prefetch,
        fingerprint=opened.fingerprint | {"num_samples": num_samples},
    )


def open_evaluation(
    config: DataConfig,
    *,
    batch_size: int,
    rank: int,
    num_ranks: int,
    vocab_size: int | None,
    device: torch.device | str,
    training: Loader | None = None,
) -> Evaluation | None:
    """Open what is held out, if anything is: `data.evaluation`, or the last part of the source as it lies.

    Args:
        config: The data.
        batch_size: Rows of a batch over all ranks.
        rank: Of this process.
        num_ranks: How many there are.
        vocab_size: Tokens that the model knows; None: not checked.
        device: Where batches go.
        training: From `open_data` with the same config: its source is then not opened twice.

    Raises:
        ConfigError: As `open_data`.

    Ranks:
        Local. Every rank gets as many batches as the others.
    """
    _check_settings(config, batch_size, num_ranks)
    if config.evaluation is not None:
        samples = open_samples(config, config.evaluation, "data.evaluation", vocab_size, NoProgress()).samples
        first = 0
    elif config.evaluation_fraction > 0:
        opened = training.samples if training is not None else None
        samples = opened or open_samples(config, config.source, "data.source", vocab_size, NoProgress()).samples
        first = samples.num_samples - _num_held_out(config, samples)
    else:
        return None
    held_out = Evaluation(
        samples,
        first,
        samples.num_samples,
        batch_size=batch_size,
        rank=rank,
        num_ranks=num_ranks,
        device=device,
        threads=min(1, config.workers),
    )
    if not len(held_out):
        raise ConfigError(
            f"{held_out.num_samples} held-out sample(s) cannot be shared by {num_ranks} ranks",
            where="data.evaluation",
            why="without labels no row can be filled in, and every rank needs one",
            fix=f"hold out at least {num_ranks} samples",
        )
    return held_out


def _num_held_out(config: DataConfig, samples: Samples) -> int:
    if config.evaluation is not None or config.evaluation_fraction == 0:
        return 0
    num = max(1, round(samples.num_samples * config.evaluation_fraction))
    if num >= samples.num_samples:
        raise ConfigError(
            f"holding out {num} of {samples.num_samples} sample(s) leaves none to train on",
            where="data.evaluation_fraction",
            why="samples are held out whole, at least one of them",
            fix="give more data, or a shorter data.sequence_length, or name data.evaluation",
        )
    return num


def _check_settings(config: DataConfig, batch_size: int, num_ranks: int) -> None:
    lines = [
        f"data.{name}: {value}, at least {least}"
        for name, value, least in (
            ("sequence_length", config.sequence_length, 1),
            ("workers", config.workers, 0),
            ("prefetch", config.prefetch, 1),
        )
        if value < least
    ]
    if not 0 <= config.evaluation_fraction < 1:
        lines.append(f"data.evaluation_fraction: {config.evaluation_fraction}, at least 0 and below 1")
    if lines:
        raise ConfigError(
            f"{len(lines)} setting(s) of the data are out of range",
            where="\n".join(lines),
            why="a sequence has a token, a worker a batch to hold, and something is left to train on",
            fix="leave them out to have the defaults, or set them within their bounds",
        )
    if batch_size < 1 or batch_size % num_ranks:
        near = max(1, round(batch_size / num_ranks)) * num_ranks
        raise ConfigError(
            f"a batch of {batch_size} cannot be divided among {num_ranks} ranks",
            where="training.batch_size",
            why="every rank takes the same number of sequences, so that none waits for another",
            fix=f"set training.batch_size = {near}, or start another number of ranks",
        )
