"""Which names of a program hold an FSDP model, and what of FSDP1 is left over."""

from __future__ import annotations

import ast
import enum
import re
from collections.abc import Iterator
from functools import cached_property

from shardwise.errors import SourceError
from shardwise.fsdp1.codemod import constructors
from shardwise.fsdp1.codemod.draft import KEEP_FSDP1_API, FileDraft
from shardwise.fsdp1.codemod.program import Program, fsdp_name
from shardwise.source.syntax import FSDP1, FileContext, Function, all_parameters, checked_types

_FSDP = "FullyShardedDataParallel"
_STATIC = ("state_dict_type", "set_state_dict_type", "optim_state_dict", "summon_full_params", "fsdp_modules")
_STATIC += ("optim_state_dict_to_load", "full_optim_state_dict", "sharded_optim_state_dict", "get_state_dict_type")
_OTHER_WRAPPERS = {
    "torch.nn.parallel.DistributedDataParallel",
    "torch.nn.DataParallel",
    "torch.nn.parallel.DataParallel",
}


class Holds(enum.Enum):
    """Whether an expression is a wrapped model."""

    NEVER = "never"
    SOMETIMES = "sometimes"
    """On some runs or branches; on others it is a plain model, or DDP."""
    ALWAYS = "always"


class Sharded:
    """The wrapped models of one file.

    Args:
        context: The file.
        program: All files given.
    """

    def __init__(self, context: FileContext, program: Program) -> None:
        self.context, self.program = context, program
        self._busy: set[ast.AST] = set()

    @cached_property
    def constructors(self) -> dict[ast.Call, bool]:
        """Calls of FSDP's constructor and of functions of the program that return a wrapped model."""
        return dict(constructors.find(self.context, self.program))

    def holds(self, node: ast.expr) -> Holds:
        """Whether an expression is a wrapped model where it stands."""
        key = self._key(node)
        if key is None:
            return self._of_value(node)
        bound = [one for one in self._bound.get(key, []) if self._may_reach(one[0], node)]
        kinds = [kind for _, kind in bound]
        if Holds.ALWAYS in kinds or Holds.SOMETIMES in kinds:
            others = [kind for kind in kinds if kind is Holds.NEVER]
            sure = not others and any(
                self._always_reaches(place, node) for place, kind in bound if kind is Holds.ALWAYS
            )
            return Holds.ALWAYS if sure else Holds.SOMETIMES
        return Holds.SOMETIMES if self._is_told(key) and not bound else Holds.NEVER

    @property
    def has_any(self) -> bool:
        """Whether some variable of the file may hold a wrapped model."""
        return bool(self._bound or self._told or self.program.handed(self.context.path))

    def _is_told(self, key: tuple[object, str] | None) -> bool:
        """Whether FSDP's own functions, a type or a caller say that a variable may hold a wrapped model."""
        if key is None or key in self._told:
            return key is not None
        return isinstance(key[0], Function) and (key[0].lineno, key[1]) in self.program.handed(self.context.path)

    def _key(self, node: ast.expr) -> tuple[object, str] | None:
        """What identifies a variable: its scope and name, or its class and attribute."""
        match node:
            case ast.Name(id=name):
                found = self.context.scope(node).find(name)
                return (found[0].node if found else self.context.tree, name)
            case ast.Attribute(value=ast.Name(id="self"), attr=attribute):
                return (self.context.enclosing_class(node), f"self.{attribute}")
            case ast.Attribute(value=ast.Name() as base, attr=attribute):
                found = self.context.scope(base).find(base.id)
                return (found[0].node if found else self.context.tree, f"{base.id}.{attribute}")
        return None

    @cached_property
    def _bound(self) -> dict[tuple[object, str], list[tuple[ast.AST, Holds]]]:
        """For each variable, the places that give it a wrapped model, or something else that is wrapped."""
        found: dict[tuple[object, str], list[tuple[ast.AST, Holds]]] = {}
        for _ in range(3):  # a = FSDP(m); b = a; self.c = b
            self.__dict__["_bound"] = found
            again: dict[tuple[object, str], list[tuple[ast.AST, Holds]]] = {}
            for target, value in self._assignments():
                key = self._key(target)
                if key is None:
                    continue
                kind = self._of_value(value)
                if kind is not Holds.NEVER or self._is_other_wrapper(value):
                    again.setdefault(key, []).append((value, kind))
            if again == found:
                break
            found = again
        return found

    def _assignments(self) -> Iterator[tuple[ast.expr, ast.expr]]:
        for node in self.context.parents:
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                        yield from zip(target.elts, node.value.elts, strict=False)
                    elif isinstance(target, ast.Tuple):
                        yield from ((one, node.value) for one in target.elts if self._is_model_name(one))
                    else:
                        yield target, node.value
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                yield node.target, node.value

    def _is_model_name(self, node: ast.expr) -> bool:
        return "model" in self.context.source(node).lower()

    def _of_value(self, node: ast.expr) -> Holds:
        match node:
            case ast.Call() if node in self.constructors and not self.constructors[node]:
                return Holds.ALWAYS
            case ast.Call(func=ast.Attribute(attr="to" | "cuda" | "train" | "eval" | "cpu", value=inner)):
                return self.holds(inner)
            case ast.Call() if self.context.is_any(node.func, {"torch.distributed.fsdp.wrap.wrap"}):
                return Holds.ALWAYS if self._under_enable_wrap(node) else Holds.SOMETIMES
            case ast.Call() if self.context.is_any(node.func, {"torch.compile"}) and node.args:
                return self.holds(node.args[0])
            case ast.Call():
                return self._of_function(node)
            case ast.IfExp():
                kinds = {self.holds(node.body), self.holds(node.orelse)}
                return kinds.pop() if len(kinds) == 1 else Holds.SOMETIMES
            case ast.Name() | ast.Attribute():
                key = self._key(node)
                is_known = key in self._bound or self._is_told(key)
                return self.holds(node) if node not in self._busy and is_known else Holds.NEVER
        return Holds.NEVER

    def _under_enable_wrap(self, node: ast.AST) -> bool:
        """Whether `wrap` wraps here: elsewhere it hands the module back as it is."""
        contexts = [one for one in self.context.ancestors(node) if isinstance(one, ast.With)]
        entered = [item.context_expr for one in contexts for item in one.items]
        return any(
            isinstance(one, ast.Call) and self.context.is_any(one.func, {"torch.distributed.fsdp.wrap.enable_wrap"})
            for one in entered
        )

    def _of_function(self, call: ast.Call) -> Holds:
        """What a function of the program returns, if it wraps a model itself."""
        found = self.program.function(self.context, call.func)
        if found is None or call in self._busy:
            return Holds.NEVER
        context, function = found
        if "FSDP" not in context.text and "FullyShardedDataParallel" not in context.text:
            return Holds.NEVER
        self._busy.add(call)
        try:
            return returns_wrapped(context, self.program, function)
        finally:
            self._busy.discard(call)

    def _is_other_wrapper(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Call) and self.context.is_any(node.func, _OTHER_WRAPPERS)

    @cached_property
    def _told(self) -> set[tuple[object, str]]:
        """Variables that FSDP's own functions are called on: they can be nothing else, at least on some runs."""
        found = set()
        for call in self.context.calls:
            name = fsdp_name(self.context, call.func) or ""
            owner, _, method = name.partition(".")
            if owner == _FSDP and method in _STATIC and call.args and (key := self._key(call.args[0])) is not None:
                found.add(key)
            if checked_types(call) and self._names_fsdp(call.args[1]) and (key := self._key(call.args[0])) is not None:
                found.add(key)
        for function in self.context.functions:
            for parameter in all_parameters(function.args):
                if parameter.annotation is not None and self._names_fsdp(parameter.annotation):
                    found.add((function, parameter.arg))
        return found | self._units()

    def _units(self) -> set[tuple[object, str]]:
        """Variables of loops over `FSDP.fsdp_modules(model)`."""
        loops = [one for one in self.context.parents if isinstance(one, ast.For) and isinstance(one.iter, ast.Call)]
        called = [(one, fsdp_name(self.context, one.iter.func)) for one in loops]  # pyrefly: ignore
        keys = [self._key(one.target) for one, name in called if name == f"{_FSDP}.fsdp_modules"]
        return {key for key in keys if key is not None}

    def _names_fsdp(self, node: ast.expr) -> bool:
        return any(
            fsdp_name(self.context, one) == _FSDP for one in ast.walk(node) if isinstance(one, ast.Name | ast.Attribute)
        )

    def _may_reach(self, bound: ast.AST, used: ast.AST) -> bool:
        """Whether a value given at one place can be what is used at another."""
        first, second = self.context.enclosing_function(bound), self.context.enclosing_function(used)
        if first is not second:
            return True
        if _line(bound) > _line(used):
            return self._in_same_loop(bound, used)
        return not self.context.are_exclusive(bound, used)

    def _in_same_loop(self, bound: ast.AST, used: ast.AST) -> bool:
        loops = {one for one in self.context.ancestors(bound) if isinstance(one, ast.For | ast.While)}
        return any(one in loops for one in self.context.ancestors(used))

    def _always_reaches(self, bound: ast.AST, used: ast.AST) -> bool:
        """Whether the assignment happens on every way to the use, within one function."""
        around = set(self.context.ancestors(used))
        for parent in self.context.ancestors(bound):
            if isinstance(parent, Function | ast.Module | ast.ClassDef):
                return True
            if isinstance(parent, ast.If | ast.Try | ast.For | ast.While) and parent not in around:
                return False
        return True


