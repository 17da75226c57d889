"""`FSDP(model, ...)`: find each call, convert every argument, and only then rewrite it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from shardwise.rules.moving.arguments import Argument, ArgumentList, read_arguments
from shardwise.rules.moving.draft import ROAD1, Draft
from shardwise.rules.moving.program import Program
from shardwise.rules.moving.values import is_constant
from shardwise.rules.names import FSDP1
from shardwise.rules.source import FileContext

CODE = "SW101"
PARAMETERS = (
    "module",
    "process_group",
    "sharding_strategy",
    "cpu_offload",
    "auto_wrap_policy",
    "backward_prefetch",
    "mixed_precision",
    "ignored_modules",
    "param_init_fn",
    "device_id",
    "sync_module_states",
    "forward_prefetch",
    "limit_all_gathers",
    "use_orig_params",
    "ignored_states",
    "device_mesh",
)
_OLD_NAMES = {"fsdp_auto_wrap_policy": "auto_wrap_policy", "ignored_parameters": "ignored_states"}


class Blocked(Exception):
    """The call cannot be rewritten: what stands in the way, and what to do about it."""

    def __init__(self, why: str, fix: str) -> None:
        super().__init__(why)
        self.why, self.fix = why, fix


@dataclass(slots=True)
class Wrap:
    """One constructor call in the making; everything a target needs to write it anew."""

    draft: Draft
    call: ast.Call
    list: ArgumentList
    by_name: dict[str, Argument]
    is_partial: bool
    dropped: list[str] = field(default_factory=list)
    """What FSDP2 does by itself, or does not have, said in the finding."""

    @property
    def context(self) -> FileContext:
        """The file."""
        return self.draft.context

    @property
    def statement(self) -> ast.stmt:
        """The statement around the call."""
        return self.context.statement(self.call)

    def value(self, name: str) -> ast.expr | None:
        """The expression given for a parameter."""
        argument = self.by_name.get(name)
        return argument.value if argument else None

    def text(self, name: str) -> str:
        """The text given for a parameter, ready to stand in another argument list."""
        argument = self.by_name.get(name)
        return self.list.text(argument) if argument else "None"

    def drop(self, name: str, why: str = "") -> None:
        """Leave an argument out, and say why if it says something."""
        if name in self.by_name:
            self.list.drop(self.by_name[name])
            if why:
                self.dropped.append(why)

    @property
    def is_inner(self) -> bool:
        """Whether the module is a part of one that is wrapped later: written so, or one of a loop's."""
        module = self.value("module")
        if module is None:
            return False
        text = self.context.source(module)
        others = [one.args[0] for one in self.context.calls if one is not self.call and one.args and self._is_same(one)]
        outer = {self.context.source(one) for one in others}
        return any(re.match(rf"{re.escape(one)}[.\[]", text) for one in outer) or self._in_loop_over(outer)

    def _is_same(self, call: ast.Call) -> bool:
        """Whether another call calls the same thing: FSDP by the same name."""
        return self.context.source(call.func) == self.context.source(self.call.func)

    def _in_loop_over(self, outer: set[str]) -> bool:
        for parent in self.context.ancestors(self.call):
            if isinstance(parent, ast.For | ast.comprehension):
                text = self.context.source(parent.iter)
                return any(re.search(rf"(?<![\w.]){re.escape(one)}[.\[)]", text) for one in outer)
            generators = getattr(parent, "generators", [])
            for one in generators:
                text = self.context.source(one.iter)
                if any(re.search(rf"(?<![\w.]){re.escape(name)}[.\[)]", text) for name in outer):
                    return True
        return False

    @property
    def is_plain(self) -> bool:
        """Whether statements can be put in front of the call without changing what runs."""
        if self.is_partial or not self.draft.starts_line(self.statement):
            return False
        node: ast.AST = self.call
        while node is not self.statement:
            parent = self.context.parents[node]
            if isinstance(parent, ast.IfExp | ast.BoolOp | ast.Lambda | ast.comprehension | ast.ListComp | ast.SetComp):
                return False
            if isinstance(parent, ast.DictComp | ast.GeneratorExp):
                return False
            node = parent
        return isinstance(self.statement, ast.Assign | ast.AnnAssign | ast.Expr | ast.Return)


def find(context: FileContext, program: Program) -> Iterator[tuple[ast.Call, bool]]:
    """Every call of FSDP's constructor, and every `partial` of it (True), in source order."""
    for call in context.calls:
        if program.is_any(context, call.func, {FSDP1}):
            yield call, False
        elif call.args and program.is_any(context, call.args[0], {FSDP1}) and _is_partial(context, call):
            yield call, True


def is_certain(context: FileContext, program: Program, node: ast.expr) -> bool:
    """Whether an expression is FSDP's class and nothing else: imported, or another name for it."""
    if program.origins(context, node) != {FSDP1}:
        return False
    if isinstance(node, ast.Attribute):
        return True
    for binding in context.bindings(node) if isinstance(node, ast.Name) else []:
        if binding.origin or is_constant(binding.value, None):
            continue  # `except ImportError: FSDP = None`
        if not isinstance(binding.value, ast.Name | ast.Attribute) or not is_certain(context, program, binding.value):
            return False
    return isinstance(node, ast.Name)


def _is_partial(context: FileContext, call: ast.Call) -> bool:
    return context.is_any(call.func, {"functools.partial"})


def read(draft: Draft, call: ast.Call, is_partial: bool) -> Wrap:
    """Match the arguments of a call with FSDP's parameters.

    Raises:
        Blocked: A parameter does not exist, or is given twice.
    """
    try:
        listed = read_arguments(draft.context, call)
    except ValueError:
        raise Blocked("the call is inside an f-string", "take it out of the string") from None
    position = -1 if is_partial else 0
    by_name: dict[str, Argument] = {}
    for argument in listed.arguments:
        if argument.name == "":
            if position >= len(PARAMETERS):
                raise Blocked("it has more arguments than FSDP", "remove them")
            name = "cls" if position < 0 else PARAMETERS[position]
            position += 1
            if is_partial and position == 1 and name != "cls":
                name = PARAMETERS[0]
        else:
            name = _OLD_NAMES.get(argument.name, argument.name)
        if name in ("*", "**"):
            name = f"{name}{len(by_name)}"
        elif name not in (*PARAMETERS, "cls"):
            raise Blocked(f"FSDP has no argument {name!r}", f"remove {name}=, or rename it")
        by_name[name] = argument
    return Wrap(draft, call, listed, by_name, is_partial)


def has_stars(wrap: Wrap) -> bool:
    """Whether arguments arrive by `*args` or `**kwargs`."""
    return any(name.startswith("*") for name in wrap.by_name)


def leave(draft: Draft, call: ast.Call, blocked: Blocked) -> None:
    """Note why a call is left alone."""
    draft.undecided(CODE, call, f"FSDP(...) is left alone: {blocked.why}", f"{blocked.fix}; or {ROAD1}")
