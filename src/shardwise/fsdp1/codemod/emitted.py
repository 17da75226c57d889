"""Helper functions that rewritten programs need, taken from `fsdp1/emitted_helpers.py`, which is never imported."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Collection, Iterable
from importlib import resources

from shardwise.source.syntax import FileContext, Function, all_parameters, canonical

_FEATURES = "policy mp_policy buffer_dtype ignored param_init_fn sync_from_rank0 is_part use_orig_params "
_FEATURES += "strategy process_group device_mesh device_id"
FEATURES = frozenset(_FEATURES.split())
"""Parameters of helpers that only some programs need."""
_PREFIX = "_fsdp2"
_UNMISTAKABLE = {"CPUOffloadPolicy", "FSDPModule", "MixedPrecisionPolicy", "OffloadPolicy"}


@functools.cache
def _helpers() -> FileContext:
    file = resources.files("shardwise.fsdp1").joinpath("emitted_helpers.py")
    return FileContext(file.read_text(encoding="utf-8"), file.name)


@functools.cache
def definitions() -> dict[str, Function | ast.ClassDef]:
    """All helper functions and classes by name."""
    return {one.name: one for one in _helpers().tree.body if isinstance(one, Function | ast.ClassDef)}


def settings() -> list[str]:
    """The parameters of FSDP1's constructor."""
    return [one.arg for one in all_parameters(definitions()["_fully_shard_like_fsdp1"].args)]  # pyrefly: ignore


def emitted_in(context: FileContext) -> dict[str, Function | ast.ClassDef]:
    """The helpers that an earlier run has written into a file, by the name that they have there."""
    found = {}
    for one in context.tree.body:
        if isinstance(one, Function | ast.ClassDef):
            ours = definitions().get(one.name.removeprefix(_PREFIX))
            if ours is not None and ast.get_docstring(one) == ast.get_docstring(ours):
                found[one.name] = one
    return found


def name_in(context: FileContext, wanted: str) -> str:
    """The name of a helper in a file: another one where the file means something else by it."""
    is_taken = wanted in context.scopes[context.tree].names and wanted not in emitted_in(context)
    return _PREFIX + wanted if is_taken else wanted


@functools.cache
def origins() -> dict[str, str]:
    """Names that emitted code imports, and the public name that each stands for."""
    names = _helpers().scopes[_helpers().tree].names
    return {name: bindings[0].origin for name, bindings in names.items() if bindings[0].origin}


def is_ours(name: str, origin: str | None) -> bool:
    """Whether a name of a file, imported from `origin`, is the one emitted code means.

    Packages that run on several releases of torch re-export FSDP2's classes under names nobody else uses.
    """
    if not origin:
        return False
    return canonical(origin) == origins()[name] or (name in _UNMISTAKABLE and origin.endswith(f".{name}"))


def assemble(wanted: Iterable[str], features: Collection[str]) -> list[tuple[str, str]]:
    """The helpers asked for and those they call, as (name, text) in the order of their file.

    Args:
        wanted: Names of functions and classes.
        features: Of `FEATURES`, and other parameters, those that the program needs.
    """
    found: dict[str, str] = {}
    waiting = list(wanted)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = _text(definitions()[name], features)
            waiting += definitions().keys() & set(re.findall(r"\w+", found[name]))
    return [(name, found[name]) for name in definitions() if name in found]


def names_used(text: str) -> list[str]:
    """The names in a text that need an import."""
    words = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    return [name for name in origins() if name in words]


def _text(definition: Function | ast.ClassDef, features: Collection[str]) -> str:
    """The text of a helper without the parameters that are not needed and the `if` statements that test them."""
    parameters = all_parameters(definition.args) if isinstance(definition, Function) else []
    own_lines = {one.arg: one.lineno for one in parameters if one.lineno > definition.lineno}
    unwanted = FEATURES & own_lines.keys() - set(features)
    left_out: set[int] = set()
    for node in ast.walk(definition):
        if isinstance(node, ast.If) and any(getattr(one, "id", None) in unwanted for one in ast.walk(node.test)):
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    used = {node.id for node in ast.walk(definition) if isinstance(node, ast.Name) and node.lineno not in left_out}
    if unwanted:  # else all are kept: FSDP1 settings that nothing reads are accepted
        left_out.update(line for name, line in own_lines.items() if name not in {*used, *features})
    first = min([definition.lineno, *(one.lineno for one in definition.decorator_list)])
    numbers = range(first, (definition.end_lineno or first) + 1)
    return "\n".join(_helpers().positions.line(number) for number in numbers if number not in left_out)
