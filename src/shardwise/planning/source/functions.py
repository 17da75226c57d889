"""Source of functions, and the records of what they touch."""

import ast
import functools
import inspect
import itertools
import linecache
import math
import re
import textwrap
import types
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shardwise.planning.calls import Places, is_holder
from shardwise.planning.source.values import (
    ARGUMENT,
    MOST_DEPTH,
    NONE,
    PLAIN,
    TENSOR,
    Bound,
    Closure,
    Fact,
    Frame,
    Known,
    Loop,
    Many,
    Mapping,
    Sequence,
    Value,
    evaluate,
    execute,
    join,
    join_counts,
    just,
    known,
    leaves,
    opaque,
)

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@functools.lru_cache(maxsize=4096)
def find_node(function: types.FunctionType) -> FunctionNode | None:
    """The syntax tree of a function, or None where its source is not to be had."""
    code = function.__code__
    if code.co_name == "<lambda>":
        return _lambdas_in(code.co_filename).get(code.co_firstlineno)
    try:
        # Parsing the one function is far cheaper than parsing a file of five thousand lines for it.
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, SyntaxError, ValueError):
        return None
    node = tree.body[0] if tree.body else None
    found = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == code.co_name
    return node if found else None  # type: ignore[return-value]


def underlying(function: Any) -> tuple[types.FunctionType | None, Any]:
    """The plain function behind decorators and bindings, and the object it is bound to, if any."""
    receiver = None
    for _ in range(32):  # a chain of wrappers longer than this is a cycle
        if isinstance(function, types.MethodType):
            function, receiver = function.__func__, function.__self__
        elif isinstance(function, staticmethod | classmethod):
            function = function.__func__
        elif (inner := inspect.getattr_static(function, "__wrapped__", None)) is not None:
            function = inner
        else:
            break
    return (function if isinstance(function, types.FunctionType) else None), receiver


