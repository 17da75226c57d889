"""What code does with the parameters and gradients of a sharded model: sizes, norms, arithmetic, collectives."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

from shardwise.fsdp1.codemod.draft import FileDraft
from shardwise.fsdp1.codemod.evaluating import is_of_wrapped
from shardwise.fsdp1.codemod.flow import flow_of, wraps_models
from shardwise.fsdp1.codemod.model_calls import FORWARD_CODE, TAKES
from shardwise.fsdp1.codemod.program import Program, iterated, once
from shardwise.source.syntax import Comprehension, Function, attributes_in, calls_in, given_to, last_name, name_on_self

NUMBERS_CODE = "SW135"
_REDUCTIONS = {f"torch.distributed.{name}" for name in ("all_reduce", "reduce", "all_gather", "reduce_scatter")}
_COLLECTIVES = {
    f"torch.distributed.{name}" for name in ("broadcast", "gather", "scatter", "send", "recv", "all_to_all")
}
_COLLECTIVES |= {
    f"torch.distributed.{name}" for name in ("isend", "irecv", "all_to_all_single", "reduce_scatter_tensor")
}
_COLLECTIVES |= _REDUCTIONS | {"torch.distributed.all_gather_into_tensor", "torch.distributed.all_reduce_coalesced"}


def report_numbers(draft: FileDraft) -> None:
    """Note loops that count a sharded model's parameters or take norms of gradients, and reductions for FSDP1."""
    for node in draft.nodes():
        if isinstance(node, ast.If):
            _report_reduction(draft, node)
        elif isinstance(node, ast.For | Comprehension):
            _report_loop(draft, node)
        elif isinstance(node, ast.Call):
            _report_pairs(draft, node)
            _report_groups(draft, node)
            _report_methods(draft, node)
            _report_data(draft, node)
            _report_collective(draft, node)
            _report_mixed(draft, node)
            _report_kernels(draft, node)
        elif isinstance(node, ast.ClassDef):
            _report_optimizer(draft, node)


