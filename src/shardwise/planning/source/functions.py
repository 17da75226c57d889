"""Functions of the code being read: their source, their arguments, and reading their bodies."""

import ast
import functools
import inspect
import linecache
import re
import textwrap
import tokenize
import types
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shardwise.planning.source import values as v
from shardwise.planning.source.values import Frame, Value

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@functools.lru_cache(maxsize=4096)
def find_node(function: types.FunctionType) -> FunctionNode | None:
    """Return the syntax tree of a function, or None if its source is not available."""
    code = function.__code__
    if code.co_name == "<lambda>":
        return _lambdas_in(code.co_filename).get(code.co_firstlineno)
    try:
        # Parsing the one function is far cheaper than parsing a file of five thousand lines for it, and
        # `inspect.getsource` looks through every imported module for each function.
        lines = linecache.getlines(code.co_filename, function.__globals__)[code.co_firstlineno - 1 :]
        tree = ast.parse(textwrap.dedent("".join(inspect.getblock(lines))))
    except (SyntaxError, ValueError, tokenize.TokenError):
        return None
    node = tree.body[0] if tree.body else None
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    return node if is_function and _is_source_of(node, code) else None


def _is_source_of(node: ast.FunctionDef | ast.AsyncFunctionDef, code: types.CodeType) -> bool:
    """Whether the code was compiled from this node; False if the file was edited after its import."""
    names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    num_named = code.co_argcount + code.co_kwonlyargcount
    if node.name != code.co_name or names != list(code.co_varnames[:num_named]):
        return False
    inner, compiled = [code], set[str]()
    for each in inner:
        inner += (constant for constant in each.co_consts if isinstance(constant, types.CodeType))
        compiled |= {*each.co_names, *each.co_varnames}
    return _attributes(node.body) <= compiled


def _attributes(tree: Any) -> set[str]:
    """Return the attributes that compiled code must contain, without annotations, assertions and mangled names."""
    if isinstance(tree, list):
        return set().union(*map(_attributes, tree))
    if not isinstance(tree, ast.AST) or isinstance(tree, ast.Assert):
        return set()
    own = {tree.attr} if isinstance(tree, ast.Attribute) and not tree.attr.startswith("__") else set()
    parts = (part for field, part in ast.iter_fields(tree) if field not in ("annotation", "returns"))
    return own.union(*map(_attributes, parts))


