"""A run's folder: a new name where none is given, the copy of its settings, and whether it can be written."""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import replace
from pathlib import Path

import yaml

from shardwise.config.load import to_yaml
from shardwise.config.run import RunConfig
from shardwise.errors import ConfigError
from shardwise.launching import read_launch

CONFIG_NAME = "config.yaml"
_PARENT = "runs"


def with_folder(config: RunConfig, *, reserve: bool = True) -> RunConfig:
    """The config with a folder in it: its own, that of the launcher's job, or the next free name in `runs`.

    Args:
        config: The run.
        reserve: Make the folder, so that nobody else gets the name.

    Raises:
        ConfigError: It cannot be made.

    Ranks:
        Local: call it once, before the ranks start, so that a restart finds its checkpoints.
    """
    if config.folder is not None:
        return config
    name = _plain_name(Path(config.model).name) or "run"
    if job := _plain_name(read_launch().job):  # the same after the launcher has started the job again
        return replace(config, folder=str(Path(_PARENT, f"{name}-{job}")))
    number = 1
    while True:
        folder = Path(_PARENT, f"{name}-{number}")
        try:
            if not reserve:
                if not folder.exists():
                    break
            else:
                folder.mkdir(parents=True)
                break
        except FileExistsError:
            pass
        except OSError as error:
            raise _unwritable(folder, error) from None
        number += 1
    return replace(config, folder=str(folder))


def give_back(config: RunConfig) -> None:
    """Remove the run's folder if nothing was ever written into it.

    Ranks:
        Local.
    """
    try:
        os.rmdir(config.folder or "")
    except OSError:
        return  # there is something in it, or it was never made


def prepare_folder(folder: Path) -> None:
    """Make the folder and see that files can be written into it.

    Raises:
        ConfigError: They cannot.

    Ranks:
        Local: call it on rank 0.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        raise _unwritable(folder, error) from None


def refuse_other_model(folder: Path, config: RunConfig) -> None:
    """Raise if the folder holds a run of another model.

    Raises:
        ConfigError: Its `config.yaml` names another model, or other options of it.

    Ranks:
        Local: call it on rank 0.
    """
    try:
        before = yaml.safe_load((folder / CONFIG_NAME).read_text())
        theirs = (before["model"], before.get("model_options") or {})
    except (OSError, yaml.YAMLError, TypeError, KeyError):
        return  # no run yet, or a file that is not ours: checkpoints are compared tensor by tensor anyhow
    if theirs != (config.model, config.model_options):
        raise ConfigError(
            f"the folder holds a run of {_spelled(*theirs)}, and this one trains "
            f"{_spelled(config.model, config.model_options)}",
            where=f"folder ({folder})",
            why="a run goes on from its own checkpoints",
            fix="set folder to a new one, or model as it was; weights may name its checkpoint to start from",
        )


def write_config(folder: Path, config: RunConfig) -> None:
    """Keep the settings of the run beside its results; `shardwise train` on that file goes on with it.

    Ranks:
        Local: call it on rank 0.
    """
    text = f"# Go on with this run: shardwise train {folder / CONFIG_NAME}\n{to_yaml(config)}"
    temporary = folder / f".{CONFIG_NAME}.writing"
    temporary.write_text(text)
    temporary.replace(folder / CONFIG_NAME)


def _plain_name(text: str) -> str:
    return re.sub(r"[^\w.-]+", "-", text).strip("-.")


def _spelled(model: str, options: dict[str, object]) -> str:
    return model + (f" with {options}" if options else "")


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot write into {folder}: {(error.strerror or str(error)).lower()}",
        where=f"folder ({folder})",
        why="checkpoints, metrics and a copy of the settings go there",
        fix="set folder to one that can be written, with space left",
    )
