"""Follow a program's statements and calls, function by function."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from shardwise.source import facts
from shardwise.source.expressions import (
    ITEM,
    MAX_DEPTH,
    Interpreter,
    OutOfBudget,
    builtin_result,
    evaluate,
    iterate,
    merge,
    method_result,
    turns,
)
from shardwise.source.facts import makes_meta
from shardwise.source.syntax import FileContext, Function, all_parameters
from shardwise.source.values import (
    UNKNOWN,
    Code,
    DictEntry,
    DictValue,
    Env,
    ImportedName,
    KeywordArgument,
    ObjectRef,
    PartRef,
    ProgramEvent,
    Trace,
    TupleValue,
    Values,
    join,
)

_READERS = frozenset({"print", "len", "str", "repr", "isinstance", "sorted", "list", "tuple", "dict", "bool"})


def read_call(walk: Interpreter, call: ast.Call) -> Values:
    """Evaluate a call's arguments, record the call, and tell what it returns."""
    callee = walk.file.callee(call)
    receiver, functions, method = _function(walk, call.func)
    args = [evaluate(walk, arg) for arg in (*callee.args, *call.args)]
    keywords, is_open = _keywords(walk, [*callee.keywords, *call.keywords])
    is_open |= any(isinstance(arg, ast.Starred) for arg in call.args)
    origins = callee.origins or frozenset().union(*(f.origins for f in functions if isinstance(f, ImportedName)))
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


def _function(walk: Interpreter, function: ast.expr) -> tuple[Values, Values, str]:
    """What a call is made on, what is called, and by which name."""
    if isinstance(function, ast.Attribute):
        receiver = evaluate(walk, function.value)
        owners = [one for one in receiver if isinstance(one, ObjectRef | PartRef)]
        return receiver, join(*(walk.load(one, function.attr) for one in owners)), function.attr
    functions = evaluate(walk, function)
    return UNKNOWN, functions, function.id if isinstance(function, ast.Name) else ""


def _keywords(walk: Interpreter, keywords: list[ast.keyword]) -> tuple[dict[str, KeywordArgument], bool]:
    found: dict[str, KeywordArgument] = {}
    is_open = False
    for keyword in keywords:
        values = evaluate(walk, keyword.value)
        if keyword.arg is not None:
            found[keyword.arg] = KeywordArgument(values, keyword.value)
            continue
        tables = [value for value in values if isinstance(value, DictValue)]
        is_open |= not tables or any(table.is_open for table in tables)
        for entry in (entry for table in tables for entry in table.entries if entry.key):
            before = found[entry.key].values if entry.key in found else UNKNOWN
            found[entry.key] = KeywordArgument(join(before, entry.values), entry.node)
    return found, is_open


def _result(walk: Interpreter, call: ast.Call, event: ProgramEvent, functions: Values) -> Values:
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


def _open_dictionaries(walk: Interpreter, call: ast.Call, event: ProgramEvent) -> None:
    """A function that cannot be read may add keys to the dictionaries it is given."""
    if event.method in _READERS and not event.origins:
        return
    for argument in [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg is not None)]:
        values = walk.env.get(argument.id, UNKNOWN) if isinstance(argument, ast.Name) else UNKNOWN
        if isinstance(argument, ast.Name) and any(isinstance(value, DictValue) for value in values):
            walk.env[argument.id] = frozenset(
                DictValue(value.entries, is_open=True) if isinstance(value, DictValue) else value for value in values
            )


def _code(walk: Interpreter, event: ProgramEvent, functions: Values) -> Code | None:
    """The one function of this file that is called, bound to its object."""
    codes = [value for value in functions if isinstance(value, Code)]
    if isinstance(event.node, ast.Call) and isinstance(event.node.func, ast.Attribute):
        for one in event.receiver:
            if not (isinstance(one, ObjectRef) and one.definition is not None):
                continue
            found = walk.find_method(one.definition, event.method)
            if found is not None and not _is_static(found):
                codes.append(Code(found, one))
    return codes[0] if len(codes) == 1 else None


def _is_static(function: Function) -> bool:
    return any(isinstance(one, ast.Name) and one.id in ("staticmethod", "property") for one in function.decorator_list)


