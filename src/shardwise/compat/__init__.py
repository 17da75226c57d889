"""The only package that uses private APIs of torch, by subject; `support` checks the installed torch."""

# ruff: noqa: F403
from shardwise.compat.support import check_torch

try:
    from shardwise.compat.collectives import *
    from shardwise.compat.dtensor import *
    from shardwise.compat.fsdp import *
    from shardwise.compat.fsdp1 import *
    from shardwise.compat.gradients import *
    from shardwise.compat.one_rank import *
    from shardwise.compat.runtime import *
except ImportError:
    check_torch()  # raises with the missing private names and the versions to install
    raise
