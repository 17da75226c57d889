"""Entering a function while reading: binding its arguments and walking its body on behalf of a module."""

import ast
import inspect
import re
import types
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shardwise.planning.source.files import FunctionNode, find_node, is_generator, underlying
from shardwise.planning.source.frames import MOST_DEPTH, Frame, evaluate, execute, join_counts
from shardwise.planning.source.records import unwalked
from shardwise.planning.source.values import (
    ARGUMENT,
    NONE,
    PLAIN,
    TENSOR,
    Closure,
    Many,
    Mapping,
    Sequence,
    Value,
    join,
    known,
    opaque,
)

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

    def key(self) -> tuple[Any, ...]:
        """What makes two calls alike."""
        return (
            tuple(self.positional),
            tuple(sorted(self.keywords.items(), key=lambda item: item[0])),
            self.spread,
        )

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
    loops = unwalked(through, frame) if through is not None else frame.loops
    key = (node, id(receiver), arguments.key(), tuple(map(id, chain)), frame.is_conditional, loops)
    if key in analysis.results:
        result, added, activity = analysis.results[key]
        analysis.activity += activity
        for identity, count in added.items():
            analysis.counts[identity] = analysis.counts.get(identity, 0) + count
        return result
    if analysis.running.count((node, id(receiver))) >= 2:
        return opaque(*arguments.values())
    before = dict(analysis.counts)
    activity = analysis.activity
    inner = _child(frame, chain, plain, _defaults(plain, node), receiver)
    inner.loops = loops
    result = _run(node, arguments, inner, (node, id(receiver)))
    added = {
        identity: count - before.get(identity, 0)
        for identity, count in analysis.counts.items()
        if count > before.get(identity, 0)
    }
    analysis.results[key] = (result, added, analysis.activity - activity)
    return result


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
        return Value(frozenset({Many(join(frame.yields) if frame.yields else NONE)}))
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