def _inline(walk: Interpreter, call: ast.Call, event: ProgramEvent, code: Code) -> Values:
    """Read the body of a function with its arguments in place."""

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
            isinstance(value, DictValue) for value in outer.get(argument.id, UNKNOWN)
        ):
            outer[argument.id] = after


def _bind(walk: Interpreter, event: ProgramEvent, code: Code) -> dict[str, Values]:
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
            env[parameter.arg] = frozenset({ObjectRef(parameter, tuple(walk.chain))})
    return env


def _made(walk: Interpreter, call: ast.Call, event: ProgramEvent) -> Values:
    """The new object that an unknown function or class returns."""
    if event.method == "dict" and not event.origins and not event.args:
        entries = [DictEntry(key, argument.values, argument.node) for key, argument in event.keywords.items()]
        return frozenset({DictValue(tuple(entries), event.is_open)})
    if event.is_call_to("copy.deepcopy") and event.args:
        return frozenset(_copy(one, call, walk) for one in event.args[0] if isinstance(one, ObjectRef | PartRef))
    found = walk.file.definition(call.func)
    definition = found if isinstance(found, ast.ClassDef) else None
    on_meta = walk.meta_depth > 0 or facts.is_on_meta(event)
    thing = ObjectRef(call, tuple(walk.chain), event.origins, definition, on_meta, walk.turn)
    if facts.is_container(event) and event.args:
        for element in event.args if "torch.nn.Sequential" in event.origins else [iterate(walk, event.args[0])]:
            walk.store(thing, ITEM, element)
    if definition is not None:
        constructor = walk.find_method(definition, "__init__")
        if constructor is not None:
            _inline(walk, call, event, Code(constructor, thing))
    return frozenset({thing})


def _copy(one: ObjectRef | PartRef, call: ast.Call, walk: Interpreter) -> ObjectRef:
    """Another object of the same kind."""
    if isinstance(one, PartRef):
        return ObjectRef(call, tuple(walk.chain), turn=walk.turn)
    return ObjectRef(call, tuple(walk.chain), one.origins, one.definition, one.on_meta, walk.turn)


def read_block(walk: Interpreter, statements: Sequence[ast.stmt]) -> bool:
    """Read statements; True when control never reaches their end."""
    length = len(walk.guards)
    try:
        return any(read_statement(walk, statement) for statement in statements)
    finally:
        del walk.guards[length:]


def read_statement(walk: Interpreter, statement: ast.stmt) -> bool:
    """Read one statement; True when control does not go past it."""
    match statement:
        case ast.Return():
            walk.returned.append(evaluate(walk, statement.value) if statement.value else UNKNOWN)
            return True
        case ast.Raise() | ast.Continue() | ast.Break():
            _evaluate_all(walk, statement)
            return True
        case ast.If():
            return _branch(walk, statement)
        case ast.For() | ast.AsyncFor():
            _loop(walk, statement)
        case ast.While():
            evaluate(walk, statement.test)
            _body_of_loop(walk, statement)
            read_block(walk, statement.orelse)
        case ast.With() | ast.AsyncWith():
            return _with(walk, statement)
        case ast.Try() | ast.TryStar():
            return _try(walk, statement)
        case ast.Match():
            _match(walk, statement)
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            nested = walk.env if walk.active else None
            walk.env[statement.name] = frozenset({Code(statement, env=nested)})
        case ast.ClassDef():
            walk.env.pop(statement.name, None)
        case ast.Assign():
            values = evaluate(walk, statement.value)
            for target in statement.targets:
                assign(walk, target, values)
        case ast.AnnAssign():
            if statement.value is not None:
                assign(walk, statement.target, evaluate(walk, statement.value))
        case ast.AugAssign():
            evaluate(walk, statement.value)
            if isinstance(statement.target, ast.Name):
                walk.env[statement.target.id] = UNKNOWN
        case ast.Import() | ast.ImportFrom() | ast.Global() | ast.Nonlocal() | ast.Pass():
            pass
        case _:
            _evaluate_all(walk, statement)
    return False


