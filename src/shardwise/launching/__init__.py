"""Where ranks come from: a launcher's environment is read, or local ranks are started, watched and started again."""

from shardwise.launching.launchers import Launch, first_host, read_launch
from shardwise.launching.local import start_local
from shardwise.launching.rank_side import resolve_target
from shardwise.launching.stopping import STOP_SIGNALS, StopRequest, stop_requests

__all__ = [
    "STOP_SIGNALS",
    "Launch",
    "StopRequest",
    "first_host",
    "read_launch",
    "resolve_target",
    "start_local",
    "stop_requests",
]
