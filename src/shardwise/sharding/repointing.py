"""Optimizers and other references follow replaced parameters: repointing, checks of steps, state dicts by name."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardwise import compat
from shardwise.distributed.agreement import gather_objects
from shardwise.errors import PlanError, ShardError, ShardwiseError
from shardwise.models.nested_tensors import change_tensors, find_tensors
from shardwise.sharding.hooks.outside import end_outside_use
from shardwise.sharding.inventory import canonical_name, class_name, local_part
from shardwise.sharding.registry import sharded_roots, sharded_state, users_line

_FOLLOWING: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def follow_names(optimizer: Optimizer) -> None:
    """Order the state dicts of an optimizer of sharded parameters by names; idempotent."""
    if optimizer not in _FOLLOWING:
        _FOLLOWING.add(optimizer)
        optimizer.register_state_dict_post_hook(_order_state)
        optimizer.register_load_state_dict_pre_hook(_order_names)


def _order_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Order the state as the models' parameters; each parameter keeps its index."""
    place = {id(parameter): index for index, (_, parameter) in enumerate(_named_parameters())}
    held = dict(enumerate(_held(optimizer)))
    state = state_dict["state"]
    # A state dict by name has non-integer keys, which come last, in their order.
    ordered = sorted(state, key=lambda entry: place.get(id(held.get(entry)), len(place)))
    return {**state_dict, "state": {entry: state[entry] for entry in ordered}}