def returns_wrapped(context: FileContext, program: Program, function: Function) -> Holds:
    """Whether a function returns a wrapped model."""
    sharded = program.sharded(context)
    kinds = []
    for node in ast.walk(function):
        if isinstance(node, ast.Return) and node.value is not None and context.enclosing_function(node) is function:
            values = node.value.elts[:1] if isinstance(node.value, ast.Tuple) else [node.value]
            kinds += [sharded.holds(value) for value in values]
    wrapped = [kind for kind in kinds if kind is not Holds.NEVER]
    if not wrapped:
        return Holds.NEVER
    return Holds.ALWAYS if len(wrapped) == len(kinds) and Holds.SOMETIMES not in kinds else Holds.SOMETIMES


def _line(node: ast.AST) -> int:
    return getattr(node, "lineno", 0)


Parameters = dict[str, set[tuple[int, str]]]
"""By path, the line of a function and the name of its parameter that may hold a wrapped model."""
_MAX_ROUNDS = 4  # main() -> train() -> save() -> write()


def spread(program: Program, found: Parameters) -> None:
    """Fill `found`, which `Sharded` reads while it is being filled: what one round finds, the next one follows."""
    paths = {path for path, text in program.texts.items() if "FSDP" in text or "FullyShardedDataParallel" in text}
    for _ in range(_MAX_ROUNDS):
        fresh: Parameters = {}
        for path in sorted(paths):
            for other, parameter in _handed_on(program, path):
                if parameter not in found.get(other, set()):
                    fresh.setdefault(other, set()).add(parameter)
        if not fresh:
            return
        for path, parameters in fresh.items():
            found.setdefault(path, set()).update(parameters)
            program.forget(path)
        paths = set(fresh)


