"""FSDP1's settings under their own names: torch's own classes, so that objects of either import are the same."""

# ruff: noqa: F403
from torch.distributed.fsdp import OptimStateKeyType
from torch.distributed.fsdp.api import *
from torch.distributed.fsdp.api import __all__ as _names

__all__ = [*_names, "OptimStateKeyType"]  # pyright: ignore
