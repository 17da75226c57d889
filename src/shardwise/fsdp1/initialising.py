"""What FSDP1's constructor does: arguments, policies, meshes, initial values, plans, hooks."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.tensor import DTensor

from shardwise import compat
from shardwise.config.fsdp1_names import HYBRID, KEEPS_UNSHARDED
from shardwise.config.schema import SYNONYMS
from shardwise.distributed.agreement import gather_objects
from shardwise.distributed.mesh import made_once, mesh_of_sizes, ranks_per_machine
from shardwise.errors import PlanError, ShardError
from shardwise.fsdp1.units import WrongArgument, WrongUse, cast_buffers, clean_name, units_in
from shardwise.models.nested_tensors import cast_floating
from shardwise.planning.plan import Group, Plan, PlannedParameter
from shardwise.planning.settings import dtype_name
from shardwise.sharding.full_params import reshard
from shardwise.sharding.hooks.forward_hooks import Casts, ForwardHooks
from shardwise.sharding.hooks.graph_calls import watch_backward
from shardwise.sharding.hooks.outside import OutsideUse
from shardwise.sharding.inventory import broadcast_from_first
from shardwise.sharding.registry import abandon_pass, recover

_SAID: set[str] = set()


def warn_once(about: str, text: str) -> None:
    """Warn about an argument or call, as the script spells it, unless this was said before."""
    if about not in _SAID:
        _SAID.add(about)
        warnings.warn(f"shardwise.fsdp1: {about}: {text}", UserWarning, stacklevel=4)


class Settings(NamedTuple):
    """A constructor call's arguments, with FSDP1's defaults filled in."""

    strategy: ShardingStrategy
    precision: MixedPrecision
    offload: bool
    options: dict[str, Any]
    """Of `fully_shard`."""


def read_settings(
    sharding_strategy: ShardingStrategy | None,
    cpu_offload: CPUOffload | None,
    backward_prefetch: BackwardPrefetch | None,
    mixed_precision: MixedPrecision | None,
) -> Settings:
    """The settings of a call; what FSDP2 does otherwise is said once."""
    if backward_prefetch is not BackwardPrefetch.BACKWARD_PRE:
        asked = getattr(backward_prefetch, "name", backward_prefetch)
        warn_once(
            f"backward_prefetch={asked}",
            "FSDP2 always gathers the next unit ahead of the gradients; results are the same, one more unit is held",
        )
    precision = mixed_precision or MixedPrecision()
    if precision.keep_low_precision_grads:
        warn_once(
            "keep_low_precision_grads=True",
            "gradients have the dtype in which parameters are stored; store those in 16 bits to keep gradients there",
        )
    strategy = sharding_strategy or ShardingStrategy.FULL_SHARD
    if not isinstance(strategy, ShardingStrategy):
        fix = f"choose among {', '.join(ShardingStrategy.__members__)}"
        what, why = f"sharding_strategy is {strategy!r}", "it is a member of ShardingStrategy"
        raise _refused("FullyShardedDataParallel(sharding_strategy=)", what, why, fix)
    offload = cpu_offload is not None and cpu_offload.offload_params
    # FSDP1 sums gradients in `param_dtype` when no `reduce_dtype` is given; inputs are cast by the unit.
    reduce_dtype = precision.reduce_dtype or precision.param_dtype
    pin_memory = torch.accelerator.is_available()
    options = {
        # None reshards all units but the root after forward, as FSDP1's FULL_SHARD does.
        "reshard_after_forward": False if strategy.name in KEEPS_UNSHARDED else None,
        "mp_policy": fsdp.MixedPrecisionPolicy(precision.param_dtype, reduce_dtype, cast_forward_inputs=False),
        "offload_policy": fsdp.CPUOffloadPolicy(pin_memory=pin_memory) if offload else fsdp.OffloadPolicy(),
    }
    return Settings(strategy, precision, offload, options)


def find_device(
    device_id: int | torch.device | None, device_mesh: DeviceMesh | None, module: nn.Module
) -> torch.device:
    """Where a unit computes: as asked, else where its mesh or its parameters are, else the accelerator.

    FSDP1 refuses a machine without an accelerator unless `device_id` is the CPU; here the CPU is used. The device of
    `device_id` becomes the current one: FSDP2 knows no other.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if isinstance(device_id, int):
        device = torch.device(accelerator.type if accelerator is not None else "cpu", device_id)
    elif device_id is not None:
        device = torch.device(device_id)
    elif device_mesh is not None:
        device = torch.device(device_mesh.device_type)
    else:
        placed = (tensor.device for tensor in module.parameters() if tensor.device.type not in ("cpu", "meta"))
        device = next(placed, accelerator or torch.device("cpu"))
    if device.type == "cpu":
        return torch.device("cpu")
    if device.index is not None and device.index != torch.accelerator.current_device_index():
        torch.accelerator.set_device_index(device.index)
    return torch.device(device.type, torch.accelerator.current_device_index())


