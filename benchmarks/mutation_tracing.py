"""The `sitecustomize.py` of a private copy of the tree: its processes import that copy, and may say what they call.

`mutation_running.py` puts it into the copy and into the copy's `src`, so it reaches ranks, commands and launchers
alike, also where a test writes a PYTHONPATH of its own. With SHARDWISE_MUTATION_CALLS set, every process appends
`file::function` to that file when it first enters a function of the package, or a module: at once, so that a killed
process loses nothing.
"""

import os
import sys
import threading
from importlib.machinery import PathFinder
from types import CodeType, FrameType

VARIABLE = "SHARDWISE_MUTATION_CALLS"
MODULE = "<module>"
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


def record_calls(source: str, path: str) -> None:
    """Append each function below `source/shardwise` to `path` when this process, or a fork of it, first enters it."""
    prefix = os.path.join(source, "shardwise") + os.sep
    seen: dict[int, CodeType] = {}  # holds the code, so that its id stays its own
    # Bound now: tests put faults into the module os.
    open_file, write, close, flags = os.open, os.write, os.close, os.O_WRONLY | os.O_CREAT | os.O_APPEND

    def trace(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(prefix) or id(code) in seen:
            return
        seen[id(code)] = code
        if code.co_name in _PARTS or not (code.co_flags & _IS_FUNCTION or code.co_name == MODULE):
            return
        try:
            file = open_file(path, flags)
            try:
                write(file, f"{code.co_filename[len(prefix) :]}::{code.co_qualname}\n".encode())
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
    if path := os.environ.get(VARIABLE):
        record_calls(source, path)
