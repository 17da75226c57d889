"""Sharding, training and checkpointing with PyTorch FSDP2, for any `nn.Module`.

Public names load on first use, from the modules in `__init__.pyi`: importing shardwise does not import torch.
"""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.2.0"

_STUB = Path(__file__).with_name("__init__.pyi").read_text(encoding="utf-8")
_HOME_OF = {name: home for home, name in re.findall(r"^from (\S+) import (\w+) as ", _STUB, re.MULTILINE)}

__all__ = ["__version__", *sorted(_HOME_OF)]  # pyright: ignore


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