def _refused(where: str, what: str, why: str, fix: str) -> WrongArgument:
    return WrongArgument(what, where=where, why=why, fix=fix)


@dataclass(slots=True)
class Ignored:
    """What a unit leaves alone, what its nested units left alone included."""

    modules: set[nn.Module]
    parameters: set[nn.Parameter]


def find_ignored(
    module: nn.Module,
    ignored_modules: Iterable[nn.Module] | None,
    ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None,
    nested: Iterable[Any],
) -> Ignored:
    """Every module and parameter to be ignored, given as modules with all they hold, or as parameters."""
    refused = partial(_refused, "FullyShardedDataParallel(ignored_modules=, ignored_states=)")
    states, given = list(ignored_states or ()), list(ignored_modules or ())
    if given and states:
        raise refused("both are given", "ignored_states takes both kinds", "keep ignored_states")
    wrong = [state for state in given if not isinstance(state, nn.Module)]
    wrong += [state for state in states if not isinstance(state, nn.Module | nn.Parameter)]
    if wrong:
        why = "ignored_modules takes modules, ignored_states modules or parameters"
        fix = "pass a parameter as ignored_states=[parameter]"
        raise refused(f"a {type(wrong[0]).__name__} cannot be ignored", why, fix)
    if module in given or module in states:
        warn_once("ignored_modules", "the wrapped module itself is ignored: nothing in it is sharded")
    units = {id(unit) for unit in nested}
    roots = given or [state for state in states if isinstance(state, nn.Module)]
    if any(id(root) in units for root in roots):
        raise refused("an ignored module is wrapped already", "its parameters are sharded", "leave it out")
    modules = {child for root in roots for child in root.modules() if id(child) not in units}
    parameters = {parameter for child in modules for parameter in child.parameters(recurse=False)}
    parameters |= {state for state in states if isinstance(state, nn.Parameter)}
    for unit in nested:
        modules |= unit._ignored_modules
        parameters |= unit._ignored_params
    return Ignored(modules, parameters)


def auto_wrap(root: nn.Module, policy: Any, ignored: Ignored, arguments: dict[str, Any], unit_class: type) -> None:
    """Wrap the modules below `root` that the policy chooses, each with the root's arguments or its own.

    The policy is a `ModuleWrapPolicy`, a `CustomPolicy`, or a function of `module`, `recurse`, `nonwrapped_numel`.
    """
    for name, module in root.named_modules():
        if isinstance(module, unit_class):
            raise WrongUse(
                f"{name or 'the model'} is wrapped already",
                where="FullyShardedDataParallel(auto_wrap_policy=)",
                why="a policy decides about the whole model, innermost modules first",
                fix="leave out auto_wrap_policy, or the wrapping by hand",
            )
    precision = arguments["mixed_precision"]
    exempt = tuple(precision._module_classes_to_ignore) if precision is not None else ()
    exempted = [module for module in _keep_precise(root, exempt) if module not in ignored.modules]
    if hasattr(policy, "_run_policy"):
        chosen = dict.fromkeys(exempted, arguments) | policy._run_policy(root, ignored.modules, dict(arguments))
    else:
        chosen = dict.fromkeys(_chosen_by_function(root, policy, exempt, ignored), arguments)
    for module in exempted:
        if module in chosen:
            chosen[module] = chosen[module] | {"mixed_precision": None}
    _wrap_chosen(root, chosen, unit_class)