def _handed_on(program: Program, path: str) -> Iterator[tuple[str, tuple[int, str]]]:
    try:
        context = program.file(path)
    except SourceError:
        return
    sharded = program.sharded(context)
    if not sharded.has_any:
        return
    for call in context.calls:
        if call in sharded.constructors:
            continue
        given = [(index, one) for index, one in enumerate(call.args)] + [(kw.arg, kw.value) for kw in call.keywords]
        wrapped = [place for place, one in given if _may_be(one) and sharded.holds(one) is not Holds.NEVER]
        target = _target(program, context, call.func) if wrapped else None
        if target is None:
            continue
        other, function, skipped = target
        names = [one.arg for one in [*function.args.posonlyargs, *function.args.args]][skipped:]
        named = {*names, *(one.arg for one in function.args.kwonlyargs)}
        for place in wrapped:
            name = (
                place if isinstance(place, str) else names[place] if place is not None and place < len(names) else None
            )
            if name in named:
                yield other.path, (function.lineno, str(name))


def _may_be(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name))


def _target(program: Program, context: FileContext, node: ast.expr) -> tuple[FileContext, Function, int] | None:
    """The function that a call enters, and how many of its parameters the call does not give (`self`)."""
    found = program.function(context, node)
    if found is not None:
        return *found, 0
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        owner = context.enclosing_class(node)
        method = _method(owner, node.attr) if owner is not None else None
        return (context, method, 1) if method is not None else None
    made = program.definition(context, node)
    if made is not None and isinstance(made[1], ast.ClassDef):
        method = _method(made[1], "__init__")
        return (made[0], method, 1) if method is not None else None
    return None


