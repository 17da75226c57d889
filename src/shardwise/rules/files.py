"""Finding, reading and writing source files. Writing is a rename, so a file is the old one or the new one."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from shardwise.errors import SourceError
from shardwise.rules.settings import LintSettings, matches

STDIN = "-"
_FOLDERS_OF_OTHERS = frozenset(
    {"__pycache__", "node_modules", "site-packages", "venv", "env", "build", "dist", "_build", "__pypackages__"}
)
_SUFFIXES = frozenset({".py", ".pyw"})
# A file without any of these has nothing a rule could be about.
RELEVANT = re.compile(
    rb"fully_shard|[Ff][Ss][Dd][Pp]|distributed\.checkpoint|distributed import checkpoint"
    rb"|full_tensor|gradient_sync|shardwise"
)


def find_files(paths: Iterable[str | Path], settings: LintSettings) -> list[str]:
    """The Python files at these paths: files as given, folders searched; sorted, each once.

    Raises:
        SourceError: A path does not exist.
    """
    found: dict[str, None] = {}
    for path in map(str, paths):
        if path == STDIN:
            found[path] = None
        elif os.path.isdir(path):
            found.update(dict.fromkeys(sorted(_search(path, settings))))
        elif os.path.exists(path):
            if Path(path).suffix != ".ipynb" and not _is_excluded(path, settings):
                found[path] = None
        else:
            raise SourceError(f"no such file or folder: {path}", where=path, fix="give paths that exist")
    return list(found)


def _search(folder: str, settings: LintSettings) -> Iterator[str]:
    for current, folders, files in os.walk(folder):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".")
            and name not in _FOLDERS_OF_OTHERS
            and not os.path.exists(os.path.join(current, name, "pyvenv.cfg"))
            and not _is_excluded(os.path.join(current, name), settings)
        )
        for name in files:
            path = os.path.join(current, name)
            if os.path.splitext(name)[1] in _SUFFIXES and not _is_excluded(path, settings):
                yield path


def _is_excluded(path: str, settings: LintSettings) -> bool:
    return any(matches(path, settings.root, pattern) for pattern in settings.exclude)


def read_bytes(path: str) -> bytes:
    """A file's bytes.

    Raises:
        SourceError: It cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise SourceError(f"cannot be read: {error.strerror}", where=f"{path}:1:1") from None


def write_bytes(path: str, data: bytes) -> None:
    """Replace a file's content in one step, keeping its mode and, where it is a link, the link.

    Raises:
        SourceError: It cannot be written; the file is as it was.
    """
    target = os.path.realpath(path)
    temporary = ""
    try:
        handle, temporary = tempfile.mkstemp(dir=os.path.dirname(target), prefix=".shardwise-")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        shutil.copymode(target, temporary)
        os.replace(temporary, target)
    except OSError as error:
        if temporary and os.path.exists(temporary):
            os.unlink(temporary)
        raise SourceError(f"cannot be written: {error.strerror}", where=path) from None