_PLAIN = {"item", "tolist", "numel", "nelement", "size", "dim", "element_size", "to_local", "full_tensor", "get_rank"}
_PLAIN |= {"shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "names", "__len__"}
"""Methods and attributes of a DTensor that give something else."""
_MAX_DEPTH = 6


def is_sharded(draft: FileDraft, node: ast.AST | None, depth: int = 0) -> bool:
    """Whether an expression is, or is computed from, parameters or gradients of a sharded model: a DTensor."""
    match node:
        case ast.Attribute(attr=name) if name in _PLAIN:
            return False
        case ast.Name() | ast.Attribute() | ast.Subscript() | ast.Call() if draft.sharded.is_parameter(node):
            return True
        case ast.Attribute(attr="weight" | "bias", value=module) if draft.sharded.holds_part(module):
            return True
        case ast.Name() if depth < _MAX_DEPTH:
            function = draft.context.enclosing_function(node)
            bound = [
                one.value
                for one in draft.context.bindings(node)
                if draft.context.enclosing_function(one.node) is function
            ]
            return any(is_sharded(draft, one, depth + 1) for one in [*bound, *_added(draft, node)])
        case ast.Call(func=ast.Attribute(attr=name)) if name in _PLAIN:
            return False
        case ast.Call(func=ast.Attribute(value=owner)) as call:
            origins = draft.context.origins(call.func)
            inner = given_to(call) if any(one.startswith("torch.") for one in origins) else [owner]
            return any(is_sharded(draft, one, depth + 1) for one in inner)
        case ast.Call(func=ast.Name(id="sum" | "list" | "tuple" | "max" | "min" | "sorted" | "float")) as call:
            return any(is_sharded(draft, one, depth + 1) for one in call.args if last_name(call.func) != "float")
        case ast.BinOp(left=one, right=other):
            return is_sharded(draft, one, depth + 1) or is_sharded(draft, other, depth + 1)
        case ast.UnaryOp(operand=one) | ast.Starred(value=one) | ast.Subscript(value=one) | ast.Attribute(value=one):
            return is_sharded(draft, one, depth + 1)
        case ast.List(elts=several) | ast.Tuple(elts=several):
            return any(is_sharded(draft, one, depth + 1) for one in several)
        case ast.ListComp(elt=one) | ast.GeneratorExp(elt=one) | ast.IfExp(body=one):
            return is_sharded(draft, one, depth + 1)
    return False


def _added(draft: FileDraft, name: ast.Name) -> list[ast.expr]:
    """What the function around appends to a list, or adds to a number, of this name."""
    function, found = draft.context.enclosing_function(name), list[ast.expr]()
    for node in ast.walk(function) if function is not None else ():
        match node:
            case ast.Call(func=ast.Attribute(attr="append", value=ast.Name(id=owner)), args=[one]) if owner == name.id:
                found.append(one)
            case ast.AugAssign(target=ast.Name(id=owner), value=one) if owner == name.id:
                found.append(one)
    return found


def _report_collective(draft: FileDraft, call: ast.Call) -> None:
    """A collective of torch.distributed on sharded parameters, gradients, or what is computed from them."""
    if not draft.context.is_any(call.func, _COLLECTIVES) or call in draft.taken:
        return
    own, tensors = draft.context.enclosing_class(call), call.args[:2]
    tensors += [one.value for one in call.keywords if "tensor" in (one.arg or "") or one.arg in ("input", "output")]
    of_optimizer = own is not None and draft.program.is_optimizer(draft.context, own)
    if (of_optimizer and wraps_models(draft.program)) or any(
        is_sharded(draft, one) or draft.sharded.holds_part(one) for one in tensors
    ):
        name = last_name(call.func)
        message = f"{name} raises for a DTensor, and results of sharded parameters and gradients are DTensors"
        fix = "leave it out where it adds up norms or keeps ranks alike; else give it parameter.to_local()"
        draft.undecided(NUMBERS_CODE, call, message, fix)


_IN_PLACE = {"copy_", "add_", "sub_", "mul_", "div_", "lerp_", "addcmul_", "addcdiv_", "set_"}
_MAKES = re.compile(
    r"^torch\.(zeros|ones|empty|full|tensor|randn|rand|randint|eye|arange|as_tensor|from_numpy|normal)$"
)


def _report_mixed(draft: FileDraft, call: ast.Call) -> None:
    """`parameter.copy_(tensor)` and the like, with a plain tensor on one of the sides."""
    match call.func:
        case ast.Attribute(attr=name, value=owner) if name in _IN_PLACE and call not in draft.taken:
            sides = [owner, *given_to(call)]
        case _:
            return
    sharded = [is_sharded(draft, one) for one in sides]
    if any(sharded) and any(_is_made_here(draft, one) for one, is_so in zip(sides, sharded, strict=True) if not is_so):
        message = f"{name} raises between a sharded parameter, a DTensor, and a plain tensor"
        fix = "torch.distributed.tensor.distribute_tensor(tensor, parameter.device_mesh, parameter.placements) first"
        draft.undecided(NUMBERS_CODE, call, message, fix)


def _is_made_here(draft: FileDraft, node: ast.expr) -> bool:
    """Whether an expression is a plain tensor for certain."""
    made = draft.context.assigned(node)
    calls = [one for one in made if isinstance(one, ast.Call)]
    return bool(calls) and all(any(map(_MAKES.match, draft.context.origins(one.func))) for one in calls)


_KERNELS = ("bitsandbytes.optim.", "apex.optimizers.", "deepspeed.ops.")


def _report_kernels(draft: FileDraft, call: ast.Call) -> None:
    """An optimizer of a library whose kernels read memory by its address."""
    if not any(one.startswith(_KERNELS) for one in draft.context.origins(call.func, raw=True)):
        return
    taken = draft.sharded.taken_from(value for one in given_to(call) for value in draft.sharded.values(one))
    owners = (one for _, _, several in taken for one in several)  # of groups that a function of the program makes
    if any(is_sharded(draft, one) for one in _given(call)) or any(map(is_of_wrapped, owners)):
        message = f"{last_name(call.func)} has kernels of its own, which read the memory of DTensors wrongly or fail"
        fix = "an optimizer of torch.optim or torchao.optim, or a release of the library that takes DTensors"
        draft.undecided(NUMBERS_CODE, call, message, fix)


def _given(call: ast.Call) -> Iterable[ast.expr]:
    return [inner for one in given_to(call) for inner in ast.walk(one) if isinstance(inner, ast.Call | ast.Name)]


_GROUPS = re.compile(r"weight_decay|param_?groups|parameter_groups|layer_decay")
_COUNTS = (
    "numel() of a sharded parameter counts the full parameter now; with FSDP1 it counted this rank's shard",
    "do not multiply the sum by the number of ranks, and do not all-reduce it",
)
_DIMENSIONS = (
    "a sharded parameter has the dimensions of the whole now; with FSDP1 it was a part, in one dimension",
    "check what is chosen by it, such as which parameters weight decay leaves out",
)
_PLACES = ("process_group", "sharding_strategy", "device_mesh")


@once
def _has_several_meshes(program: Program) -> bool:
    """Whether the program shards models over different ranks, as far as its constructors show."""
    places = set()
    for file in flow_of(program).files.values():
        for call in file.constructors:
            given = {one.arg: file.context.source(one.value) for one in call.keywords}
            places.add(tuple(given.get(name, "") for name in _PLACES))
    return len(places) > 1


def _report_pairs(draft: FileDraft, call: ast.Call) -> None:
    """Parameters of two models side by side, as for a moving average."""
    if draft.source(call.func) != "zip" or not _has_several_meshes(draft.program):
        return
    methods = [one.func for one in call.args if isinstance(one, ast.Call)]
    taken = [one.value for one in methods if isinstance(one, ast.Attribute) and one.attr in TAKES]
    if len(taken) > 1 and all(map(draft.holds, taken)):
        draft.reported(
            NUMBERS_CODE,
            call,
            "parameters of two sharded models are combined here: DTensors of different meshes cannot be",
            "give both models the same mesh and units, or work on parameter.to_local() where their shards are alike",
        )


def _report_groups(draft: FileDraft, call: ast.Call) -> None:
    """Parameter groups made by a function that is not given: by the shapes of the parameters, as a rule."""
    is_foreign = _GROUPS.search(last_name(call.func)) and draft.program.function(draft.context, call.func) is None
    if is_foreign and any(map(draft.holds, given_to(call))):
        draft.reported(NUMBERS_CODE, call, *_DIMENSIONS)


def _report_data(draft: FileDraft, call: ast.Call) -> None:
    """A function of the program that gives the sharded model's parameters other data."""
    found = draft.program.function(draft.context, call.func)
    taken = [one.func for one in given_to(call) if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute)]
    if found is not None and any(one.attr in TAKES and draft.holds(one.value) for one in taken):
        _report_writes(draft, call, found[1])


