"""Keep samples of every file format, written by this version: later versions must read them for ever.

python -m tests.contract.store    adds stored/<version of pyproject.toml>
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from tests.contract.command_line import pyproject
from tests.contract.samples import write_samples

STORED = Path(__file__).parent / "stored"
_MAX_BYTES = 3 << 19  # 1.5 MiB


def stored_versions() -> list[str]:
    """The versions of which samples are kept."""
    return sorted(path.name for path in STORED.iterdir() if path.is_dir()) if STORED.is_dir() else []


def store() -> Path:
    """Write the samples of this version.

    Raises:
        SystemExit: They are there already, or too large to be kept.
    """
    folder = STORED / pyproject()["project"]["version"]
    if folder.exists():
        raise SystemExit(f"{folder} is there already: samples of a version are never written again")
    with tempfile.TemporaryDirectory() as work:
        samples = Path(work) / "samples"
        write_samples(samples)
        num_bytes = sum(file.stat().st_size for file in samples.rglob("*") if file.is_file())
        if num_bytes > _MAX_BYTES:
            raise SystemExit(f"the samples take {num_bytes:,} bytes, and {_MAX_BYTES:,} are the most to keep")
        STORED.mkdir(exist_ok=True)
        shutil.copytree(samples, folder)
    print(f"{folder}: {num_bytes:,} bytes")
    return folder


if __name__ == "__main__":
    if len(sys.argv) > 1:
        raise SystemExit(__doc__)
    store()