def _method(owner: ast.ClassDef, name: str) -> Function | None:
    return next((one for one in owner.body if isinstance(one, Function) and one.name == name), None)


INTERNAL = {"_handle", "_handles", "_all_handles", "flat_param", "_flat_param", "_gradient_postdivide_factor"}
INTERNAL |= {"_is_flat_param", "_shard_param_infos"}
INTERNAL |= {"_gradient_predivide_factor", "_fsdp_wrapped_module", "_is_root", "_has_params", "_unshard_params"}
_ATTRIBUTES = {"process_group", "sharding_strategy", "compute_device", "training_state", "check_is_root", "_lazy_init"}
_ATTRIBUTES |= {"mixed_precision", "cpu_offload", "backward_prefetch", "limit_all_gathers"}
FLAT = {"flat_param", "_flat_param", "_all_handles", "_is_flat_param", "_shard_param_infos"}
"""What nothing but FSDP1's flat parameters has."""
_SURE = {*FLAT, "_gradient_postdivide_factor", "_gradient_predivide_factor"}
_WRAP = {"torch.distributed.fsdp.wrap.wrap", "torch.distributed.fsdp.wrap.enable_wrap"}
_WRAP |= {"torch.distributed.fsdp.wrap.auto_wrap"}
_PRIVATE = re.compile(r"torch\.distributed\.fsdp\._(?!fully_shard)")
_INHERITS = re.compile(r"^[ \t]*class \w+\([^)]*(?:FSDP|FullyShardedDataParallel)", re.MULTILINE)
_HOOKS = ("register_comm_hook", "register_params_comm_hook", "set_comm_hook")


def subclasses(context: FileContext, program: Program) -> dict[str, ast.ClassDef]:
    """The classes of a file that inherit from FSDP."""
    return {
        name: node
        for name, node in context.classes.items()
        if any(program.is_any(context, base, {FSDP1}) for base in node.bases)
    }


def built_subclasses(context: FileContext, program: Program) -> list[str]:
    """Those of them that the file also makes objects of."""
    called = {call.func.id for call in context.calls if isinstance(call.func, ast.Name)}
    return sorted(name for name in subclasses(context, program) if name in called)


def built_anywhere(program: Program) -> str:
    """A subclass of FSDP that some file of the program makes objects of; empty if there is none."""
    return program.remember("built_anywhere", _built_anywhere)


def _built_anywhere(program: Program) -> str:
    found = (name for one in program.files(_INHERITS.search) for name in built_subclasses(one, program))
    return next(found, "")


def report_leftovers(draft: FileDraft, program: Program) -> None:
    """Note every use of FSDP1 that is still there."""
    _classes(draft, program)
    _wraps(draft)
    _internals(draft, program)