def _report_writes(draft: FileDraft, place: ast.AST, code: ast.AST) -> None:
    attributes = [one for one in ast.walk(code) if isinstance(one, ast.Attribute) and one.attr == "data"]
    if any(isinstance(one.ctx, ast.Store) for one in attributes):
        message = "a tensor is assigned to parameter.data: a sharded parameter, a DTensor, keeps its old shard"
        fix = "write into it with parameter.copy_() under no_grad; for other dtypes use MixedPrecisionPolicy"
        draft.undecided(NUMBERS_CODE, place, message, fix)


def _report_methods(draft: FileDraft, call: ast.Call) -> None:
    """A method of the sharded model's own that goes past its forward, or chooses parameters by their sizes."""
    match call.func:
        case ast.Attribute(attr=name, value=model) if name != "forward" and draft.holds(model):
            methods = draft.sharded.own_methods(model, name)
        case _:
            return
    calls = [one for method in methods for one in calls_in(method)]
    firsts = [one for node in calls if last_name(node.func) == "next" for one in node.args]
    on_self = {name_on_self(node.func) for node in calls if node not in firsts}
    if "forward" in on_self:
        message = f"{name}() calls self.forward(), which goes past FSDP2's gathering"
        fix = f'call self() there, or register_fsdp_forward_method(model, "{name}") after fully_shard'
        draft.undecided(FORWARD_CODE, call, message, fix)
    used = attributes_in(*methods) if on_self & {*TAKES} else set()
    if used & {"numel", "nelement"}:
        draft.reported(NUMBERS_CODE, call, *_COUNTS)
    if used & {"ndim", "dim"}:
        draft.reported(NUMBERS_CODE, call, *_DIMENSIONS)


