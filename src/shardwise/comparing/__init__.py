"""Is the sharded run equal to one process? `parity()` answers, and names the first thing that differs."""

from shardwise.comparing.run import parity
from shardwise.comparing.verdict import Deviation, Difference, Parity

__all__ = ["Deviation", "Difference", "Parity", "parity"]
