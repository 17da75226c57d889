"""Test files run one by one in private copies of the tree, ended with everything they started."""

import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import psutil

from benchmarks.mutation_tracing import MODULE, VARIABLE

ROOT = Path(__file__).parents[1]
PACKAGE = Path("src/shardwise")
KEPT = ROOT / "benchmarks/.mutation"
MAP_LIMIT_S = 5400.0
START_S = 8.0
"""What a test file takes by itself besides its tests: importing torch, starting ranks."""
_OWNER = "SHARDWISE_MUTATION_OWNER"
_NOTHING_SELECTED = 5  # pytest's exit status
_LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", ".hypothesis", KEPT.name)


@dataclass(frozen=True)
class FileRun:
    """What became of some test files."""

    status: str
    """passed, failed, timeout or empty."""
    seconds: float
    failed: str = ""
    """The first test that failed, as `file::test`."""
    why: str = ""


@dataclass(frozen=True)
class Mapped:
    """A test file, or its slow part, and the functions it enters."""

    file: str
    slow: bool
    hash: str
    """Of the file's text when it was mapped."""
    status: str
    seconds: float
    tests: int
    functions: frozenset[str]
    """As `file::qualified name`, the file relative to src/shardwise."""
    why: str = ""
    """What failed."""

    @property
    def breadth(self) -> int:
        """How many functions it enters."""
        return sum(not function.endswith(MODULE) for function in self.functions)

    def in_module(self, module: str) -> int:
        """How many functions of a module it enters."""
        return sum(function.startswith(f"{module}::") for function in self.functions - {f"{module}::{MODULE}"})


class Workspace:
    """A copy of the tree with its own folder for temporary files; it starts nothing more once `stopped` is set."""

    def __init__(self, folder: Path, stopped: threading.Event) -> None:
        self.tree, self.temporary, self.stopped = folder / "tree", folder / "tmp", stopped
        self.temporary.mkdir()
        shutil.copytree(ROOT, self.tree, ignore=_LEFT_OUT)
        for place in (self.tree, self.tree / "src"):
            shutil.copyfile(ROOT / "benchmarks/mutation_tracing.py", place / "sitecustomize.py")
        # Hashes and not times say whether compiled code is current: a mutant never meets another one's.
        modes = ["-q", "--invalidation-mode", "checked-hash"]
        folders = [str(self.tree / name) for name in ("src", "tests")]
        subprocess.run([sys.executable, "-m", "compileall", *modes, *folders], check=False, stdout=subprocess.DEVNULL)
        self._check()

    def _check(self) -> None:
        for path in (str(self.tree / "src"), str(self.tree)):
            command = [sys.executable, "-c", "import shardwise; print(shardwise.__file__)"]
            environment = {**self._environment(), "PYTHONPATH": path}
            done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, cwd="/")
            if not Path(done.stdout.strip()).is_relative_to(self.tree):
                raise RuntimeError(f"{done.stdout.strip()} was imported, not the copy in {self.tree}")

    def _environment(self) -> dict[str, str]:
        path = os.pathsep.join([str(self.tree / "src"), str(self.tree)])
        own = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(self.temporary)}
        return {**{name: value for name, value in os.environ.items() if name != VARIABLE}, **own}

    def collect(self, *, slow: bool) -> list[str]:
        """The test files that have any such tests."""
        output = self._pytest(["--collect-only", "-n", "0", "tests", "--ignore", "tests/gpu"], slow, limit_s=600.0)[1]
        return sorted({line.partition("::")[0] for line in output.splitlines() if re.match(r"tests/\S+\.py::", line)})

    def map(self, files: list[str], *, slow: bool) -> Iterator["Mapped"]:
        """Run test files beside each other, as `make test` does, and note what each enters."""
        calls = self.temporary.parent / "calls"
        shutil.rmtree(calls, ignore_errors=True)
        calls.mkdir()
        (calls / "files").write_text("\n".join(files))
        lanes = ["-n", "2", "--dist", "loadgroup", "-p", "benchmarks.mutation_plugin"]
        code, output = self._pytest([*lanes, *files], slow, limit_s=MAP_LIMIT_S, calls=calls)
        if not (calls / "known.json").is_file():
            raise RuntimeError(f"the tests ended with {code}:\n{output[-3000:]}")
        (self.temporary.parent / "map-output").write_text(output)
        entered: dict[str, set[str]] = {file: set() for file in files}
        for line in (calls / "calls").read_text(errors="replace").splitlines():
            number, _, function = line.partition(" ")
            if number.isdigit() and int(number) < len(files):
                entered[files[int(number)]].add(function)
        for file, (seconds, tests, failed) in json.loads((calls / "known.json").read_text()).items():
            hash = hash_of(self.tree / file)
            status = "failed" if failed else "passed"
            yield Mapped(file, slow, hash, status, round(seconds + START_S, 1), tests, frozenset(entered[file]), failed)

    def run(self, files: list[str], *, slow: bool, limit_s: float) -> FileRun:
        """Run the tests of `files` until one fails."""
        began = time.monotonic()
        code, output = self._pytest(["-n", "0", "-x", *files], slow, limit_s=limit_s)
        seconds = round(time.monotonic() - began, 1)
        if code is None:
            return FileRun("timeout", seconds, " ".join(files), f"not done after {limit_s:.0f} s")
        if code in (0, _NOTHING_SELECTED):
            return FileRun("empty" if code else "passed", seconds)
        line = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", output, re.MULTILINE)
        reason = re.search(r"^E +(.*)$", output, re.MULTILINE)
        return FileRun(
            "failed", seconds, line[1] if line else " ".join(files), reason[1] if reason else output.strip()[-500:]
        )

    def _pytest(
        self, arguments: list[str], slow: bool, *, limit_s: float, calls: Path | None = None
    ) -> tuple[int | None, str]:
        """The exit status (None: out of time) and the output; nothing that was started is left."""
        if self.stopped.is_set():
            raise InterruptedError
        owner = f"{os.getpid()}-{time.monotonic_ns()}"
        environment = {**self._environment(), _OWNER: owner}
        if calls is not None:
            environment[VARIABLE] = str(calls)
        options = ["-q", "-p", "no:cacheprovider", "-m", "slow" if slow else "not slow"]
        log = self.temporary.parent / "output"
        with open(log, "wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *options, *arguments],
                cwd=self.tree,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                with suppress(OSError):  # a mutant that eats all memory is ended before anybody else's process
                    Path(f"/proc/{process.pid}/oom_score_adj").write_text("1000")
                code: int | None = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                _end_owned(owner)
        self._clean()
        return code, log.read_text(errors="replace")

    def _clean(self) -> None:
        shutil.rmtree(self.tree / ".hypothesis", ignore_errors=True)
        for left in self.temporary.iterdir():
            if left.name.startswith("torchinductor"):
                continue  # slow to fill, and keyed by what it holds
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)

    @contextmanager
    def changed(self, file: str, change: Callable[[bytes], bytes]) -> Iterator[None]:
        """A file of the package is another one meanwhile."""
        path = self.tree / PACKAGE / file
        original = path.read_bytes()
        path.write_bytes(change(original))
        try:
            yield
        finally:
            path.write_bytes(original)


