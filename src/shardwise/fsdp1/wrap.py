"""FSDP1's wrapping policies, `enable_wrap` and `wrap`: torch's own, those that scripts take by a private name too."""

# ruff: noqa: F403
from torch.distributed.fsdp.wrap import *
from torch.distributed.fsdp.wrap import __all__ as __all__

from shardwise import compat

_or_policy = compat.or_policy
_module_wrap_policy = compat.module_wrap_policy
_Policy = compat.Policy