@functools.lru_cache(maxsize=64)
def _lambdas_in(filename: str) -> dict[int, FunctionNode]:
    """Return the lambdas of a file by line, without those that share a line."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError, RecursionError):
        return {}
    found: dict[int, list[FunctionNode]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Lambda):
            found.setdefault(node.lineno, []).append(node)
    return {line: nodes[0] for line, nodes in found.items() if len(nodes) == 1}


def underlying(function: Any) -> tuple[types.FunctionType | None, Any]:
    """Return the plain function inside decorators and bindings, and the object it is bound to, if any."""
    receiver = None
    for _ in range(32):  # a longer chain of wrappers is a cycle
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


@dataclass(slots=True)
class Arguments:
    """The arguments of a call; `spread` is set when a `*` or `**` of unknown content may add more."""

    positional: list[Value] = field(default_factory=list)
    keywords: dict[str, Value] = field(default_factory=dict)
    spread: bool = False

    def first(self) -> Value:
        """The first positional argument."""
        return self.positional[0] if self.positional else v.PLAIN

    def values(self) -> list[Value]:
        """All positional and keyword arguments."""
        return [*self.positional, *self.keywords.values()]

    def flat(self) -> list[Value]:
        """All arguments, with tuples and lists replaced by their items; numbers of unknown position come first."""
        found: list[Value] = []
        for value in self.values():
            atom = next(iter(value.atoms)) if len(value.atoms) == 1 else None
            if isinstance(atom, v.Repeated):  # `(*x.shape[:-1], -1, 64)`
                numbers = [inner.object for inner in atom.element.atoms if isinstance(inner, v.Known)]
                found += [v.known(number) for number in sorted(n for n in numbers if type(n) is int)]
            else:
                found += atom.items if isinstance(atom, v.Sequence) else (value,)
        return found

    def after(self, *first: Value) -> "Arguments":
        """Return the arguments with these in front."""
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
    """Read a real function's body with these arguments; None without source or budget.

    Args:
        function: Any callable around a plain function.
        arguments: Arguments, the receiver first if there is one.
        frame: Frame of the call.
        receiver: The object it is a method of.
        chain: The modules whose code is running; by default the frame's.
        through: The called value; if it is one of several objects, a loop may call each of them once.
    """
    plain, bound_to = underlying(function)
    node = find_node(plain) if plain is not None else None
    if plain is None or node is None or frame.depth >= v.MOST_DEPTH:
        return None
    if bound_to is not None and receiver is None:
        arguments = arguments.after(v.known(bound_to))
    if frame.analysis.running.count((node, id(receiver))) >= 2:
        return v.opaque(*arguments.values())
    inner = frame.child(plain, receiver, _defaults(plain, node))
    inner.chain = frame.chain if chain is None else chain
    inner.again = frame.again and (through is None or through.num_objects == 1)
    return _run(node, arguments, inner, (node, id(receiver)))


def result_of(function: Any, receiver: Any, arguments: list[Value], frame: Frame) -> Value:
    """Return the result of a function called with its receiver and these arguments; unknown without its source."""
    result = enter_function(function, Arguments([v.known(receiver), *arguments]), frame, receiver=receiver)
    return result if result is not None else v.PLAIN


def enter_closure(closure: v.Closure, arguments: Arguments, frame: Frame) -> Value:
    """Read a function that the code defines."""
    home: Frame = closure.frame
    key = (closure.node, id(home))
    if frame.depth >= v.MOST_DEPTH or frame.analysis.running.count(key) >= 2:
        return v.opaque(*arguments.values())
    args = closure.node.args
    positional = [*args.posonlyargs, *args.args]
    defaults = [*zip(positional[len(positional) - len(args.defaults) :], args.defaults, strict=True)]
    defaults += [(name, default) for name, default in zip(args.kwonlyargs, args.kw_defaults, strict=True) if default]
    inner = frame.child(home.function, home.receiver, {name.arg: home.evaluate(node) for name, node in defaults})
    inner.outer = home
    return _run(closure.node, arguments, inner, key)


def start(function: Any, module: nn.Module, frame: Frame) -> Value | None:
    """Read an entry of a module with unknown arguments; None without source."""
    plain, bound_to = underlying(function)
    node = find_node(plain) if plain is not None else None
    if plain is None or node is None:
        return None
    names = [*node.args.posonlyargs, *node.args.args]
    first = v.known(bound_to if bound_to is not None else module)
    given = {name.arg: _argument(name) for name in (*names[1:], *node.args.kwonlyargs)}
    if frame.analysis.flow is not None:
        given = {name: each.replace(trail=v.from_source("argument", name)) for name, each in given.items()}
    arguments = Arguments([first, *(given[name.arg] for name in names[1:])], spread=True)
    arguments.keywords = {name.arg: given[name.arg] for name in node.args.kwonlyargs}
    return _run(node, arguments, frame.child(plain, module, {}), (node, id(module)))


_AROUND_TENSOR = {"torch", "Optional", "Union", "None", "typing", "t"}


def _argument(parameter: ast.arg) -> Value:
    """Return the value of a parameter: a tensor if the annotation is a tensor type only, otherwise unknown."""
    annotation = parameter.annotation
    if annotation is None:
        return v.ARGUMENT
    text = str(annotation.value) if isinstance(annotation, ast.Constant) else ast.unparse(annotation)
    others = {word for word in re.findall(r"\w+", text) if not word.endswith("Tensor")}
    return v.TENSOR if "Tensor" in text and others <= _AROUND_TENSOR else v.ARGUMENT


def _run(node: FunctionNode, arguments: Arguments, frame: Frame, key: Any) -> Value:
    """Bind the arguments over the defaults in `frame.names`, then read the body."""
    analysis = frame.analysis
    _bind(node.args, arguments, frame.names)
    analysis.running.append(key)
    try:
        if isinstance(node, ast.Lambda):
            return frame.evaluate(node.body)
        frame.execute(node.body)
    finally:
        analysis.running.pop()
    ends = [*frame.exit_counts, *([] if frame.dead else [analysis.counts])]
    analysis.counts = v.join_counts(ends) if ends else analysis.counts
    if is_generator(node):
        return v.just(v.Repeated(v.join(frame.yields) if frame.yields else v.NONE))
    results = [*frame.returns, *([] if frame.dead else [v.NONE])]
    return v.join(results) if results else v.NONE


def _bind(args: ast.arguments, arguments: Arguments, names: dict[str, Value]) -> None:
    parameters = [argument.arg for argument in (*args.posonlyargs, *args.args)]
    keywords = dict(arguments.keywords)
    names.update(zip(parameters, arguments.positional, strict=False))
    for name in parameters[len(arguments.positional) :] + [argument.arg for argument in args.kwonlyargs]:
        if name in keywords:
            names[name] = keywords.pop(name)
        elif arguments.spread or name not in names:
            names[name] = v.join([v.ARGUMENT, *([names[name]] if name in names else [])])
    source = v.ARGUMENT.source if arguments.spread else v.PLAIN.source
    rest = Value(may_be_unknown=arguments.spread, source=source)
    if args.vararg is not None:
        atom = v.Sequence(tuple(arguments.positional[len(parameters) :]))
        names[args.vararg.arg] = rest.replace(atoms=frozenset({atom}))
    if args.kwarg is not None:
        names[args.kwarg.arg] = rest.replace(atoms=frozenset({v.Mapping(tuple(keywords.items()))}))


def _defaults(function: types.FunctionType, node: FunctionNode) -> dict[str, Value]:
    """Return the default objects of a function, by parameter."""
    positional = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
    given = function.__defaults__ or ()
    defaults = [*zip(positional[len(positional) - len(given) :], given, strict=False)]
    return {name: v.known(default) for name, default in (*defaults, *(function.__kwdefaults__ or {}).items())}


def defining_class(frame: Frame) -> type | None:
    """Return the class that defines the function being read, for `super()`."""
    found = frame.lookup("__class__").constant()
    return found if isinstance(found, type) else None