def _end_owned(owner: str) -> None:
    """End the processes of one run that have left its process group: launchers give ranks sessions of their own."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(_OWNER, "").startswith(owner):
                process.kill()


def on_workspaces(
    items: Sequence[Any], work: Callable[[Workspace, Any], Any], *, jobs: int
) -> Iterator[tuple[Any, Any]]:
    """What `work` answers for each item, as it comes; each of `jobs` at once has a workspace of its own."""
    free: queue.Queue[Workspace] = queue.Queue()
    stopped = threading.Event()

    def one(item: Any) -> Any:
        workspace = free.get()
        try:
            return work(workspace, item)
        finally:
            free.put(workspace)

    with ExitStack() as stack:
        for _ in range(min(jobs, len(items))):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mutation-", ignore_cleanup_errors=True))
            os.chmod(folder, 0o755)  # a test becomes another user
            free.put(Workspace(Path(folder).resolve(), stopped))
        pool = stack.enter_context(ThreadPoolExecutor(jobs))
        stack.callback(_end_owned, f"{os.getpid()}-")  # what still runs when this is interrupted
        stack.callback(stopped.set)
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)
        futures = {pool.submit(one, item): item for item in items}
        for future in as_completed(futures):
            yield futures[future], future.result()


def hash_of(path: Path) -> str:
    """Which text a file holds."""
    return sha256(path.read_bytes()).hexdigest()[:16]


def map_path(*, slow: bool) -> Path:
    """Where the map is kept."""
    return KEPT / ("map_slow.jsonl" if slow else "map.jsonl")


def read_map(*, slow: bool) -> dict[str, Mapped]:
    """What is mapped so far; the last line of a file counts."""
    if not map_path(slow=slow).is_file():
        return {}
    lines: list[dict[str, Any]] = [json.loads(line) for line in map_path(slow=slow).read_text().splitlines()]
    for line in lines:
        line["functions"] = frozenset(line["functions"])
    return {line["file"]: Mapped(**line) for line in lines}


def keep(mapped: Mapped) -> None:
    """Add a line to the map."""
    path = map_path(slow=mapped.slow)
    path.parent.mkdir(exist_ok=True)
    with open(path, "a") as file:
        file.write(json.dumps({**asdict(mapped), "functions": sorted(mapped.functions)}) + "\n")
