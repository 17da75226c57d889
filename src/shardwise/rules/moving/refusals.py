"""Constructor calls that must stay although every argument converts: what is around them would not survive."""

from __future__ import annotations

import ast
import re

from shardwise.rules.moving.constructors import Blocked, Wrap, has_stars
from shardwise.rules.moving.leftovers import FLAT
from shardwise.rules.moving.values import called_fsdp_name, is_constant, is_none, single_value
from shardwise.rules.scopes import Function, all_parameters
from shardwise.rules.source import FileContext

_PARTS = re.compile(r"\.(named_)?(modules|children)\(|\b\w*(layers|blocks)\b")
_LOOPS = ast.For | ast.ListComp | ast.GeneratorExp | ast.DictComp


def refuse_surroundings(wrap: Wrap) -> None:
    """Refuse a call for what its own function does with the model, or what is done with the function.

    Raises:
        Blocked: With the line that stands in the way.
    """
    _refuse_private_functions(wrap)
    _refuse_flat_parameters(wrap)
    _refuse_unknown_root(wrap)


def refuse_local_names(wrap: Wrap) -> None:
    """Refuse a call where one of the names we would use already means something else.

    Raises:
        Blocked: As in code that knows both FSDP1 and FSDP2, and imports the second where it needs it.
    """
    for name in sorted(wrap.draft.names):
        if wrap.draft.is_local(wrap.call, name):
            raise Blocked(f"{name} means something else here", f"rename it, or import torch's {name} at the top")


def wraps_parts(wrap: Wrap) -> int | None:
    """The line that shows that a call serves for parts of a model; None if nothing does.

    Its function, or the name of its `partial`, is handed on to others, called for modules inside one another, or called
    in a loop over modules.
    """
    context = wrap.context
    texts: list[str] = []
    for node in _uses(wrap):
        parent = context.parents[node]
        if not (isinstance(parent, ast.Call) and parent.func is node):
            return node.lineno
        first = parent.args[0] if parent.args else None
        texts += [context.source(first)] if first is not None else []
        if _in_loop_over_parts(context, parent):
            return node.lineno
    nested = any(one != other and re.match(rf"{re.escape(one)}[.\[]", other) for one in texts for other in texts)
    return wrap.call.lineno if nested else None


def _uses(wrap: Wrap) -> list[ast.expr]:
    """Where the function around the call is used, or the lambda, or what the `partial` is bound to."""
    context, call = wrap.context, wrap.call
    maker = next((one for one in context.ancestors(call) if isinstance(one, ast.Lambda | Function)), None)
    value = call if wrap.is_partial else maker
    if isinstance(value, Function) and _is_parameter(wrap, value):
        return [one for one in _names(context, value.name) if context.definition(one) is value]
    if not isinstance(value, ast.expr):
        return []
    parent = context.parents[value]
    targets = parent.targets if isinstance(parent, ast.Assign) else []
    if len(targets) != 1 or not isinstance(targets[0], ast.Name):
        return [value]
    return [one for one in _names(context, targets[0].id) if any(b.value is value for b in context.bindings(one))]


def _is_parameter(wrap: Wrap, function: Function) -> bool:
    """Whether the module is handed in; a function that builds the model itself wraps the whole of it."""
    module = wrap.value("module")
    return isinstance(module, ast.Name) and any(one.arg == module.id for one in all_parameters(function.args))


def _names(context: FileContext, name: str) -> list[ast.Name]:
    nodes = (node for node in context.parents if isinstance(node, ast.Name) and node.id == name)
    return [node for node in nodes if isinstance(node.ctx, ast.Load)]


def _in_loop_over_parts(context: FileContext, call: ast.Call) -> bool:
    for parent in context.ancestors(call):
        if isinstance(parent, Function):
            return False
        if isinstance(parent, _LOOPS):
            iterated = [parent.iter] if isinstance(parent, ast.For) else [one.iter for one in parent.generators]
            if any(_PARTS.search(context.source(one)) for one in iterated):
                return True
    return False


def _refuse_private_functions(wrap: Wrap) -> None:
    """The result goes to a function that is private to FSDP1."""
    context, statement = wrap.context, wrap.statement
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    names = {context.source(target) for target in targets}
    home = context.enclosing_function(wrap.call)
    for call in context.calls:
        if context.enclosing_function(call) is not home or not any(context.source(one) in names for one in call.args):
            continue
        if any(origin.startswith("torch.distributed.fsdp._") for origin in context.origins(call.func, raw=True)):
            raise Blocked(
                f"its result goes to {context.source(call.func)} on line {call.lineno}, which is private to FSDP1",
                "find another way to do what that is for",
            )


def _refuse_flat_parameters(wrap: Wrap) -> None:
    """The same function works on the flat parameters."""
    context = wrap.context
    home = context.enclosing_function(wrap.call)
    for node in context.parents:
        if not isinstance(node, ast.Attribute) or node.attr not in FLAT or node.lineno <= wrap.call.lineno:
            continue
        if context.enclosing_function(node) is home:
            raise Blocked(
                f"line {node.lineno} works on its flat parameters, which FSDP2 does not have",
                "do that on the DTensors that model.parameters() gives",
            )


def _refuse_unknown_root(wrap: Wrap) -> None:
    """Mixed precision casts the inputs of the outermost module only: it must be known which one that is."""
    given = wrap.value("mixed_precision")
    if (is_none(given) and not has_stars(wrap)) or wrap.is_inner or _casts_all(wrap, given):
        return
    line = wraps_parts(wrap)
    if line is not None:
        raise Blocked(
            f"its function serves for parts of a model (line {line}), and mixed precision casts the inputs of the "
            "outermost module only",
            "call fully_shard on the parts with cast_forward_inputs=False, then on the model with True",
        )


def _casts_all(wrap: Wrap, node: ast.expr | None) -> bool:
    value = single_value(wrap.context, node) if node is not None else None
    if called_fsdp_name(wrap.context, value) != "MixedPrecision" or not isinstance(value, ast.Call):
        return False
    return any(one.arg == "cast_forward_inputs" and is_constant(one.value, True) for one in value.keywords)