def _wrap_chosen(root: nn.Module, chosen: dict[nn.Module, dict[str, Any]], unit_class: type) -> None:
    """Replace every chosen module below `root` by its unit, children first; under all its names."""
    units: dict[nn.Module, nn.Module] = {root: root}

    def visit(parent: nn.Module) -> None:
        for name, child in list(parent._modules.items()):
            if child is None:
                continue
            if child not in units:
                units[child] = child
                visit(child)
                if child in chosen:
                    units[child] = unit_class(child, **chosen[child])
            setattr(parent, name, units[child])

    visit(root)


def _chosen_by_function(
    root: nn.Module, policy: Callable[..., bool], exempt: tuple[type, ...], ignored: Ignored
) -> list[nn.Module]:
    """What a function chooses that sees how many elements below a module are not in units; and what is exempt."""
    chosen: list[nn.Module] = []
    seen: set[nn.Module] = set()

    def visit(module: nn.Module) -> int:
        """Choose at and below a module; return how many of its elements are in units then."""
        seen.add(module)
        left = sum(parameter.numel() for parameter in module.parameters() if parameter not in ignored.parameters)
        if not (exempt or policy(module=module, recurse=True, nonwrapped_numel=left)):
            return 0
        children = [child for child in module.children() if child not in ignored.modules]
        wrapped = sum(visit(child) for child in children if child not in seen)
        if module is root:
            return wrapped
        if isinstance(module, exempt) or policy(module=module, recurse=False, nonwrapped_numel=left - wrapped):
            chosen.append(module)
            return left
        return wrapped

    visit(root)
    return chosen


def _keep_precise(root: nn.Module, exempt: tuple[type, ...]) -> list[nn.Module]:
    """Let modules of these classes compute in float32 whatever they are given, and answer in the dtype they got."""
    exempted = [module for module in root.modules() if exempt and isinstance(module, exempt)]
    for module in exempted:
        given: list[torch.dtype] = []

        def before(_: nn.Module, args: Any, given: list[torch.dtype] = given) -> Any:
            given[:] = [arg.dtype for arg in args if isinstance(arg, torch.Tensor) and arg.is_floating_point()]
            return cast_floating(args, torch.float32)

        def after(_: nn.Module, args: Any, output: Any, given: list[torch.dtype] = given) -> Any:
            return cast_floating(output, given[0]) if given else output

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)
    if exempted:
        names = ", ".join(sorted({type(module).__name__ for module in exempted}))
        warn_once(f"mixed_precision with {names}", "units of their own, in full precision, as in FSDP1")
    return exempted


_AXES = ("replicate", "shard")


def find_mesh(
    strategy: ShardingStrategy, process_group: Any, device_mesh: DeviceMesh | None, device_type: str
) -> DeviceMesh:
    """The mesh of a unit: `(shard)`, or `(replicate, shard)` for the hybrid strategies and NO_SHARD.

    A `process_group` may be FSDP1's pair of the group that shards and the one that replicates. Collective the first
    time a set of groups is seen.
    """
    refused = partial(_refused, "FullyShardedDataParallel(process_group=, device_mesh=)")
    is_hybrid, name = strategy.name in HYBRID, strategy.name
    if process_group is not None and device_mesh is not None:
        raise refused("both are given", "each names the ranks", "leave one of them out")
    if is_hybrid and process_group is not None and not (isinstance(process_group, tuple) and len(process_group) == 2):
        fix = "process_group=(shard_group, replicate_group), or a device_mesh of two axes"
        raise refused(f"{name} is given one process group", "it shards over one group and replicates over another", fix)
    if device_mesh is not None:
        if not is_hybrid and device_mesh.ndim > 1 and not device_mesh.mesh_dim_names:
            fix = "name the axes and pass one of them, mesh[name], or use HYBRID_SHARD"
            what = f"{name} is given a mesh of {device_mesh.ndim} axes without names"
            raise refused(what, "it shards over one axis", fix)
        if is_hybrid and device_mesh.ndim != 2:
            fix = f'init_device_mesh("{device_mesh.device_type}", (num_copies, num_shards))'
            what = f"{name} is given a mesh of {device_mesh.ndim} axis"
            raise refused(what, "it replicates over the first axis and shards over the second", fix)
        if device_mesh.mesh_dim_names is not None:
            _refuse_model_parallel(device_mesh)
    if not dist.is_initialized():
        fix = "torch.distributed.init_process_group(...) first, as FSDP1 needs it too"
        raise refused("there is no process group yet", "parameters are sharded over its ranks", fix)
    key = (strategy, process_group, device_mesh, device_type)
    return made_once(key, lambda: _make(*key))