def _evaluate_all(walk: Interpreter, statement: ast.stmt) -> None:
    for child in ast.iter_child_nodes(statement):
        if isinstance(child, ast.expr):
            evaluate(walk, child)


def _branch(walk: Interpreter, statement: ast.If) -> bool:
    evaluate(walk, statement.test)
    before = dict(walk.env)
    with walk.guarded(statement.test, True):
        body_ends = read_block(walk, statement.body)
    after_body, walk.env = walk.env, before
    with walk.guarded(statement.test, False):
        else_ends = read_block(walk, statement.orelse)
    if body_ends and not else_ends:
        walk.assume(statement.test, False)  # `if x: return`: what follows is the other branch
    elif else_ends and not body_ends:
        walk.assume(statement.test, True)
        walk.env = after_body
    else:
        walk.env = merge(after_body, walk.env)
    return body_ends and else_ends


def _loop(walk: Interpreter, statement: ast.For | ast.AsyncFor) -> None:
    values = evaluate(walk, statement.iter)
    for element in walk.unroll(turns(walk, values)):
        assign(walk, statement.target, element)
        _body_of_loop(walk, statement)
    read_block(walk, statement.orelse)


def _body_of_loop(walk: Interpreter, statement: ast.For | ast.AsyncFor | ast.While) -> None:
    before = dict(walk.env)
    walk.loops.append(statement)
    read_block(walk, statement.body)
    walk.loops.pop()
    walk.env = merge(before, walk.env)


def _with(walk: Interpreter, statement: ast.With | ast.AsyncWith) -> bool:
    length, metas = len(walk.contexts), walk.meta_depth
    for item in statement.items:
        before = len(walk.trace.events)
        values = evaluate(walk, item.context_expr)
        walk.contexts.extend(walk.trace.events[before:])
        walk.meta_depth += any(makes_meta(event) for event in walk.trace.events[before:])
        if item.optional_vars is not None:
            assign(walk, item.optional_vars, values)
    ends = read_block(walk, statement.body)
    walk.meta_depth = metas
    del walk.contexts[length:]
    return ends


def _try(walk: Interpreter, statement: ast.Try | ast.TryStar) -> bool:
    before = dict(walk.env)
    ends = read_block(walk, [*statement.body, *statement.orelse])
    after = walk.env
    for handler in statement.handlers:
        walk.env = merge(before, after)
        with walk.guarded(handler, True):
            if not read_block(walk, handler.body):
                after = merge(after, walk.env)
                ends = False
    walk.env = after
    return read_block(walk, statement.finalbody) or ends


def _match(walk: Interpreter, statement: ast.Match) -> None:
    evaluate(walk, statement.subject)
    before, after = dict(walk.env), dict(walk.env)
    for case in statement.cases:
        walk.env = dict(before)
        test = ast.Compare(left=statement.subject, ops=[ast.Eq()], comparators=[_pattern(case.pattern)])
        ast.copy_location(test, statement.subject)
        with walk.guarded(test, True):
            read_block(walk, case.body)
        after = merge(after, walk.env)
    walk.env = after


def _pattern(pattern: ast.pattern) -> ast.expr:
    if isinstance(pattern, ast.MatchValue):
        return pattern.value
    return ast.Constant(value=f"pattern {pattern.lineno}:{pattern.col_offset}")  # equal to no other


def assign(walk: Interpreter, target: ast.expr, values: Values) -> None:
    """Bind a target to values, element by element where both sides show them."""
    match target:
        case ast.Name():
            walk.env[target.id] = values
        case ast.Starred():
            assign(walk, target.value, UNKNOWN)
        case ast.Tuple() | ast.List():
            for position, element in enumerate(target.elts):
                assign(walk, element, _element(walk, values, position, len(target.elts)))
        case ast.Attribute():
            owners = evaluate(walk, target.value)
            walk.emit(target, receiver=owners, method=target.attr, args=(values,))
            for owner in owners:
                if isinstance(owner, ObjectRef | PartRef):
                    walk.store(owner, target.attr, values)
        case ast.Subscript():
            _assign_item(walk, target, values)


