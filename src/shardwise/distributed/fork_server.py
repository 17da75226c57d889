"""Preloaded by the fork server, so that ranks start with modules already imported."""

import os
import signal
import sys


def _default_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


if any("multiprocessing.forkserver" in argument for argument in sys.orig_argv):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.register_at_fork(after_in_child=_default_sigterm)