def _classes(draft: FileDraft, program: Program) -> None:
    context = draft.context
    inherited = subclasses(context, program)
    for node in draft.nodes():
        if not isinstance(node, ast.Name | ast.Attribute) or not isinstance(node.ctx, ast.Load) or node in draft.taken:
            continue
        parent = context.parents[node]
        if not program.is_any(context, node, {FSDP1}):
            continue
        if isinstance(parent, ast.ClassDef) and node in parent.bases:
            draft.undecided(
                "SW102",
                node,
                f"{parent.name} is a subclass of FSDP: FSDP2 has no wrapper class to inherit from",
                f"keep its methods as functions of the sharded model; or {KEEP_FSDP1_API}",
            )
        elif isinstance(parent, ast.Attribute):
            if parent not in draft.taken and not any(_has_note(draft, one) for one in context.ancestors(node)):
                _static(draft, node, parent)
        elif not isinstance(parent, ast.Call) or (
            node in parent.args and parent not in draft.taken and not _has_note(draft, parent)
        ):
            _value(draft, node)
    for call in draft.calls():
        name = call.func.id if isinstance(call.func, ast.Name) else ""
        if name in inherited and call not in draft.taken:
            draft.undecided(
                "SW101",
                call,
                f"{name}(...) is left alone: it is a subclass of FSDP",
                f"shard with fully_shard and keep {name}'s methods as functions; or {KEEP_FSDP1_API}",
            )


def _has_note(draft: FileDraft, node: ast.AST) -> bool:
    line = getattr(node, "lineno", None)
    return isinstance(node, ast.stmt | ast.expr) and any(
        note.line == line and note.status.value != "reported" for note in draft.notes
    )


def _static(draft: FileDraft, node: ast.expr, parent: ast.Attribute) -> None:
    draft.undecided(
        "SW131",
        node,
        f"FSDP.{parent.attr} works on FSDP1's models only",
        f"replace it by what it is used for; or {KEEP_FSDP1_API}",
    )


def _value(draft: FileDraft, node: ast.expr) -> None:
    draft.undecided(
        "SW102",
        node,
        "FSDP's class is used as a value here: passed on, stored or chosen at run time",
        f"pass a function that calls fully_shard and returns the module; or {KEEP_FSDP1_API}",
    )


def _wraps(draft: FileDraft) -> None:
    for call in draft.calls():
        if call not in draft.taken and draft.context.is_any(call.func, _WRAP):
            draft.undecided(
                "SW103",
                call,
                "enable_wrap and wrap make FSDP1 units while the model is built",
                f"build the model first, then call fully_shard on the same modules, inner first; or {KEEP_FSDP1_API}",
            )


def _internals(draft: FileDraft, program: Program) -> None:
    sharded = program.sharded(draft.context)
    for node in draft.nodes():
        if isinstance(node, ast.ImportFrom) and _PRIVATE.match(node.module or ""):
            _private(draft, node, node.module or "")
        if not isinstance(node, ast.Attribute) or node in draft.taken:
            continue
        if _is_private_module(draft.context, node):
            _private(draft, node, draft.context.source(node))
        if node.attr in INTERNAL and (node.attr in _SURE or sharded.holds(node.value) is not Holds.NEVER):
            draft.undecided(
                "SW127",
                node,
                f".{node.attr} is a part of FSDP1's flat parameters, which FSDP2 does not have",
                f"work on the DTensors that model.parameters() gives; or {KEEP_FSDP1_API}",
            )
        if node.attr in _ATTRIBUTES and sharded.holds(node.value) is not Holds.NEVER:
            draft.undecided(
                "SW127",
                node,
                f".{node.attr} is an attribute of FSDP1's wrapper, which FSDP2 does not have",
                f"take it from the mesh or the settings that the model is sharded with; or {KEEP_FSDP1_API}",
            )
        if node.attr in _HOOKS and sharded.holds(node.value) is not Holds.NEVER:
            draft.undecided(
                "SW130",
                node,
                f"{node.attr} has no direct counterpart in FSDP2",
                f"set_all_reduce_hook, or a custom communication class; or {KEEP_FSDP1_API}",
            )


def _private(draft: FileDraft, node: ast.AST, name: str) -> None:
    draft.undecided(
        "SW127",
        node,
        f"{name} is private to FSDP1",
        f"remove what uses it, or write it anew on DTensor; or {KEEP_FSDP1_API}",
    )


def _is_private_module(context: FileContext, node: ast.Attribute) -> bool:
    """`torch.distributed.fsdp._runtime_utils`, written out: the module itself, not what is taken from it."""
    if not node.attr.startswith("_") or node.attr == "_fully_shard":
        return False
    return f"torch.distributed.fsdp.{node.attr}" in context.origins(node, raw=True)
