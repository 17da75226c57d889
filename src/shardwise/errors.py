"""All errors, in one format: what happened, where, why, how to fix. No torch, no I/O."""

import difflib
import importlib
from collections.abc import Iterable, Sequence
from typing import Any


class ShardwiseError(Exception):
    """Base of all errors raised on purpose.

    Args:
        what: One sentence, present tense, naming the offending value.
        where: A config path, `file:line`, module name or rank.
        why: The rule that was broken.
        fix: The smallest change that makes it work, ready to paste.
    """

    exit_code = 2

    def __init__(self, what: str, *, where: str = "", why: str = "", fix: str = "") -> None:
        self.what, self.where, self.why, self.fix = what, where, why, fix
        rows = [("where", where), ("why", why), ("fix", fix)]
        super().__init__("\n".join([what, *(_row(name, text) for name, text in rows if text)]))

    def __reduce__(self) -> tuple[object, ...]:
        # Errors travel between ranks by pickle; keyword-only arguments need this.
        return _rebuild, (type(self), self.what, self.where, self.why, self.fix)


class ConfigError(ShardwiseError):
    """A config file, keyword or command-line value is wrong."""


class PlanError(ShardwiseError):
    """The model cannot be sharded as asked; raised before anything is changed."""


class ShardError(ShardwiseError):
    """Sharding, or the use of a sharded model, broke a rule."""


class CheckpointError(ShardwiseError):
    """A checkpoint cannot be written, read or trusted."""


class SourceError(ShardwiseError):
    """A source file cannot be read or rewritten."""


class TrainingError(ShardwiseError):
    """A run cannot continue: non-finite numbers, or a single sequence does not fit in memory."""

    exit_code = 1


class EnvironmentProblem(ShardwiseError):
    """The machine, launcher or process group does not meet the run's requirements."""

    exit_code = 3


def raise_listed(
    problems: Sequence[str],
    what: str,
    *,
    why: str = "",
    fix: str = "",
    most: int = 10,
    kind: type[ShardwiseError] = ConfigError,
) -> None:
    """Raise one error that lists all problems; nothing if there are none.

    Args:
        problems: One line each: where, and what is wrong there.
        what: The sentence for them all; `{num}` stands for their number.
        why: The rule that was broken.
        fix: The smallest change that makes it work.
        most: Number of problems to show; the others are counted.
        kind: Class of the error.
    """
    if problems:
        raise kind(what.format(num=len(problems)), where="\n".join(listed(problems, most)), why=why, fix=fix)


def require_choice(value: object, choices: Iterable[str], *, where: str) -> None:
    """Raise a ConfigError unless an argument, as in `verify=...`, has one of these values."""
    known = list(choices)
    if value not in known:
        name = where.partition("=")[0].rpartition("(")[2]
        fix = f"pass {', '.join(map(repr, known[:-1]))} or {known[-1]!r}"
        raise ConfigError(f"{name} is {value!r}", where=where, fix=fix)


def listed(lines: Sequence[str], most: int = 10) -> list[str]:
    """Return the first `most` lines, and one with the number of others."""
    return [*lines[:most], *([f"... and {len(lines) - most} more"] if len(lines) > most else [])]


def import_optional(module: str, *, where: str, why: str, fix: str) -> Any:
    """Import an optional library."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise EnvironmentProblem(f"{module} is not installed ({error})", where=where, why=why, fix=fix) from None


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return the closest known name; empty if none is close."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)), "")


def did_you_mean(name: str, known: Iterable[str], default: str = "", *, cutoff: float = 0.6) -> str:
    """` (did you mean 'x'?)` for the nearest known name, else the default."""
    near = nearest(name, known, cutoff=cutoff)
    return f" (did you mean {near!r}?)" if near else default


def fix_name(name: str, known: Iterable[str], default: str, *, cutoff: float = 0.6) -> str:
    """`did you mean 'x'?` for the nearest known name, as a fix; else the default."""
    return did_you_mean(name, known, cutoff=cutoff).strip(" ()") or default


def _row(name: str, text: str) -> str:
    """`  why:   text`, further lines of the text aligned under the first."""
    return f"  {name + ':':<6} " + text.replace("\n", "\n" + " " * 9)


def _rebuild(kind: type[ShardwiseError], what: str, where: str, why: str, fix: str) -> ShardwiseError:
    return kind(what, where=where, why=why, fix=fix)