def _report_optimizer(draft: FileDraft, node: ast.ClassDef) -> None:
    """An optimizer of the program's own."""
    steps = [one for one in node.body if isinstance(one, Function) and one.name == "step"]
    if steps and draft.program.is_optimizer(draft.context, node):
        draft.reported(
            NUMBERS_CODE,
            steps[0],
            f"{node.name} gets DTensors now; with FSDP1 it got this rank's part of each parameter, in one dimension",
            "use parameter.to_local() for arithmetic by element, and full_tensor() where it needs the whole",
        )


def _report_loop(draft: FileDraft, loop: ast.For | Comprehension) -> None:
    models = []
    for one in iterated(loop):
        match one:
            case ast.Call(func=ast.Attribute(attr="parameters" | "named_parameters", value=model)):
                models.append(model)
    used = attributes_in(loop)
    counts = not used.isdisjoint({"numel", "nelement"})
    if counts and "state" in attributes_in(*iterated(loop)) and draft.sharded.constructors:
        message = "numel() of an optimizer's state counts the full tensor now; with FSDP1 it counted this rank's shard"
        draft.reported(NUMBERS_CODE, loop, message, "count value.to_local() where the value is a DTensor")
    if not any(map(draft.sharded.has_inside, models)):
        return
    _report_writes(draft, loop, loop)
    if counts:
        draft.reported(NUMBERS_CODE, loop, *_COUNTS)
    if used & {"ndim", "dim"}:
        draft.reported(NUMBERS_CODE, loop, *_DIMENSIONS)
    if any(map(_is_norm, ast.walk(loop))):
        message = "the norm of a sharded gradient is over all ranks now, and a DTensor"
        fix = "take .full_tensor() of it, and do not add it up over ranks again; .item() of it is this rank's part"
        draft.reported(NUMBERS_CODE, loop, message, fix)


def _report_reduction(draft: FileDraft, branch: ast.If) -> None:
    """A branch for FSDP1's models that adds something up over ranks."""
    if not any(draft.program.checks_fsdp(draft.context, one) for one in ast.walk(branch.test)):
        return
    calls = [one for statement in branch.body for one in ast.walk(statement) if isinstance(one, ast.Call)]
    added = [one for one in calls if draft.context.is_any(one.func, _REDUCTIONS)]
    if added:
        draft.reported(
            NUMBERS_CODE,
            added[0],
            "FSDP1's models had these in parts, to be added up here; sizes and norms of DTensors are of the whole",
            "leave the reduction out if it is of these; .item() of a DTensor's sum or norm is this rank's part only",
        )


def _is_norm(node: ast.AST) -> bool:
    """`p.grad.norm()`, `torch.norm(p.grad)` and the like."""
    function = node.func if isinstance(node, ast.Call) else None
    return isinstance(function, ast.Attribute) and "norm" in function.attr and "grad" in attributes_in(node)
