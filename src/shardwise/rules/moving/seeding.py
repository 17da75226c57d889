"""Whether the ranks of a program draw different weights: seeded by their rank before a model is built."""

from __future__ import annotations

import ast
import re
from pathlib import PurePath

from shardwise.errors import SourceError
from shardwise.rules.moving.constructors import Wrap
from shardwise.rules.moving.program import Program
from shardwise.rules.moving.values import is_constant
from shardwise.rules.source import FileContext

CODE = "SW134"
_SEEDS = re.compile(r"seed", re.IGNORECASE)
_SETS = re.compile(r"^seed_\w+$|^(?!manual_)\w+_seeds?(_\w+)?$", re.IGNORECASE)
"""Functions that seed everything; `manual_seed` and `seed` of other objects do not."""
_RANK = re.compile(r"(?<![a-z])rank|procid|process_index", re.IGNORECASE)
_TORCH = ("torch.manual_seed", "torch.random.manual_seed", "torch.cuda.manual_seed", "torch.cuda.manual_seed_all")
_ELSEWHERE = re.compile(r"^(np|numpy|random)\b|enerator|^rng|Sampler|Loader|ataset|shuffle", re.IGNORECASE)
"""Random numbers that weights are not drawn from."""


def report_seeds(wrap: Wrap, program: Program) -> bool:
    """Whether ranks may hold different weights, which FSDP1 shards as they are and `sw.shard` refuses; say so."""
    place = "" if is_constant(wrap.value("sync_module_states"), True) else seeded_by_rank(wrap.context, program)
    if place:
        wrap.draft.reported(
            CODE,
            wrap.call,
            f"ranks are seeded differently ({place}): weights drawn after that differ; as with FSDP1, each rank keeps "
            "its part of its own",
            "seed all ranks alike until the model is built, or load or broadcast its weights before this line",
        )
    return bool(place)


def seeded_by_rank(context: FileContext, program: Program) -> str:
    """Where the program seeds torch by the rank, in a constructor's file or one that imports it; empty if nowhere."""
    found = _line(context)
    if found is not None:
        return f"line {found}"
    stem = PurePath(context.path).stem
    imports = re.compile(rf"^[ \t]*(from|import)\b[^\n]*\b{re.escape(stem)}\b", re.MULTILINE)
    for path, text in program.texts.items():
        if path == context.path or "seed" not in text or not _RANK.search(text) or not imports.search(text):
            continue
        try:
            found = _line(program.file(path))
        except SourceError:
            continue
        if found is not None:
            return f"{path}:{found}"
    return ""


def _line(context: FileContext) -> int | None:
    for call in context.calls:
        name = context.source(call.func)
        if _ELSEWHERE.search(name):
            continue
        given = [keyword.value for keyword in call.keywords if _SEEDS.search(keyword.arg or "")]
        if context.is_any(call.func, _TORCH) or _SETS.search(name.rpartition(".")[2]):
            given = [*call.args, *(keyword.value for keyword in call.keywords)]
        if any(_depends_on_rank(context, one) for one in given):
            return call.lineno
    return None


def _depends_on_rank(context: FileContext, node: ast.expr, hops: int = 0) -> bool:
    for one in ast.walk(node):
        word = one.id if isinstance(one, ast.Name) else one.attr if isinstance(one, ast.Attribute) else ""
        key = one.value if isinstance(one, ast.Constant) and isinstance(one.value, str) else ""
        if (word and _RANK.search(word)) or key.endswith("RANK"):
            return True
        if isinstance(one, ast.Name) and hops < 2:
            values = [binding.value for binding in context.bindings(one)]
            if any(value is not None and _depends_on_rank(context, value, hops + 1) for value in values):
                return True
    return False
