"""The `sitecustomize.py` of a private copy of the tree: its processes import that copy, and may say what they call.

`mutation_running.py` puts it into the copy and into the copy's `src`, so it reaches ranks, commands and launchers
alike, also where a test writes a PYTHONPATH of its own. With SHARDWISE_MUTATION_CALLS set to a folder, every process
notes there which functions of the package, or modules, it enters while which test file runs: at once, so that a killed
process loses nothing.
"""

import mmap
import os
import sys
import threading
from importlib.machinery import PathFinder
from types import CodeType, FrameType

VARIABLE = "SHARDWISE_MUTATION_CALLS"
MODULE = "<module>"
_DIGITS = 8
_PARTS = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")  # they run with the function around them
_IS_FUNCTION = 1  # CO_OPTIMIZED: not the body of a class


def use_copy(source: str) -> None:
    """Import the package from `source`, whatever is installed and whatever PYTHONPATH says."""
    if source not in sys.path:
        sys.path.insert(0, source)


def run_next(ours: tuple[str, ...]) -> None:
    """Run the `sitecustomize` that this one hides, if there is one."""
    spec = PathFinder.find_spec("sitecustomize", [folder for folder in sys.path if folder not in ours])
    if spec is not None and spec.loader is not None:
        from importlib.util import module_from_spec

        spec.loader.exec_module(module_from_spec(spec))


def now_file(folder: str) -> str:
    """Where the test worker that this process belongs to says which test file it runs; made where it is not there."""
    path = os.path.join(folder, "now-" + os.environ.get("PYTEST_XDIST_WORKER", ""))
    with open(path, "ab") as file:
        file.truncate(_DIGITS)
    return path


def _mapped(path: str) -> mmap.mmap:
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), _DIGITS, access=mmap.ACCESS_READ)


def record_calls(source: str, folder: str) -> None:
    """Append `number file::function` to `folder/calls` when a function below `source/shardwise` is first entered.

    The number is that of the test file that runs now, which `folder/now-*` of the test worker holds; with another
    number everything counts as not entered yet. Forks continue alike.
    """
    prefix = os.path.join(source, "shardwise") + os.sep
    seen: dict[int, CodeType] = {}  # holds the code, so that its id stays its own
    now: mmap.mmap | None = None
    number = b""
    # Bound now: tests put faults into the module os.
    open_file, write, close, flags = os.open, os.write, os.close, os.O_WRONLY | os.O_CREAT | os.O_APPEND
    calls = os.path.join(folder, "calls")

    def trace(frame: FrameType, event: str, argument: object) -> None:
        nonlocal now, number
        code = frame.f_code
        if not code.co_filename.startswith(prefix):
            return
        if now is None:  # not before: a worker learns its name after it has started
            now = _mapped(now_file(folder))
        if number != now[:]:
            number = now[:]
            seen.clear()
        if id(code) in seen:
            return
        seen[id(code)] = code
        if code.co_name in _PARTS or not (code.co_flags & _IS_FUNCTION or code.co_name == MODULE):
            return
        try:
            file = open_file(calls, flags)
            try:
                write(file, number + f" {code.co_filename[len(prefix) :]}::{code.co_qualname}\n".encode())
            finally:
                close(file)
        except OSError:  # no file descriptor is left, say: another process or call will tell
            del seen[id(code)]

    threading.settrace(trace)
    sys.settrace(trace)


if __name__ == "sitecustomize":
    here = os.path.dirname(os.path.abspath(__file__))
    source = here if os.path.basename(here) == "src" else os.path.join(here, "src")
    use_copy(source)
    run_next((source, os.path.dirname(source)))
    if folder := os.environ.get(VARIABLE):
        record_calls(source, folder)