def _element(walk: Interpreter, values: Values, position: int, count: int) -> Values:
    rows = [value for value in values if isinstance(value, TupleValue)]
    if rows and all(len(row.items) == count for row in rows):
        return join(*(row.items[position] for row in rows))
    things = frozenset(value for value in values if isinstance(value, ObjectRef))
    return frozenset(PartRef(thing, (f"[{position}]",)) for thing in things)


def _assign_item(walk: Interpreter, target: ast.Subscript, values: Values) -> None:
    owners = evaluate(walk, target.value)
    evaluate(walk, target.slice)
    key = target.slice.value if isinstance(target.slice, ast.Constant) else None
    tables = [value for value in owners if isinstance(value, DictValue)]
    if tables:
        entry = DictEntry(key, values, target) if isinstance(key, str) else None
        filled = frozenset(
            DictValue((*table.entries, *([entry] if entry else [])), table.is_open or entry is None) for table in tables
        )
        holder = target.value.value if isinstance(target.value, ast.Attribute) else None
        walk.rebind(target.value, filled, evaluate(walk, holder) if holder is not None else UNKNOWN)
    for owner in owners:
        if isinstance(owner, ObjectRef | PartRef):
            walk.store(owner, ITEM, values)


def read_body(walk: Interpreter, function: Function) -> Values:
    """Read a function's body in the names set up for it; what it returns."""
    outer, walk.returned = walk.returned, []
    guards, loops = len(walk.guards), len(walk.loops)
    walk.active.append(function)
    try:
        read_block(walk, function.body)
        return join(*walk.returned)
    finally:
        walk.active.pop()
        walk.returned = outer
        del walk.guards[guards:], walk.loops[loops:]


def read_program(file: FileContext) -> list[Trace]:
    """The traces of a file; each event happens in exactly one of them, except in functions called several times."""
    main = Interpreter(file, file.tree, {})
    main.env = main.module_env  # at module level they are the same
    _run(lambda: read_block(main, file.tree.body))
    traces, reached = [main.trace], set(main.reached)
    for functions in _roots(file):
        unreached = [function for function in functions if function not in reached]
        if unreached:
            walk = Interpreter(file, unreached[0], main.module_env)
            # A method that another of its class calls is read there, with its arguments.
            for function in unreached:
                if function not in walk.reached:
                    _run_function(walk, function)
            traces.append(walk.trace)
            reached |= walk.reached
    return [trace for trace in traces if trace.events]


def _roots(file: FileContext) -> Iterator[list[Function]]:
    """Functions to start from: methods of one class together, callers before those they call."""
    for node in file.tree.body:
        if isinstance(node, ast.ClassDef):
            methods = [one for one in node.body if isinstance(one, Function)]
            yield sorted(
                methods, key=lambda method: (method.name not in ("__init__", "setup"), _num_callers(file, method))
            )
    tops = [one for one in file.functions if not isinstance(file.parents[one], ast.ClassDef | Function)]
    for function in sorted(tops, key=lambda one: (_num_callers(file, one), one.lineno)):
        yield [function]


def _num_callers(file: FileContext, function: Function) -> int:
    """How often the file calls something of this name: what nobody calls is read first."""
    return sum(_called_name(call) == function.name for call in file.calls)


def _called_name(call: ast.Call) -> str:
    return getattr(call.func, "id", "") or getattr(call.func, "attr", "")


def _run_function(walk: Interpreter, function: Function) -> None:
    walk.root = function
    owner = walk.file.parents[function]
    env: Env = {one.arg: frozenset({ObjectRef(one)}) for one in all_parameters(function.args)}
    positional = [*function.args.posonlyargs, *function.args.args]
    if isinstance(owner, ast.ClassDef) and positional:
        env[positional[0].arg] = self_of(owner)
    walk.env = env
    walk.reached.add(function)
    _run(lambda: read_body(walk, function))


def self_of(owner: ast.ClassDef) -> Values:
    """The object that all methods of a class share."""
    return frozenset({ObjectRef(owner, definition=owner)})


def _run(read: Callable[[], object]) -> None:
    with suppress(OutOfBudget):
        read()