def _order_names(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    """Reorder groups that list names instead of indices as in this optimizer; None for other state dicts."""
    given = state_dict.get("param_groups", [])
    if not all(isinstance(name, str) for group in given for name in group["params"]):
        return None
    name_of = {id(parameter): name for name, parameter in _named_parameters()}
    live = [[name_of.get(id(parameter), "") for parameter in group["params"]] for group in optimizer.param_groups]
    groups = {frozenset(group["params"]): group for group in given}
    if len(groups) != len(given) or {frozenset(names) for names in live} != groups.keys():
        return None  # torch compares them and reports the mismatch
    return {**state_dict, "param_groups": [{**groups[frozenset(names)], "params": names} for names in live]}


def _named_parameters() -> list[tuple[str, torch.Tensor]]:
    """Return the parameters of all sharded models, in sharding order."""
    return [
        (canonical_name(name), parameter)
        for root in sharded_roots()
        for name, parameter in nn.Module.named_parameters(root)
    ]


def _held(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


_Reference = weakref.ref[torch.Tensor]
_REPLACED: dict[int, tuple[_Reference, weakref.ref[Any] | None, str]] = {}
"""By identity of a replaced parameter: the parameter, FSDP2's record of its successor, and the model. There is no weak
reference to the successor itself, because torch could not swap it then (`model.to(device)`)."""
# Per optimizer: its parameters when it was last examined, the FSDP2 groups of these, and the mesh for comparing the
# gradients of its other parameters, if that is still to be done.
_EXAMINED: weakref.WeakKeyDictionary[Optimizer, tuple[Any, list[weakref.ref[Any]], DeviceMesh | None]]
_EXAMINED = weakref.WeakKeyDictionary()
_num_watched = 0


def watch_optimizers(model: nn.Module, replaced: Mapping[Any, torch.Tensor | None]) -> None:
    """At its next step, repoint an optimizer with a replaced parameter, or raise.

    Otherwise such an optimizer updates tensors that the model no longer uses: the loss stays flat, without
    an error. Only weak references are kept, and an optimizer is examined once, not at every step.

    Args:
        model: The root, with its current parameters.
        replaced: Previous parameters, each with its successor; None raises at the step.
    """
    global _num_watched
    _watch_steps()
    _num_watched += 1
    current = {id(parameter) for parameter in model.parameters()}
    records = {
        id(compat.sharded_parameter(each)): each for each in compat.parameter_records(compat.param_groups(model))
    }
    for old, new in replaced.items():
        key = id(old)
        if key not in current:  # ignored parameters are not replaced
            reference = weakref.ref(old, lambda _, key=key: _REPLACED.pop(key, None))
            record = records.get(id(new))
            _REPLACED[key] = (reference, None if record is None else weakref.ref(record), class_name(model))


@functools.cache
def _watch_steps() -> None:
    """Register torch's hooks once, permanently: removal by garbage collection would break a running step."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(lambda optimizer, *_: _call(_AFTER_STEPS, optimizer))


_BEFORE_STEPS: dict[object, Callable[[Optimizer], None]] = {}
_AFTER_STEPS: dict[object, Callable[[Optimizer], None]] = {}
"""Functions registered by `around_steps`."""


def _call(callbacks: dict[object, Callable[[Optimizer], None]], optimizer: Optimizer) -> None:
    for callback in list(callbacks.values()):
        callback(optimizer)


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    end_outside_use()
    lists = [(id(group["params"]), len(group["params"])) for group in optimizer.param_groups]
    known = (_num_watched, len(sharded_roots()), lists)
    examined, groups, mesh = _EXAMINED.get(optimizer, (None, [], None))
    if examined != known:
        groups, mesh = _examine(optimizer)
    if examined != known or mesh is not None:
        is_compared = mesh is None or _refuse_unaveraged(optimizer, mesh)
        _EXAMINED[optimizer] = known, groups, None if is_compared else mesh
    for reference in groups:
        # Otherwise the next forward would use parameters unsharded before the step (model.unshard(),
        # set_reshard_after_backward(False)) instead of the updated shards.
        if (group := reference()) is not None and not compat.is_resharded(group):
            compat.wait_and_reshard(group)
    _call(_BEFORE_STEPS, optimizer)


_Places = tuple[tuple[int, int], ...]
"""Parameters of an optimizer: index of the group and index in the group."""


def around_steps(
    groups: Iterable[Any],
    before: Callable[[_Places], None] | None = None,
    after: Callable[[_Places], None] | None = None,
) -> Callable[[], None]:
    """Call `before` and `after` around each step of an optimizer with parameters of FSDP2's groups, with their places.

    Returns:
        A function that removes the callbacks.
    """
    references = [weakref.ref(group) for group in groups]
    found: weakref.WeakKeyDictionary[Optimizer, _Places] = weakref.WeakKeyDictionary()

    def calling(callback: Callable[[_Places], None]) -> Callable[[Optimizer], None]:
        def call(optimizer: Optimizer) -> None:
            if optimizer not in found:
                living = [(number, group) for number, reference in enumerate(references) if (group := reference())]
                places = {
                    id(parameter): (number, index)
                    for number, group in living
                    for index, parameter in enumerate(compat.sharded_parameters(group))
                }
                found[optimizer] = tuple(places[id(each)] for each in _held(optimizer) if id(each) in places)
            if found[optimizer]:
                callback(found[optimizer])

        return call

    _watch_steps()
    key = object()
    if before is not None:
        _BEFORE_STEPS[key] = calling(before)
    if after is not None:
        _AFTER_STEPS[key] = calling(after)

    def stop() -> None:
        _BEFORE_STEPS.pop(key, None)
        _AFTER_STEPS.pop(key, None)

    return stop


def optimizers_of(model: nn.Module) -> list[Optimizer]:
    """Return the optimizers that have stepped parameters of `model`."""
    parameters = {id(parameter) for parameter in model.parameters()}
    return [each for each in list(_EXAMINED) if any(id(parameter) in parameters for parameter in _held(each))]


def _examine(optimizer: Optimizer) -> tuple[list[weakref.ref[Any]], DeviceMesh | None]:
    """Raise if the optimizer has parameters that no model uses; return the FSDP2 groups it steps and their mesh.

    The mesh is None if it has one rank, or if there are no groups.
    """
    adopt(optimizer)
    held = {id(parameter) for parameter in _held(optimizer)}
    stale = {id(p): _REPLACED[id(p)][2] for p in _held(optimizer) if _is_replaced(p)}
    if stale:
        raise _left_behind(
            optimizer,
            stale,
            next(iter(stale.values())),
            why="sharding replaced them; updates of the old ones do not affect the model",
            fix="build the optimizer after sharding, or pass it: shard(model, optimizers=[optimizer])",
        )
    owned, meshes = [], []
    for root in sharded_roots():
        for group in compat.param_groups(root):
            gathered = [id(p) for p in compat.unsharded_parameters(group) if id(p) in held]
            if gathered:
                raise _left_behind(
                    optimizer,
                    gathered,
                    class_name(root),
                    why="the optimizer was built while the model was unsharded (after unshard(), or in a "
                    "forward): it holds the temporary copies, and the shards would never change",
                    fix="call model.reshard() before building the optimizer",
                )
            if any(id(parameter) in held for parameter in compat.sharded_parameters(group)):
                owned.append(weakref.ref(group))
                meshes += [state.mesh] if (state := sharded_state(root)) is not None else []
        _refuse_added(optimizer, held, root)
    if owned:
        refuse_unsupported(optimizer)
        follow_names(optimizer)
    return owned, meshes[0] if meshes and meshes[0].size() > 1 else None


_UNSUPPORTED = {
    "SparseAdam": "it takes sparse gradients, and FSDP2 reduces dense ones",
    "AdamW4bit": "its 4-bit state cannot be a DTensor",
    "Adam4bit": "its 4-bit state cannot be a DTensor",
    "AdamWFp8": "its float8 state cannot be a DTensor",
    "AdamFp8": "its float8 state cannot be a DTensor",
}
"""Optimizers of torch and torchao that fail on sharded parameters, and why; tests/distributed/test_optimizers.py."""
_NOT_FUSED = ("SGD", "Adagrad")
_EVEN = {
    "LBFGS": "it joins all parameters into one vector",
    "AdamW8bit": "its kernel is compiled for shards of one size",
    "Adam8bit": "its kernel is compiled for shards of one size",
}
"""Optimizers that fail if a parameter is sharded unevenly."""


def why_unsupported(optimizer: Optimizer) -> str:
    """Return why an optimizer does not support sharded parameters; empty if no problem is known."""
    kinds = [kind for kind in type(optimizer).__mro__ if kind.__module__.partition(".")[0] in ("torch", "torchao")]
    spread = [parameter for parameter in _held(optimizer) if isinstance(parameter, DTensor)]
    for name in [kind.__name__ for kind in kinds] if spread else ():
        if name in _UNSUPPORTED:
            return _UNSUPPORTED[name]
        if name in _NOT_FUSED and any(group.get("fused") for group in optimizer.param_groups):
            return "its fused kernel does not know DTensors; leave fused out"
        if name in _EVEN and (uneven := next(filter(_is_uneven, spread), None)) is not None:
            return f"{_EVEN[name]}, and {tuple(uneven.shape)} does not divide evenly over the ranks"
    return ""


def refuse_unsupported(optimizer: Optimizer) -> None:
    """Raise for an optimizer that would fail or hang in its first step.

    Raises:
        ShardError: The optimizer is not supported; on every rank.
    """
    if why := why_unsupported(optimizer):
        raise ShardError(
            f"{type(optimizer).__name__} cannot step sharded parameters",
            where=f"{type(optimizer).__name__}.step()",
            why=why,
            fix="use AdamW, Adam, SGD, Muon or another of the list in docs/composition.md, optimizers",
        )


def _is_uneven(parameter: DTensor) -> bool:
    sizes: dict[int, int] = {}
    for axis, placement in enumerate(parameter.placements):
        if isinstance(placement, Shard):
            sizes[placement.dim] = sizes.get(placement.dim, 1) * parameter.device_mesh.size(axis)
    return any(parameter.shape[dim] % size for dim, size in sizes.items())


def _refuse_added(optimizer: Optimizer, held: set[int], root: nn.Module) -> None:
    """Raise if the optimizer has parameters added to the model after sharding."""
    state = sharded_state(root)
    if state is None or state.mesh.size() == 1:
        return
    outside = (*state.plan.replicated, *state.plan.ignored)
    averaged = {canonical_name(name) for planned in outside for name in (planned.fqn, *planned.aliases)}
    for name, parameter in root.named_parameters():
        is_plain = id(parameter) in held and parameter.requires_grad and not isinstance(parameter, DTensor)
        if is_plain and canonical_name(name) not in averaged:
            raise ShardError(
                f"{type(optimizer).__name__} holds {name!r}, which was added to {class_name(root)} after sharding",
                where=name,
                why="it is in no group, so its gradient is not averaged and ranks would diverge",
                fix="add the module before shard(), or shard it separately before adding it",
            )


def _refuse_unaveraged(optimizer: Optimizer, mesh: DeviceMesh) -> bool:
    """Raise if a parameter outside the sharded model, of a wrapper or criterion, has different gradients on ranks.

    Returns:
        Whether all these parameters have gradients and were compared.

    Ranks:
        Collective over the mesh, in each step of an optimizer with such parameters, until it returns True.
    """
    of_models = {id(parameter) for root in sharded_roots() for parameter in root.parameters()}
    beside = [
        (number, index, parameter)
        for number, group in enumerate(optimizer.param_groups)
        for index, parameter in enumerate(group["params"])
        if parameter.requires_grad and not isinstance(parameter, DTensor) and id(parameter) not in of_models
    ]
    if not beside:
        return True
    norms = {p: None if p.grad is None else p.grad.detach().abs().float().norm().item() for *_, p in beside}
    # Ranks may list the same parameters in another order.
    beside.sort(key=lambda each: (each[2].shape, _finite(norms[each[2]])))
    ranks = gather_objects([norms[parameter] for *_, parameter in beside], group=mesh)
    for (number, index, parameter), *found in zip(beside, *ranks, strict=True):
        if not all(_is_near(each, found[0]) for each in found):
            raise ShardError(
                f"{type(optimizer).__name__} holds a parameter of shape {list(parameter.shape)} beside those of a "
                "sharded model, with another gradient on each rank",
                where=f"param_groups[{number}]['params'][{index}]",
                why="it is in no sharded model, so its gradient is not averaged and ranks would diverge",
                fix="shard the module that has it, or the outermost module instead of a part; or average its gradient "
                "over the ranks before the step",
            )
    return not any(each is None for each in ranks[0])


def _finite(norm: float | None) -> float:
    """Return a sort key."""
    return -1.0 if norm is None else norm if math.isfinite(norm) else math.inf


def _is_near(norm: float | None, other: float | None) -> bool:
    if norm is None or other is None:
        return norm is other
    return math.isclose(norm, other, rel_tol=1e-3, abs_tol=1e-12) or not (math.isfinite(norm) and math.isfinite(other))


def _is_replaced(parameter: torch.Tensor) -> bool:
    return id(parameter) in _REPLACED and _REPLACED[id(parameter)][0]() is parameter


class ReplacedParameter(nn.Parameter):
    """A parameter from before sharding, to which a list, closure or hook still refers: uses are of the present one."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func` on the present parameters."""
        return func(*change_tensors(args, _present), **change_tensors(kwargs or {}, _present))


def follow(old: torch.Tensor, module: nn.Module, name: str) -> None:
    """Redirect uses of a replaced parameter to what `module` has under `name`: the shard, or in forward all of it."""
    if type(old) is nn.Parameter:
        if old.requires_grad:  # reached past the class below: by views made earlier, by torch.autograd.Function
            place = f"{class_name(module)}.{name}"
            old.register_hook(lambda _: _refuse_use(place))
        old.__dict__[_PLACE] = weakref.ref(module), name
        old.__class__ = ReplacedParameter


_PLACE = "_shardwise_place"


def _present(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) is not ReplacedParameter:
        return tensor
    module, name = tensor.__dict__[_PLACE]
    present = getattr(module(), name, None)
    if not isinstance(present, torch.Tensor) or present is tensor:
        _refuse_use(name)
    return present


def _refuse_use(where: str) -> NoReturn:
    raise ShardError(
        "a parameter that sharding has replaced is used",
        where=f"{where}, {users_line()}",
        why="a view, a graph or a reference from before sharding leads to its old values",
        fix="read the parameter from its module where it is used (self.linear.weight), or refer to it after shard()",
    )


def refuse_replaced(model: nn.Module) -> None:
    """Raise if the model has parameters of another one that was sharded before."""
    for name, parameter in model.named_parameters():
        if type(parameter) is ReplacedParameter:
            raise PlanError(
                f"{name!r} is also a parameter of a model that has been sharded",
                where=name,
                why="each would train its own copy",
                fix="shard one module that contains both models",
            )


def _left_behind(optimizer: Optimizer, stale: Iterable[int], model: str, *, why: str, fix: str) -> ShardError:
    ids = set(stale)
    groups = [index for index, group in enumerate(optimizer.param_groups) if any(id(p) in ids for p in group["params"])]
    held = _held(optimizer)
    return ShardError(
        f"{type(optimizer).__name__} holds {len(ids)} of {len(held)} parameters that {model} no longer uses",
        where=f"param_groups {groups}: shapes {_shapes([p for p in held if id(p) in ids])}",
        why=why,
        fix=fix,
    )


def refuse_foreign(
    parameters: Sequence[torch.Tensor],
    names: Container[int],
    owner: str,
    *,
    where: str,
    kind: type[ShardwiseError] = ShardError,
) -> None:
    """Raise if an optimizer has parameters whose `id` is not in `names`, the parameters of `owner`."""
    if foreign := [parameter for parameter in parameters if id(parameter) not in names]:
        raise kind(
            f"{len(foreign)} of {len(parameters)} parameters are not parameters of {owner}: {_shapes(foreign)}",
            where=where,
            why="an optimizer and its state are matched by the parameter names of the model",
            fix="pass the optimizer with every model whose parameters it holds; build it after sharding, or give it to "
            "shard()",
        )


def _shapes(tensors: Sequence[torch.Tensor]) -> str:
    return ", ".join([*(str(tuple(tensor.shape)) for tensor in tensors[:3]), *(["…"] if len(tensors) > 3 else [])])


# Counters of torch's optimizers per parameter. They stay plain tensors even for a scalar parameter, because
# optimizers pass them to foreach kernels in separate lists.
COUNTERS = frozenset({"step", "mu_product", "eta", "mu"})


def remember_parameters(model: nn.Module, optimizers: Iterable[Optimizer]) -> dict[int, str]:
    """Return the names of parameters by identity, before sharding replaces them.

    Args:
        model: Unsharded model.
        optimizers: Optimizers of some or all `model.parameters()`, stepped or not.

    Raises:
        ShardError: An optimizer has a parameter of another model, has one twice, or has state that cannot be
            sharded like its parameter. Nothing has been changed then.
    """
    name_of: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        name_of.setdefault(id(parameter), name)
    for index, optimizer in enumerate(optimizers):
        where, seen = f"optimizers[{index}] ({type(optimizer).__name__})", set()
        for number, group in enumerate(optimizer.param_groups):
            refuse_foreign(group["params"], name_of, type(model).__name__, where=f"{where}, param_groups[{number}]")
            for parameter in group["params"]:
                name = name_of[id(parameter)]
                if name in seen:
                    raise ShardError(
                        f"the optimizer holds {name} twice",
                        where=f"{where}, param_groups[{number}]",
                        why="such a parameter is updated twice",
                        fix="put each parameter in one group only",
                    )
                seen.add(name)
                _check_state(where, name, optimizer.state.get(parameter), parameter)
    return name_of


def repoint(optimizers: Iterable[Optimizer], name_of: Mapping[int, str], model: nn.Module) -> None:
    """Replace the remembered parameters by the model's current ones, in place.

    Groups, their order and options do not change; state with a parameter's shape is sharded like the parameter. The
    optimizer objects stay the same, so that learning-rate schedulers keep working.

    Args:
        optimizers: The optimizers passed to `remember_parameters`.
        name_of: Result of `remember_parameters`.
        model: The model, now sharded.

    Ranks:
        Local. No communication: every rank has the full state and keeps its own shard.
    """
    current = dict(model.named_parameters(remove_duplicate=False))
    for optimizer in optimizers:
        follow_names(optimizer)
        _repoint(optimizer, {id(old): current[name_of[id(old)]] for old in _held(optimizer)})


def adopt(optimizer: Optimizer) -> None:
    """Repoint an optimizer created before FSDP1's wrapping to the sharded parameters; ignore other optimizers."""
    successors: dict[int, torch.Tensor] = {}
    for parameter in filter(_is_replaced, _held(optimizer)):
        reference = _REPLACED[id(parameter)][1]
        if reference is not None and (record := reference()) is not None:
            shape = str(tuple(parameter.shape))
            _check_state(type(optimizer).__name__, f"a parameter of {shape}", optimizer.state.get(parameter), parameter)
            successors[id(parameter)] = compat.sharded_parameter(record)
    if successors:
        _repoint(optimizer, successors)


def _repoint(optimizer: Optimizer, successors: Mapping[int, torch.Tensor]) -> None:
    for group in optimizer.param_groups:
        old = list(group["params"])
        group["params"][:] = [successors.get(id(parameter), parameter) for parameter in old]  # LBFGS keeps the list
        for before, after in zip(old, group["params"], strict=True):
            if before is not after and before in optimizer.state:
                state = optimizer.state.pop(before)
                optimizer.state[after] = {
                    key: _split(value, before, after) if _is_split(key, value, before) else value
                    for key, value in state.items()
                }


def shard_like(full: torch.Tensor, parameter: DTensor) -> DTensor:
    """Return this rank's part of `full` as a DTensor with the placements of `parameter` and new storage.

    Ranks:
        Local. Every rank must pass the same `full`.
    """
    local = local_part(full, parameter).to(
        device=parameter.to_local().device, copy=True, memory_format=torch.contiguous_format
    )
    return compat.dtensor_like(local, parameter)


def _check_state(where: str, name: str, state: dict[str, Any] | None, parameter: torch.Tensor) -> None:
    for key, value in (state or {}).items():
        for tensor in find_tensors(value):
            if tensor.ndim > 0 and not (tensor is value and _is_split(key, tensor, parameter)):
                raise ShardError(
                    f"state {key!r} of {name} has shape {tuple(tensor.shape)}, the parameter {tuple(parameter.shape)}",
                    where=where,
                    why="only state of the parameter's own shape can be split as the parameter is; "
                    "factored or flattened state cannot",
                    fix="build the optimizer after sharding, with new state",
                )


def _is_split(key: str, value: object, parameter: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and key not in COUNTERS and value.shape == parameter.shape


def _split(value: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    # If the plan changes the storage dtype, state in the old dtype would not match the gradients.
    full = value.to(after.dtype) if value.dtype == before.dtype else value
    return shard_like(full, after) if isinstance(after, DTensor) else full.to(after.device)
