"""Reading calls: of this file's functions by reading their bodies, of torch's by what they are known to return."""

from __future__ import annotations

import ast

from shardwise.rules.program import facts
from shardwise.rules.program.events import Argument, Event
from shardwise.rules.program.expressions import evaluate, iterate
from shardwise.rules.program.methods import builtin_result, method_result
from shardwise.rules.program.values import (
    UNKNOWN,
    Code,
    Entry,
    Env,
    Part,
    Reference,
    Table,
    Thing,
    Values,
    join,
)
from shardwise.rules.program.walk import ITEM, MAX_DEPTH, Walk
from shardwise.rules.scopes import Function, all_parameters

_READERS = frozenset({"print", "len", "str", "repr", "isinstance", "sorted", "list", "tuple", "dict", "bool"})


def read_call(walk: Walk, call: ast.Call) -> Values:
    """Evaluate a call's arguments, record the call, and tell what it returns."""
    callee = walk.file.callee(call)
    receiver, functions, method = _function(walk, call.func)
    args = [evaluate(walk, arg) for arg in (*callee.args, *call.args)]
    keywords, is_open = _keywords(walk, [*callee.keywords, *call.keywords])
    is_open |= any(isinstance(arg, ast.Starred) for arg in call.args)
    origins = callee.origins or frozenset().union(*(f.origins for f in functions if isinstance(f, Reference)))
    event = walk.emit(
        call,
        origins=origins,
        receiver=receiver,
        method=method,
        args=tuple(args),
        keywords=keywords,
        is_open=is_open,
        called=functions,
        result=UNKNOWN,
    )
    result = _result(walk, call, event, functions)
    object.__setattr__(event, "result", result)  # known only now, and events inside come after this one
    return result


def _function(walk: Walk, function: ast.expr) -> tuple[Values, Values, str]:
    """What a call is made on, what is called, and by which name."""
    if isinstance(function, ast.Attribute):
        receiver = evaluate(walk, function.value)
        owners = [one for one in receiver if isinstance(one, Thing | Part)]
        return receiver, join(*(walk.load(one, function.attr) for one in owners)), function.attr
    functions = evaluate(walk, function)
    return UNKNOWN, functions, function.id if isinstance(function, ast.Name) else ""


def _keywords(walk: Walk, keywords: list[ast.keyword]) -> tuple[dict[str, Argument], bool]:
    found: dict[str, Argument] = {}
    is_open = False
    for keyword in keywords:
        values = evaluate(walk, keyword.value)
        if keyword.arg is not None:
            found[keyword.arg] = Argument(values, keyword.value)
            continue
        tables = [value for value in values if isinstance(value, Table)]
        is_open |= not tables or any(table.is_open for table in tables)
        for entry in (entry for table in tables for entry in table.entries if entry.key):
            before = found[entry.key].values if entry.key in found else UNKNOWN
            found[entry.key] = Argument(join(before, entry.values), entry.node)
    return found, is_open


def _result(walk: Walk, call: ast.Call, event: Event, functions: Values) -> Values:
    if event.is_call_to(*facts.RETURNS_FIRST):
        return event.argument(0, "module") or event.argument(0, "model")
    known = method_result(walk, call, event) if isinstance(call.func, ast.Attribute) else builtin_result(walk, event)
    if known is not None:
        return known
    if event.is_call_to(*facts.GETTERS):
        return facts.state_dict_of(event)
    code = _code(walk, event, functions)
    if code is not None:
        return _inline(walk, call, event, code)
    _open_dictionaries(walk, call, event)
    return _made(walk, call, event)


def _open_dictionaries(walk: Walk, call: ast.Call, event: Event) -> None:
    """A function that cannot be read may add keys to the dictionaries it is given."""
    if event.method in _READERS and not event.origins:
        return
    for argument in [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg is not None)]:
        values = walk.env.get(argument.id, UNKNOWN) if isinstance(argument, ast.Name) else UNKNOWN
        if isinstance(argument, ast.Name) and any(isinstance(value, Table) for value in values):
            walk.env[argument.id] = frozenset(
                Table(value.entries, is_open=True) if isinstance(value, Table) else value for value in values
            )


def _code(walk: Walk, event: Event, functions: Values) -> Code | None:
    """The one function of this file that is called, bound to its object."""
    codes = [value for value in functions if isinstance(value, Code)]
    if isinstance(event.node, ast.Call) and isinstance(event.node.func, ast.Attribute):
        for one in event.receiver:
            if not (isinstance(one, Thing) and one.definition is not None):
                continue
            found = walk.find_method(one.definition, event.method)
            if found is not None and not _is_static(found):
                codes.append(Code(found, one))
    return codes[0] if len(codes) == 1 else None


