"""Loaded by the process from which local ranks are forked: it outlives SIGTERM, so that the ranks can save.

A scheduler that stops a job signals every process of it. Without this one, the launcher would take its ranks for dead
while they write their last checkpoint. It ends with the launcher all the same.
"""

import os
import signal
import sys


def _default_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


if any("multiprocessing.forkserver" in argument for argument in sys.orig_argv):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.register_at_fork(after_in_child=_default_sigterm)