def _refuse_model_parallel(mesh: DeviceMesh) -> None:
    """Raise for an axis of more than one rank that is known to divide layers or sequences."""
    for name, size in zip(mesh.mesh_dim_names or (), mesh.shape, strict=False):
        meaning = SYNONYMS.get(name, name)
        if size > 1 and meaning in ("tensor", "context", "expert", "sp", "sequence"):
            raise PlanError(
                f"the mesh axis {name!r} has {size} ranks, and FSDP1 only shards and replicates",
                where=f"mesh axes {', '.join(mesh.mesh_dim_names or ())}",
                why=f"gradients are not reduced over it: weights along {name!r} would diverge without an error",
                fix="shardwise.shard(model, mesh=init_distributed(MeshConfig(shard=..., tensor=...)))",
            )


def _make(
    strategy: ShardingStrategy, process_group: Any, device_mesh: DeviceMesh | None, device_type: str
) -> DeviceMesh:
    """Return the mesh of a strategy, from FSDP1's process groups or mesh. Collective."""
    if strategy is ShardingStrategy.NO_SHARD:  # as many copies as ranks: a replicate axis of all, a shard axis of one
        group = process_group if device_mesh is None else device_mesh.get_group(0)
        if group is None or group is dist.group.WORLD:
            return mesh_of_sizes(device_type, {"replicate": dist.get_world_size(), "shard": 1})
        alone: Any = dist.new_group([dist.get_rank()], use_local_synchronization=True, group_desc="mesh_shard")
        ranks = torch.tensor(dist.get_process_group_ranks(group), dtype=torch.int, device="cpu").view(-1, 1)
        return DeviceMesh.from_group([group, alone], device_type, mesh=ranks, mesh_dim_names=_AXES)
    if device_mesh is not None:
        if strategy.name not in HYBRID or device_mesh.mesh_dim_names is not None:
            return device_mesh
        # FSDP1 took a mesh without names, FSDP2 tells the axes by theirs.
        groups = [device_mesh.get_group(axis) for axis in range(2)]
        return DeviceMesh.from_group(groups, device_mesh.device_type, mesh=device_mesh.mesh, mesh_dim_names=_AXES)
    if strategy.name in HYBRID and process_group is not None:  # (shard, replicate): rows that shard, columns of copies
        shard, replicate = process_group
        ranks = torch.tensor(
            gather_objects(dist.get_process_group_ranks(shard), group=replicate), dtype=torch.int, device="cpu"
        )
        return DeviceMesh.from_group([replicate, shard], device_type, mesh=ranks, mesh_dim_names=_AXES)
    if strategy.name in HYBRID:
        return _by_machine(device_type)
    if process_group is None or process_group is dist.group.WORLD:
        return mesh_of_sizes(device_type, {"shard": dist.get_world_size()})
    return DeviceMesh.from_group(process_group, device_type, mesh_dim_names=("shard",))