@functools.lru_cache(maxsize=4096)
def is_generator(node: FunctionNode) -> bool:
    """Whether the function yields; nested functions do not count."""
    pending: list[ast.AST] = list(node.body) if isinstance(node.body, list) else [node.body]
    while pending:
        inner = pending.pop()
        if isinstance(inner, ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(inner, FunctionNode):
            pending.extend(ast.iter_child_nodes(inner))
    return False


@functools.lru_cache(maxsize=64)
def _lambdas_in(filename: str) -> dict[int, FunctionNode]:
    """The lambdas of a file by line; where a line has two, neither is known."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError, RecursionError):
        return {}
    found: dict[int, FunctionNode] = {}
    twice: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Lambda):
            twice |= {node.lineno} & found.keys()
            found[node.lineno] = node
    return {line: node for line, node in found.items() if line not in twice}


_ITEMS_TRIED = 16


def record_call(module: nn.Module, through: Value, frame: Frame) -> None:
    """`module(...)` is written in this frame; `through` is the value that was called."""
    analysis = frame.analysis
    if module not in analysis.places or is_holder(module):
        return
    if id(module) in analysis.places.internal:  # `attention.out_proj(x)`: its weights are its owner's
        for parameter in module.parameters():
            record_read(parameter, frame)
        return
    analysis.activity += 1
    analysis.add(Fact("call", frame.chain, module, "", frame.is_conditional or through.picked))
    turns = math.prod(loop.count or 0 for loop in frame.loops if loop.identity in through.loops)
    if turns >= len(candidates(through)):  # otherwise some of them may not be called at all
        again = any(loop.count is None or loop.count > 1 for loop in unwalked(through, frame))
        analysis.counts[id(module)] = analysis.counts.get(id(module), 0) + (2 if again else 1)


def candidates(value: Value) -> set[int]:
    """Identities of the objects that a value may be."""
    return {id(_object(leaf)) for leaf in leaves(value)}


def unwalked(value: Value, frame: Frame) -> tuple[Loop, ...]:
    """The running loops that meet an object again: it is not theirs, or they have more turns than objects."""
    return tuple(
        loop
        for loop in frame.loops
        if loop.identity not in value.loops or (loop.count is not None and loop.count > len(candidates(value)))
    )


def _object(leaf: Known | Bound | Closure) -> Any:
    return leaf.object if isinstance(leaf, Known) else leaf.receiver.object if isinstance(leaf, Bound) else leaf


def record_read(parameter: nn.Parameter, frame: Frame) -> None:
    """A parameter takes part in a computation written in this frame."""
    places = frame.analysis.places
    frame.analysis.activity += 1
    # torch's own modules read their children's weights to choose a fused kernel; they call them all the same.
    if frame.is_torch_code or places.covered(frame.chain) & {id(owner) for owner in places.owners(parameter)}:
        return
    owner, _, name = places.parameter_name(parameter).rpartition(".")
    frame.analysis.add(Fact("read", frame.chain, places.modules[owner], name))


def record_escape(value: Value, frame: Frame) -> None:
    """A parameter is among the results, as in `return output, self.bias`: the caller will compute with it."""
    places = frame.analysis.places
    for leaf in leaves(value):
        if isinstance(leaf, Known) and places.has_parameter(leaf.object):
            owner, _, name = places.parameter_name(leaf.object).rpartition(".")
            frame.analysis.add(Fact("escape", frame.chain, places.modules[owner], name))


def consume(value: Value, frame: Frame) -> None:
    """The value goes into a computation: record the parameters in it."""
    for leaf in leaves(value):
        if isinstance(leaf, Known) and frame.analysis.places.has_parameter(leaf.object):
            record_read(leaf.object, frame)


def is_interesting(value: Value, places: Places) -> bool:
    """Whether a function that gets this value could call a module or read a parameter through it."""
    return any(isinstance(leaf, Closure) or _holds_modules(leaf, places) for leaf in leaves(value))


def _holds_modules(leaf: Any, places: Places) -> bool:
    thing = leaf.object if isinstance(leaf, Known) else leaf.receiver.object
    if isinstance(thing, nn.Module) or places.has_parameter(thing):
        return True
    inner = getattr(type(thing), "__dict__", None) and getattr(thing, "__dict__", None)
    if not isinstance(inner, dict) or isinstance(thing, type | types.ModuleType | types.FunctionType):
        return False
    return any(isinstance(item, nn.Module) for held in inner.values() for item in _held(held))


def _held(thing: Any) -> Iterable[Any]:
    if type(thing) in (list, tuple, set):
        return itertools.islice(thing, _ITEMS_TRIED)
    return itertools.islice(thing.values(), _ITEMS_TRIED) if type(thing) is dict else (thing,)


_AROUND_TENSOR = {"torch", "Optional", "Union", "None", "typing", "t"}


@dataclass(slots=True)
class Arguments:
    """The arguments of a call; `spread` is set when a `*` or `**` of unknown content may add more."""

    positional: list[Value] = field(default_factory=list)
    keywords: dict[str, Value] = field(default_factory=dict)
    spread: bool = False

    def first(self) -> Value:
        """The first positional argument."""
        return self.positional[0] if self.positional else PLAIN

    def values(self) -> list[Value]:
        """All arguments, however they are given."""
        return [*self.positional, *self.keywords.values()]

    def after(self, *first: Value) -> "Arguments":
        """The same arguments with these in front."""
        return Arguments([*first, *self.positional], dict(self.keywords), self.spread)


def enter_function(
    function: Any,
    arguments: Arguments,
    frame: Frame,
    *,
    receiver: Any = None,
    chain: tuple[nn.Module, ...] | None = None,
    through: Value | None = None,
) -> Value | None:
    """Read a real function's body with these arguments; None where there is no source or no budget.

    Args:
        function: Any callable with a plain function behind it.
        arguments: The receiver first, where there is one.
        frame: Where the call is written.
        receiver: The object it is a method of.
        chain: The modules whose code is then running; the frame's unless given.
        through: The value that was called, to tell a loop over layers from repeated calls of one.
    """
    plain, bound_to = underlying(function)
    node = find_node(plain) if plain is not None else None
    if plain is None or node is None or frame.depth >= MOST_DEPTH:
        return None
    if bound_to is not None and receiver is None:
        arguments = arguments.after(known(bound_to))
    analysis = frame.analysis
    chain = frame.chain if chain is None else chain
    if analysis.running.count((node, id(receiver))) >= 2:
        return opaque(*arguments.values())
    inner = _child(frame, chain, plain, _defaults(plain, node), receiver)
    inner.loops = unwalked(through, frame) if through is not None else frame.loops
    return _run(node, arguments, inner, (node, id(receiver)))


def result_of(function: Any, receiver: Any, arguments: list[Value], frame: Frame) -> Value:
    """What a function returns that is called with its receiver and these; nothing is known without its source."""
    result = enter_function(function, Arguments([known(receiver), *arguments]), frame, receiver=receiver)
    return result if result is not None else PLAIN


def enter_closure(closure: Closure, arguments: Arguments, frame: Frame) -> Value:
    """Read a function that the code itself defines."""
    home: Frame = closure.frame
    key = (closure.node, id(home))
    if frame.depth >= MOST_DEPTH or frame.analysis.running.count(key) >= 2:
        return opaque(*arguments.values())
    args = closure.node.args
    positional = [*args.posonlyargs, *args.args]
    names: dict[str, Value] = {}
    for argument, default in zip(positional[len(positional) - len(args.defaults) :], args.defaults, strict=True):
        names[argument.arg] = evaluate(default, home)
    for argument, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        if default is not None:
            names[argument.arg] = evaluate(default, home)
    inner = _child(frame, frame.chain, home.function, names, home.receiver)
    inner.outer = home
    return _run(closure.node, arguments, inner, key)


def start(function: Any, module: nn.Module, frame: Frame) -> Value | None:
    """Read an entry of a module, its arguments unknown; None where there is no source."""
    plain, bound_to = underlying(function)
    node = find_node(plain) if plain is not None else None
    if plain is None or node is None:
        return None
    names = [*node.args.posonlyargs, *node.args.args]
    first = known(bound_to if bound_to is not None else module)
    arguments = Arguments([first, *(_argument(name) for name in names[1:])], spread=True)
    for name in node.args.kwonlyargs:
        arguments.keywords[name.arg] = _argument(name)
    inner = _child(frame, frame.chain, plain, {}, module)
    return _run(node, arguments, inner, (node, id(module)))


def _argument(parameter: ast.arg) -> Value:
    """What the caller may hand in: a tensor if the annotation says so and nothing else, otherwise unknown."""
    if parameter.annotation is None:
        return ARGUMENT
    text = (
        parameter.annotation.value
        if isinstance(parameter.annotation, ast.Constant)
        else ast.unparse(parameter.annotation)
    )
    words = set(re.findall(r"\w+", text)) if isinstance(text, str) else set()
    tensor = any(word.endswith("Tensor") for word in words)
    return TENSOR if tensor and all(word.endswith("Tensor") or word in _AROUND_TENSOR for word in words) else ARGUMENT


def _child(
    frame: Frame,
    chain: tuple[nn.Module, ...],
    function: types.FunctionType | None,
    names: dict[str, Value],
    receiver: Any,
) -> Frame:
    return Frame(
        analysis=frame.analysis,
        chain=chain,
        function=function,
        names=names,
        receiver=receiver,
        conditional=frame.is_conditional,
        loops=frame.loops,
        depth=frame.depth + 1,
    )


def _run(node: FunctionNode, arguments: Arguments, frame: Frame, key: Any) -> Value:
    """Bind the arguments over the defaults that are in `frame.names`, then walk the body."""
    analysis = frame.analysis
    _bind(node.args, arguments, frame.names)
    analysis.running.append(key)
    try:
        if isinstance(node, ast.Lambda):
            return evaluate(node.body, frame)
        execute(node.body, frame)
    finally:
        analysis.running.pop()
    ends = [*frame.exit_counts, *([] if frame.dead else [analysis.counts])]
    analysis.counts = join_counts(ends) if ends else analysis.counts
    if is_generator(node):
        return just(Many(join(frame.yields) if frame.yields else NONE))
    results = [*frame.returns, *([] if frame.dead else [NONE])]
    return join(results) if results else NONE


def _bind(args: ast.arguments, arguments: Arguments, names: dict[str, Value]) -> None:
    parameters = [argument.arg for argument in (*args.posonlyargs, *args.args)]
    keywords = dict(arguments.keywords)
    for name, value in zip(parameters, arguments.positional, strict=False):
        names[name] = value
    unbound = parameters[len(arguments.positional) :] + [argument.arg for argument in args.kwonlyargs]
    for name in unbound:
        if name in keywords:
            names[name] = keywords.pop(name)
        elif arguments.spread or name not in names:
            names[name] = join([ARGUMENT, *([names[name]] if name in names else [])])
    if args.vararg is not None:
        rest = Sequence(tuple(arguments.positional[len(parameters) :]))
        names[args.vararg.arg] = Value(frozenset({rest}), open=arguments.spread, source=_spread(arguments))
    if args.kwarg is not None:
        rest = Mapping(tuple(keywords.items()))
        names[args.kwarg.arg] = Value(frozenset({rest}), open=arguments.spread, source=_spread(arguments))


def _spread(arguments: Arguments):
    return ARGUMENT.source if arguments.spread else Value().source


def _defaults(function: types.FunctionType, node: FunctionNode) -> dict[str, Value]:
    """The real default objects of a function, by parameter."""
    defaults: dict[str, Value] = {}
    positional = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
    given = function.__defaults__ or ()
    for name, default in zip(positional[len(positional) - len(given) :], given, strict=False):
        defaults[name] = known(default)
    for name, default in (function.__kwdefaults__ or {}).items():
        defaults[name] = known(default)
    return defaults


def defining_class(frame: Frame) -> type | None:
    """The class whose body holds the function being read, for `super()`."""
    function = frame.function
    if function is None:
        return None
    names = function.__code__.co_freevars
    if "__class__" in names:
        try:
            return (function.__closure__ or ())[names.index("__class__")].cell_contents
        except ValueError:
            return None
    for cls in type(frame.receiver).__mro__:
        method = inspect.getattr_static(cls, function.__name__, None)
        if method is not None and underlying(method)[0] is function and function.__name__ in vars(cls):
            return cls
    return None