def _is_static(function: Function) -> bool:
    return any(isinstance(one, ast.Name) and one.id in ("staticmethod", "property") for one in function.decorator_list)


def _inline(walk: Walk, call: ast.Call, event: Event, code: Code) -> Values:
    """Read the body of a function with its arguments in place."""
    from shardwise.rules.program.statements import read_body  # statements evaluate calls

    function = code.definition
    walk.reached.add(function)
    if function in walk.active or len(walk.active) >= MAX_DEPTH or function.name == "forward":
        return UNKNOWN
    object.__setattr__(event, "is_inlined", True)
    outer, walk.env = walk.env, {**(code.env or {}), **_bind(walk, event, code)}
    walk.chain.append(call)
    contexts = len(walk.contexts)
    try:
        for decorator in function.decorator_list:  # `@torch.no_grad()` is a block around the body
            before = len(walk.trace.events)
            evaluate(walk, decorator)
            walk.contexts.extend(walk.trace.events[before:])
        return read_body(walk, function)
    finally:
        walk.chain.pop()
        _pass_back(code, call, walk.env, outer)
        walk.env = outer
        del walk.contexts[contexts:]


def _pass_back(code: Code, call: ast.Call, inner: Env, outer: Env) -> None:
    """What a function put into a dictionary that it was given is in the caller's too."""
    positional = [*code.definition.args.posonlyargs, *code.definition.args.args]
    given = list(zip(positional[1 if code.bound_to is not None else 0 :], call.args, strict=False))
    for parameter, argument in given:
        after = inner.get(parameter.arg, UNKNOWN)
        if isinstance(argument, ast.Name) and any(
            isinstance(value, Table) for value in outer.get(argument.id, UNKNOWN)
        ):
            outer[argument.id] = after


def _bind(walk: Walk, event: Event, code: Code) -> dict[str, Values]:
    """The parameters' values: arguments, else defaults, else something unknown that has a name."""
    parameters = code.definition.args
    positional = [*parameters.posonlyargs, *parameters.args]
    args = [*([frozenset({code.bound_to})] if code.bound_to is not None else []), *event.args]
    env: dict[str, Values] = dict(zip((one.arg for one in positional), args, strict=False))
    env |= {name: argument.values for name, argument in event.keywords.items()}
    defaults = [*zip(reversed(positional), reversed(parameters.defaults), strict=False)]
    defaults += [(one, default) for one, default in zip(parameters.kwonlyargs, parameters.kw_defaults) if default]  # noqa: B905
    for parameter, default in defaults:
        if parameter.arg not in env:
            env[parameter.arg] = evaluate(walk, default)
    for parameter in all_parameters(parameters):
        if not env.get(parameter.arg) and parameter.arg not in env:
            env[parameter.arg] = frozenset({Thing(parameter, tuple(walk.chain))})
    return env


def _made(walk: Walk, call: ast.Call, event: Event) -> Values:
    """The new object that an unknown function or class returns."""
    if event.method == "dict" and not event.origins and not event.args:
        entries = [Entry(key, argument.values, argument.node) for key, argument in event.keywords.items()]
        return frozenset({Table(tuple(entries), event.is_open)})
    if event.is_call_to("copy.deepcopy") and event.args:
        return frozenset(_copy(one, call, walk) for one in event.args[0] if isinstance(one, Thing | Part))
    found = walk.file.definition(call.func)
    definition = found if isinstance(found, ast.ClassDef) else None
    on_meta = walk.meta_depth > 0 or facts.is_on_meta(event)
    thing = Thing(call, tuple(walk.chain), event.origins, definition, on_meta, walk.turn)
    if facts.is_container(event) and event.args:
        for element in event.args if "torch.nn.Sequential" in event.origins else [iterate(walk, event.args[0])]:
            walk.store(thing, ITEM, element)
    if definition is not None:
        constructor = walk.find_method(definition, "__init__")
        if constructor is not None:
            _inline(walk, call, event, Code(constructor, thing))
    return frozenset({thing})


def _copy(one: Thing | Part, call: ast.Call, walk: Walk) -> Thing:
    """Another object of the same kind."""
    if isinstance(one, Part):
        return Thing(call, tuple(walk.chain), turn=walk.turn)
    return Thing(call, tuple(walk.chain), one.origins, one.definition, one.on_meta, walk.turn)