def _by_machine(device_type: str) -> DeviceMesh:
    """Shard within a machine, replicate between machines: what FSDP1 does when nothing is said."""
    num_ranks, num_local = dist.get_world_size(), ranks_per_machine()
    if num_local is None:
        raise WrongArgument(
            f"{num_ranks} ranks are spread unevenly over the machines",
            where="FullyShardedDataParallel(sharding_strategy=HYBRID_SHARD)",
            why="every machine holds one copy, spread over its ranks",
            fix="start the same number of ranks on every machine, or pass device_mesh=",
        )
    return mesh_of_sizes(device_type, {"replicate": num_ranks // num_local, "shard": num_local})


_TORCHS = compat.default_comm_hooks()
_COMPRESS = {_TORCHS.fp16_compress_hook: torch.float16, _TORCHS.bf16_compress_hook: torch.bfloat16}
_AS_EVER = (_TORCHS.allreduce_hook, _TORCHS.reduce_scatter_hook)


class HookedReduceScatter:
    """Lets a hook of FSDP1 do a unit's reduction: `hook(state, whole gradient, this rank's part)`."""

    def __init__(self, state: object, hook: Callable[..., None]) -> None:
        self.state, self.hook = state, hook

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for a gradient."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce; the hook divides, as FSDP1's hooks do."""
        self.hook(self.state, input_tensor, output_tensor)


def register(units: Sequence[Any], state: object, hook: Callable[..., None]) -> None:
    """Register a hook of FSDP1 for every unit of a model: torch's own, or one with the signature for sharding."""
    refused = partial(_refused, "register_comm_hook")
    if not callable(hook):
        raise refused(f"the hook is {hook!r}", "it is called with every gradient", "pass a function")
    for unit in units:
        what = f"the strategy is {unit.sharding_strategy.name}"
        if unit.sharding_strategy.name in HYBRID:
            fix = "use MixedPrecision(reduce_dtype=...) to send fewer bytes"
            raise refused(what, "FSDP1 has no hooks for it either", fix)
        if unit.sharding_strategy is ShardingStrategy.NO_SHARD and hook not in (*_COMPRESS, *_AS_EVER):
            fix = "use DistributedDataParallel, whose hooks do that"
            raise refused(what, "FSDP2 reduces between copies by itself", fix)
        if unit.has_comm_hook:
            raise refused("a hook is registered already", "a gradient is reduced once", "register one")
    for unit in units:
        unit.has_comm_hook = True
        groups = compat.groups_of(unit)
        if hook in _COMPRESS:
            for group in groups:
                compat.set_reduce_dtype(group, _COMPRESS[hook])
        elif hook not in _AS_EVER and groups:
            unit.set_custom_reduce_scatter(HookedReduceScatter(state, hook))
            # FSDP2 must neither divide before nor after: the hook does.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)


_SYNCED = "_shardwise_synced"


def initialise_unit(
    module: nn.Module,
    device: torch.device,
    apart: set[nn.Module],
    ignored: set[nn.Parameter],
    param_init_fn: Callable[[nn.Module], None] | None,
) -> None:
    """Give what is on the meta device its values, as FSDP1 does: the whole unit, on every rank.

    Modules that are `apart` belong to other units, or are ignored. `param_init_fn` is called with each module, outer
    ones first; else `reset_parameters` is. Ranks draw the same values only if their random streams are alike.
    """
    modules = _modules_of(module, apart)
    on_meta = any(
        tensor.is_meta
        for owner in modules
        for tensor in (*owner.parameters(recurse=False), *owner.buffers(recurse=False))
        if tensor not in ignored
    )
    if not on_meta:
        return
    places = [(owner, name, p) for owner in modules for name, p in owner._parameters.items() if p is not None]
    if param_init_fn is not None and not callable(param_init_fn):
        raise WrongArgument(
            f"param_init_fn is {param_init_fn!r}",
            where="FullyShardedDataParallel(param_init_fn=)",
            why="it is called with each module on the meta device",
            fix="pass a function, or None for reset_parameters",
        )
    if param_init_fn is not None:
        for owner in modules:
            param_init_fn(owner)
    else:
        with torch.no_grad():
            for owner in modules:
                if any(True for _ in (*owner.parameters(recurse=False), *owner.buffers(recurse=False))):
                    _reset(owner, device)
    made: dict[nn.Parameter, Any] = {}
    for owner, name, old in places:  # `to_empty` makes a parameter for each name of a tied one
        owner._parameters[name] = made.setdefault(old, owner._parameters[name])


def _reset(owner: nn.Module, device: torch.device) -> None:
    reset = getattr(owner, "reset_parameters", None)
    if not callable(reset):
        raise ShardError(
            f"{type(owner).__name__} is on the meta device and has no reset_parameters()",
            where="FullyShardedDataParallel(param_init_fn=None)",
            why="it gives a module on meta its values, unless param_init_fn does",
            fix=f"define {type(owner).__name__}.reset_parameters, or pass param_init_fn=",
        )
    owner.to_empty(device=device, recurse=False)
    reset()


def _modules_of(module: nn.Module, apart: set[nn.Module]) -> list[nn.Module]:
    """The modules of a unit, breadth first: the order in which FSDP1 initialises them."""
    found = {module: None}
    level = [module]
    while level:
        level = [child for owner in level for child in owner.children() if child not in apart and child not in found]
        level = list(dict.fromkeys(level))
        found.update(dict.fromkeys(level))
    return list(found)


def sync_from_first_rank(
    module: nn.Module, parameters: Iterable[nn.Parameter], mesh: DeviceMesh, device: torch.device
) -> None:
    """`sync_module_states`: every rank gets the first rank's parameters of this unit, and its buffers. Collective.

    FSDP1 needs an accelerator for it; here the CPU serves too.
    """
    tensors: list[torch.Tensor] = []
    for buffer in module.buffers():
        if not getattr(buffer, _SYNCED, False):  # a nested unit may have sent it
            setattr(buffer, _SYNCED, True)
            tensors.append(buffer)
    tensors += parameters
    for tensor in tensors:
        if tensor.device != device:
            tensor.data = tensor.data.to(device)
        # Between the copies first: a copy's own first rank must hold the values before it hands them on.
        broadcast_from_first(tensor.data, mesh, range(mesh.ndim))


def plan_of(root: Any) -> Plan:
    """The plan that the units of `root` carry out, under the names of the model that was wrapped."""
    reshard(root)
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in nn.Module.named_parameters(root, remove_duplicate=False):
        names.setdefault(parameter, []).append(clean_name(name))
    paths = {module: clean_name(path) for path, module in root.named_modules()}
    inner_first = sorted(units_in(root), key=lambda unit: paths[unit].count(".") + bool(paths[unit]), reverse=True)
    groups = [_group(unit, paths[unit], names, is_root=unit is root) for unit in inner_first]
    ignored = [parameter for parameter in names if not isinstance(parameter, DTensor)]
    return Plan(
        model=type(root.module).__name__,
        device=root.compute_device.type,
        axes=tuple(zip(root.mesh.mesh_dim_names or ("shard",), root.mesh.shape, strict=True)),
        groups=tuple(group for group in groups if group is not None),
        ignored=tuple(_parameter(parameter, names[parameter], "ignore", "ignored by FSDP1") for parameter in ignored),
        reasons=(f"FSDP1's {root.sharding_strategy.name}, carried out by FSDP2",),
    )


def _group(unit: Any, path: str, names: dict[nn.Parameter, list[str]], *, is_root: bool = False) -> Group | None:
    sharded = compat.groups_of(unit)
    parameters = tuple(
        _parameter(parameter, names[parameter]) for group in sharded for parameter in compat.sharded_parameters(group)
    )
    if not parameters and not is_root:
        return None
    precision = unit.mixed_precision
    keeps = is_root or unit.sharding_strategy.name in KEEPS_UNSHARDED
    reduce_dtype = precision.reduce_dtype or precision.param_dtype
    return Group(
        modules=(path,),
        kind="root" if is_root else "block",
        parameters=parameters,
        param_dtype=None if precision.param_dtype is None else dtype_name(precision.param_dtype),
        reduce_dtype=None if reduce_dtype is None else dtype_name(reduce_dtype),
        cast_inputs=precision.cast_root_forward_inputs if is_root else precision.cast_forward_inputs,
        reshard_after_forward=not keeps,
        offload=unit.cpu_offload.offload_params,
        reason="remaining parameters" if is_root else f"{type(unit.module).__name__}, wrapped as a unit",
    )


def _parameter(
    parameter: nn.Parameter, names: list[str], placement: str = "shard", reason: str = ""
) -> PlannedParameter:
    return PlannedParameter(
        fqn=names[0],
        aliases=tuple(names[1:]),
        shape=tuple(parameter.shape),
        dtype=dtype_name(parameter.dtype),
        trainable=parameter.requires_grad,
        placement=placement,  # pyrefly: ignore[bad-argument-type]
        reason=reason,
    )


class UnitForwardHooks(ForwardHooks):
    """The entry of one `FullyShardedDataParallel`. Which unit is the root is known at the first forward only."""

    def __init__(self, unit: Any) -> None:
        self.unit = unit
        self.outside: OutsideUse | None = None  # of the root
        super().__init__(unit, unit, Casts(None, None))
        watch_backward()
        for group in compat.groups_of(unit):
            compat.around_post_backward(group, lambda group=group: _fill_unused(group))

    @property
    def is_root(self) -> bool:
        """Whether no unit further up works with this one."""
        return compat.is_root(self.module) is not False

    def enter(self, args: Any, kwargs: Any) -> Any:
        """Cast as FSDP1 does: at the root unless told otherwise, elsewhere only if told so."""
        # A step that raised in backward is forgotten before the next begins.
        if self.is_root and compat.was_left_midway(self.module):
            recover(self.module)
        compat.initialise(self.module)
        if self.is_root:
            self.unit.prepare_as_root()
        self._choose_precision()
        precision: MixedPrecision = self.unit.mixed_precision
        asked = self.is_root and precision.cast_root_forward_inputs
        asked = asked or (precision.cast_forward_inputs and self.unit._has_params)
        asked = asked and not self.unit.is_full_precision
        self._call.casts = Casts(precision.param_dtype if asked else None, None)
        if self.outside is None:
            return super().enter(args, kwargs)
        self.outside.end()
        if compat.in_backward():
            return super().enter(args, kwargs)
        self.outside.reshard_used()
        entered = super().enter(args, kwargs)
        self.outside.begin_forward()
        return entered

    def _choose_precision(self) -> None:
        """Compute in full precision in eval mode where `FSDP_USE_FULL_PREC_IN_EVAL` is set."""
        unit = self.unit
        is_full = unit.is_full_precision_in_eval and not unit._fsdp_wrapped_module.training
        if is_full != unit.is_full_precision:
            unit.is_full_precision = is_full
            for group in compat.groups_of(unit):
                compat.toggle_full_precision(group)
            cast_buffers(units_in(unit))

    def after(self, output: Any) -> None:
        """Without a backward to follow, show shards again: an optimizer or a state dict may come next."""
        if self.is_root and not torch.is_grad_enabled() and not compat.in_backward():
            for group in compat.param_groups(self.module):
                if compat.is_unsharded(group):
                    compat.reshard_group(group)
        if self.outside is not None and not compat.in_backward():
            self.outside.begin()

    def failed(self) -> None:
        """Reshard, so that the next call works."""
        if self.outside is not None:
            self.outside.end()
        if self.is_root and not compat.in_backward():
            abandon_pass(self.module)

    def _enter_call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return None if self.unit.is_summoned else super()._enter_call(module, args, kwargs)

    def _leave_call(self, module: nn.Module, args: Any, output: Any) -> Any:
        return None if self.unit.is_summoned else super()._leave_call(module, args, output)


def _fill_unused(group: Any) -> None:
    """A flat parameter has one gradient, with zeros where a part of it was not used; so have the parts here."""
    if compat.is_in_backward(group):
        for param in compat.parameter_records([group]):
            compat.fill_unused_gradient(group, param)
