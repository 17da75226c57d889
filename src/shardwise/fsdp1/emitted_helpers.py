"""Functions that the codemod copies into rewritten programs: what FSDP1 did and `fully_shard` leaves to its caller.

`codemod.draft` reads this file as text. A parameter that a program does not need is left out, together with the
`if` statements that test it; those have no `else`, and each optional parameter has a line of its own.
"""

import contextlib
import dataclasses
import functools
import gc
import types
import weakref

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map

import shardwise as sw


def _shard_units(
    module,
    policy=None,
    *,
    mesh=None,
    mp_policy=None,
    cast_unit_inputs=False,
    in_full=(torch.nn.modules.batchnorm._BatchNorm,),
    buffer_dtype=None,
    ignored=None,
    param_init_fn=None,
    sync_from_rank0=False,
    is_part=False,
    use_orig_params=False,
    **options,
):
    """Call fully_shard on the modules that an FSDP1 auto_wrap_policy picks, children first, then on the root."""
    units, left_out, cast_before, classes_in_full = [], set(), set(), ()
    before, outside = {}, {}
    if use_orig_params:
        before = {name: (weakref.ref(one), vars(one)) for name, one in module.named_parameters()}
    if ignored:
        ignored = list(ignored)
        left_out = {inner for one in ignored if isinstance(one, torch.nn.Module) for inner in one.modules()}
        options["ignored_params"] = {p for one in left_out for p in one.parameters(recurse=False)}
        options["ignored_params"] |= {one for one in ignored if isinstance(one, torch.nn.Parameter)}
    if buffer_dtype:
        earlier = [one for one in module.modules() if isinstance(one, FSDPModule)]
        cast_before = {inner for unit in earlier for inner in unit.modules()}
    if policy:
        if mp_policy:
            classes_in_full = tuple(in_full) if mp_policy.param_dtype else ()
            policy = functools.partial(_is_unit, policy, classes_in_full)
        _pick_units(module, policy, units, left_out)
        recomputed = [one for one in module.modules() if hasattr(one, "_checkpoint_wrapped_module")]
        outside = {one._checkpoint_wrapped_module: one for one in recomputed}  # recomputed inside, sharded outside
        units = [one for one in units if outside.get(one) is not module]
    if is_part and mp_policy and mp_policy.cast_forward_inputs and not cast_unit_inputs:
        _cast_inputs(module, mp_policy.param_dtype)
        mp_policy = dataclasses.replace(mp_policy, cast_forward_inputs=False)
    for unit in [*units, module]:
        if param_init_fn or any(one.is_meta for one in [*unit.parameters(), *unit.buffers()]):
            _materialize(unit, param_init_fn, mesh, left_out)
        if sync_from_rank0:
            mesh = mesh or _mesh()
            _broadcast(unit, mesh, left_out)
        if mp_policy:
            options["mp_policy"] = mp_policy
            if isinstance(unit, classes_in_full):
                full = MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=mp_policy.param_dtype)
                options["mp_policy"] = full
            elif unit is not module and not cast_unit_inputs:  # FSDP1 casts the inputs of the root only
                options["mp_policy"] = dataclasses.replace(mp_policy, cast_forward_inputs=False)
        fully_shard(unit if unit is module else outside.get(unit, unit), mesh=mesh, **options)
    if buffer_dtype:
        skipped = cast_before | left_out | {one for one in module.modules() if isinstance(one, classes_in_full)}
        _cast_buffers([one for one in module.modules() if one not in skipped], buffer_dtype)
    if use_orig_params:
        _keep_parameters(module, before)
    return module


def _is_unit(policy, classes_in_full, module, **facts):
    """The answer of an FSDP1 policy, and yes for modules left out of mixed precision, which FSDP1 looks for in all."""
    return facts["recurse"] or policy(module=module, **facts) or isinstance(module, classes_in_full)


def _pick_units(module, policy, units, left_out, is_root=True):
    """Ask an FSDP1 auto_wrap_policy about every module below; return how many elements are in units."""
    skipped = {p for one in left_out for p in one.parameters(recurse=False)}
    numel = sum(p.numel() for p in module.parameters() if p not in skipped)
    if not policy(module=module, recurse=True, nonwrapped_numel=numel):
        return 0
    children = [child for child in module.children() if child not in left_out]
    inside = sum(_pick_units(child, policy, units, left_out, False) for child in children)
    picked = policy(module=module, recurse=False, nonwrapped_numel=numel - inside)
    if is_root or module in units or not picked:
        return inside
    units.append(module)
    return numel


def _own_modules(unit, left_out):
    """The modules of a unit, without those of the units inside it."""
    found = [unit]
    for child in unit.children():
        if not isinstance(child, FSDPModule) and child not in left_out:
            found += _own_modules(child, left_out)
    return found


def _materialize(unit, param_init_fn, mesh, left_out):
    """Give a unit on the meta device storage and values, as FSDP1 did."""
    modules = _own_modules(unit, left_out)
    tensors = {one: [*one.parameters(recurse=False), *one.buffers(recurse=False)] for one in modules}
    if not any(tensor.is_meta for own in tensors.values() for tensor in own):
        return
    with torch.no_grad():
        for one, own in tensors.items():
            if param_init_fn is not None:
                param_init_fn(one)
            elif own:
                one.to_empty(device=_device_of(mesh), recurse=False)
                one.reset_parameters()


def _broadcast(unit, mesh, left_out):
    """Give every rank the values of the mesh's first rank, as sync_module_states did."""
    for one in _own_modules(unit, left_out):
        for tensor in [*one.parameters(recurse=False), *one.buffers(recurse=False)]:
            value = tensor.data.to(_device_of(mesh)).contiguous()
            for group in reversed(mesh.get_all_groups()):
                dist.broadcast(value, group=group, group_src=0)
            tensor.data.copy_(value)


def _device_of(mesh):
    """The device on which this rank keeps its part of a mesh; without a mesh, the current device."""
    kind = mesh.device_type if mesh else _device_type()
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, torch.get_device_module(kind).current_device())


def _device_type():
    """The accelerator's type, or cpu."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator.type if accelerator and torch.accelerator.is_available() else "cpu"


def _mesh(
    strategy=None,
    process_group=None,
    device_mesh=None,
    device_id=None,
):
    """The mesh that FSDP1 would shard over: (shard) or (replicate, shard)."""
    kind = _device_type()
    if device_id is not None:
        device = torch.device(device_id)
        kind = device.type
        if kind != "cpu" and device.index is not None:
            torch.get_device_module(kind).set_device(device.index)  # fully_shard uses the current device
    if strategy not in (None, ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
        return _replicating_mesh(strategy, kind, process_group, device_mesh)
    if device_mesh is not None and device_mesh.ndim > 1:
        return DeviceMesh.from_group(device_mesh.get_group(0), device_mesh.device_type)
    if device_mesh is not None:
        return device_mesh
    if process_group is not None:
        return DeviceMesh.from_group(process_group, kind)
    return DeviceMesh.from_group(dist.group.WORLD, kind)


def _replicating_mesh(strategy, kind, process_group, device_mesh):
    """The (replicate, shard) mesh of HYBRID_SHARD, and of NO_SHARD, whose shard axis has one rank."""
    axes = ("replicate", "shard")
    world = dist.get_world_size()
    kind = device_mesh.device_type if device_mesh else kind
    if strategy == ShardingStrategy.NO_SHARD:
        if (device_mesh.size() if device_mesh else dist.get_world_size(process_group)) != world:
            raise ValueError("NO_SHARD over some of the ranks: use DistributedDataParallel with their group")
        return init_device_mesh(kind, (world, 1), mesh_dim_names=axes)
    if device_mesh and device_mesh.ndim != 2:
        raise ValueError(f"{strategy} needs a mesh of two axes, replicate and shard")
    if device_mesh:
        return device_mesh if device_mesh.mesh_dim_names else DeviceMesh(kind, device_mesh.mesh, mesh_dim_names=axes)
    if process_group:
        shard, replicate = process_group
        rows = [None] * dist.get_world_size(replicate)
        dist.all_gather_object(rows, dist.get_process_group_ranks(shard), group=replicate)
        return DeviceMesh.from_group([replicate, shard], kind, mesh=rows, mesh_dim_names=axes)
    per_node = torch.get_device_module(kind).device_count()
    return init_device_mesh(kind, (world // per_node, per_node), mesh_dim_names=axes)


def _placement(strategy=None, **where):
    """FSDP1's sharding strategy and groups, as fully_shard's arguments."""
    if strategy is not None and not isinstance(strategy, ShardingStrategy):
        raise ValueError(f"{strategy!r} is no ShardingStrategy")
    keeps = (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2, ShardingStrategy.NO_SHARD)
    return {"mesh": _mesh(strategy, **where), "reshard_after_forward": False if strategy in keeps else None}


def _precision(mixed_precision, is_root=True):
    """FSDP1's MixedPrecision, as _shard_units' arguments."""
    if mixed_precision is None:
        return {}
    if mixed_precision.keep_low_precision_grads:
        raise ValueError("fully_shard keeps gradients in the dtype of the parameters: no keep_low_precision_grads")
    casts_inputs = (is_root and mixed_precision.cast_root_forward_inputs) or mixed_precision.cast_forward_inputs
    policy = MixedPrecisionPolicy(
        param_dtype=mixed_precision.param_dtype,
        reduce_dtype=mixed_precision.reduce_dtype or mixed_precision.param_dtype,
        cast_forward_inputs=casts_inputs,
    )
    return {
        "mp_policy": policy,
        "buffer_dtype": mixed_precision.buffer_dtype,
        "cast_unit_inputs": mixed_precision.cast_forward_inputs,
        "in_full": mixed_precision._module_classes_to_ignore or (),
    }


def _offload_policy(cpu_offload):
    """FSDP1's CPUOffload, as FSDP2's policy."""
    return CPUOffloadPolicy() if cpu_offload and cpu_offload.offload_params else OffloadPolicy()


def _cast_buffers(modules, dtype):
    """Compute with buffers of a dtype, but save them in their own, as FSDP1 did."""
    for one in modules:
        own = {name: buffer.dtype for name, buffer in one._buffers.items() if buffer is not None}
        own = {name: before for name, before in own.items() if before.is_floating_point}
        for name in own:
            one._buffers[name].data = one._buffers[name].data.to(dtype)

        def restore(module, state, prefix, metadata, own=own):
            for name, before in own.items():
                if prefix + name in state:
                    state[prefix + name] = state[prefix + name].to(before)

        if own:
            one.register_state_dict_post_hook(restore)


def _fully_shard_like_fsdp1(
    module,
    process_group=None,
    sharding_strategy=None,
    cpu_offload=None,
    auto_wrap_policy=None,
    backward_prefetch=None,
    mixed_precision=None,
    ignored_modules=None,
    param_init_fn=None,
    device_id=None,
    sync_module_states=False,
    forward_prefetch=False,
    limit_all_gathers=True,
    use_orig_params=False,
    ignored_states=None,
    device_mesh=None,
):
    """fully_shard for settings that arrive at run time under FSDP1's names; it prefetches in its own way."""
    return _shard_units(
        module,
        auto_wrap_policy,
        **_placement(sharding_strategy, process_group=process_group, device_mesh=device_mesh, device_id=device_id),
        **_precision(mixed_precision),
        offload_policy=_offload_policy(cpu_offload),
        ignored=ignored_modules or ignored_states,
        param_init_fn=param_init_fn,
        sync_from_rank0=sync_module_states,
        is_part=True,
        use_orig_params=True,
    )


def _keep_parameters(module, before):
    """New parameters have the attributes of the old ones, and optimizers built before find them."""
    held = False
    for name, parameter in module.named_parameters():
        old, attributes = before[name][0](), before[name][1]
        if old is not parameter:
            vars(parameter).update(attributes)
            if old is not None:
                old.sharded_as, held = parameter, True

    def repoint(optimizer, *rest):
        for group in optimizer.param_groups:
            if any(hasattr(parameter, "sharded_as") for parameter in group["params"]):
                if any(parameter in optimizer.state for parameter in group["params"]):
                    raise RuntimeError("the optimizer has the state of whole parameters: load it after sharding")
                group["params"] = [getattr(parameter, "sharded_as", parameter) for parameter in group["params"]]

    def repoint_all(*rest):
        first_forward.remove()
        for one in gc.get_objects():
            if issubclass(type(one), torch.optim.Optimizer):
                repoint(one)

    if held:
        first_forward = module.register_forward_pre_hook(repoint_all)
        register_optimizer_step_pre_hook(repoint)


def _cast_inputs(module, dtype):
    """Cast the inputs of the outermost of the modules that are given here one by one, as FSDP1 did."""
    for inner in module.modules():
        if "casts_inputs" in vars(inner):
            vars(inner).pop("casts_inputs").remove()

    def cast(value):
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    def cast_all(module, args, kwargs):
        return tree_map(cast, args), tree_map(cast, kwargs)

    if dtype:
        vars(module)["casts_inputs"] = module.register_forward_pre_hook(cast_all, with_kwargs=True)


class _ShardedWrapper(ActivationWrapper):
    """What subclasses of FSDP1's class inherit from: a module inside, sharded together with this one."""

    def __init__(self, module, *args, **settings):
        super().__init__(module)
        _fully_shard_like_fsdp1(self, *args, **settings)

    @property
    def module(self):
        return self._checkpoint_wrapped_module

    def forward(self, *args, **kwargs):
        return self._checkpoint_wrapped_module(*args, **kwargs)

    def state_dict(self, *args, **kwargs):
        state = super().state_dict(*args, **kwargs)
        return {key: one.full_tensor() if isinstance(one, DTensor) else one for key, one in state.items()}

    def load_state_dict(self, state_dict, *args, **kwargs):
        own, state = super().state_dict(), dict(state_dict)
        for key, one in own.items():
            if isinstance(one, DTensor) and key in state and not isinstance(state[key], DTensor):
                state[key] = distribute_tensor(state[key].to(one.device), one.device_mesh, one.placements)
        return super().load_state_dict(state, *args, **kwargs)


def _sw_shard(
    module,
    policy=None,
    *,
    mesh=None,
    reshard_after_forward=None,
    mp_policy=None,
    cast_unit_inputs=False,
    in_full=(torch.nn.modules.batchnorm._BatchNorm,),
    buffer_dtype=None,
    offload_policy=None,
    sync_from_rank0=False,
):
    """Make a group of each module that an FSDP1 auto_wrap_policy picks, and one of the rest."""
    mesh = mesh or _mesh()
    units, overrides, classes_in_full = [], [], ()
    if sync_from_rank0:
        _broadcast(module, mesh, set())
    if policy:
        if mp_policy:
            classes_in_full = tuple(in_full) if mp_policy.param_dtype else ()
            policy = functools.partial(_is_unit, policy, classes_in_full)
        _pick_units(module, policy, units, set())
    recomputed = [one for one in module.modules() if hasattr(one, "_checkpoint_wrapped_module")]
    outside = {one._checkpoint_wrapped_module: one for one in recomputed}  # recomputed inside, sharded outside
    units = [outside.get(unit, unit) for unit in units]
    precision = sw.PrecisionConfig(param_dtype="storage", reduce_dtype="storage")
    if mp_policy:
        for name, one in module.named_modules():
            if one in units and isinstance(one, classes_in_full):
                output = str(mp_policy.param_dtype).removeprefix("torch.")
                full = {"param_dtype": "float32", "reduce_dtype": "float32", "cast_inputs": True}
                overrides.append(sw.GroupOverride(pattern=name, output_dtype=output, **full))
            elif one in units and not cast_unit_inputs:  # FSDP1 casts the inputs of the root only
                overrides.append(sw.GroupOverride(pattern=name, cast_inputs=False))
        dtypes = {"param_dtype": mp_policy.param_dtype, "reduce_dtype": mp_policy.reduce_dtype}
        precision = sw.PrecisionConfig(
            **{key: str(value or "storage").removeprefix("torch.") for key, value in dtypes.items()},
            cast_inputs=mp_policy.cast_forward_inputs,
        )
    config = sw.ShardConfig(
        group_by="auto" if units else "root",
        wrap_if=(lambda one: one in units) if units else None,
        precision=precision,
        overrides=tuple(overrides),
        reshard_after_forward=reshard_after_forward,
        offload=isinstance(offload_policy, CPUOffloadPolicy),
    )
    sw.shard(module, config, mesh=mesh)
    if buffer_dtype:
        _cast_buffers([one for one in module.modules() if not isinstance(one, classes_in_full)], buffer_dtype)
    return module


def _clip_grad_norm(parameters, max_norm, norm_type=2.0, **options):
    """Clip by the norm over all ranks, taken in float32, and return it as a plain tensor; some may be whole."""
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    by_mesh = {}
    for one in parameters:
        if one.grad is not None:
            by_mesh.setdefault(getattr(one.grad, "device_mesh", None), []).append(one)
    gradients = [[one.grad for one in some] for some in by_mesh.values()]
    norms = []
    for some in gradients:
        wide = [torch.promote_types(one.dtype, torch.float32) for one in some]
        own = [torch.linalg.vector_norm(one, norm_type, dtype=dtype) for one, dtype in zip(some, wide, strict=True)]
        norms.append(torch.nn.utils.get_total_norm(own, norm_type, **options))
    norms = [one.full_tensor() if isinstance(one, DTensor) else one for one in norms]
    norm = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.tensor(0.0)
    for some in by_mesh.values():  # operators on several tensors take DTensors of one mesh, or none
        torch.nn.utils.clip_grads_with_norm_(some, max_norm, norm)
    return norm


class _GradScaler(torch.amp.GradScaler):
    """torch's scaler for gradients of which some may be whole; where one is not finite, all ranks skip the step."""

    def __init__(self, *args, process_group=None, **options):
        super().__init__(*args, **options)
        self.process_group = process_group

    def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
        parameters = [one for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
        local = [one.grad.to_local() if isinstance(one.grad, DTensor) else one.grad for one in parameters]
        stand_ins = [one.detach() for one in local]
        for one, gradient in zip(stand_ins, local, strict=True):
            one.grad = gradient
        all_of_them = types.SimpleNamespace(param_groups=[{"params": stand_ins}])
        found = super()._unscale_grads_(all_of_them, inv_scale, found_inf, True) or {found_inf.device: found_inf}
        for one in found.values():
            dist.all_reduce(one, group=self.process_group)
        return found


@contextlib.contextmanager
def _no_sync(model):
    """Backward passes inside keep their gradients to themselves; the first one after adds them all up."""
    sharded = next(
        (one for one in model.modules() if isinstance(one, FSDPModule)), None
    )  # maybe inside torch.compile's
    if sharded is None:
        with model.no_sync():
            yield
        return
    if getattr(sharded, "is_without_sync", False):  # a block inside of another ends with it
        yield
        return
    sharded.set_requires_gradient_sync(False)
    sharded.is_without_sync = True
    try:
        yield
    finally:
        sharded.set_requires_gradient_sync(True)
        sharded.is_without_sync = False


@contextlib.contextmanager
def _unsharded(model, recurse=True):
    """Units are unsharded, in the dtype they compute in; a forward inside works as always."""
    units = [one for one in model.modules() if isinstance(one, FSDPModule) and (recurse or one is model)]
    for unit in units:
        unit.unshard()
    try:
        yield
    finally:
        for unit in units:
            unit.reshard()


def _reshard(model):
    """Free what the last forward has left unsharded: parameters() and zero_grad() find the shards again."""
    for one in model.modules():
        if isinstance(one, FSDPModule):
            one.reshard()
    return model


@contextlib.contextmanager
def _full_params(module, writeback=True, rank0_only=False, recurse=True):
    """Full, plain parameters stand in place of the sharded ones until the block ends."""
    _reshard(module)
    inner = [one for one in module.modules() if isinstance(one, FSDPModule) and one is not module]
    left_out = set() if recurse else {below for unit in inner for below in unit.modules()}
    full, places = {}, []
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if isinstance(parameter, DTensor) and owner not in left_out:
                if parameter not in full:
                    full[parameter] = torch.nn.Parameter(parameter.detach().full_tensor(), parameter.requires_grad)
                places.append((owner, name, parameter))
    for owner, name, parameter in places:
        owner._parameters[name] = full[parameter]
    try:
        yield
    finally:
        now = {parameter: owner._parameters[name] for owner, name, parameter in places}
        for owner, name, parameter in places:
            owner._parameters[name] = parameter
        for value in full.values():
            if value.requires_grad:
                value.register_hook(_refuse_gradient)
    if writeback:
        with torch.no_grad():
            for parameter, value in now.items():
                for group in reversed(parameter.device_mesh.get_all_groups()) if rank0_only else ():
                    dist.broadcast(value.data, group=group, group_src=0)
                parameter.copy_(distribute_tensor(value.data, parameter.device_mesh, parameter.placements))


def _refuse_gradient(gradient):
    """Say that a gradient would be lost, where FSDP1 found freed parameters."""
    raise RuntimeError("backward of a loss from the full parameters: compute it by calling the sharded module")


def _on_cpu(state):
    """A state dict with every tensor on the CPU."""
    if isinstance(state, torch.Tensor):
        return state.cpu()
    if isinstance(state, dict):
        return {key: _on_cpu(value) for key, value in state.items()}
    return [_on_cpu(value) for value in state] if isinstance(state, list) else state


def _on_rank0(state):
    """A state dict on rank 0, an empty one elsewhere."""
    return state if dist.get_rank() == 0 else {}


def _on_first_rank(model, offload=False):
    """The whole state dict on the first rank of each group that shards the model, an empty one elsewhere."""
    state, is_first = {}, True
    for key, value in get_model_state_dict(model).items():
        if isinstance(value, DTensor):
            is_first = value.device_mesh.get_local_rank(value.device_mesh.ndim - 1) == 0  # the last axis shards
            value = value.to(value.device_mesh.device_type).full_tensor()
        if is_first:
            state[key] = _on_cpu(value) if offload else value
    return state if is_first else {}


def _is_full(kind):
    """Whether an FSDP1 state dict type means whole tensors."""
    if kind == StateDictType.LOCAL_STATE_DICT:
        raise ValueError("LOCAL_STATE_DICT: fully_shard has no flat parameters, use SHARDED_STATE_DICT")
    return kind == StateDictType.FULL_STATE_DICT


def _get_state_dict(get, kind, offload, rank0_only):
    """A state dict as FSDP1's type and config ask for it."""
    if not _is_full(kind):
        return get(StateDictOptions(cpu_offload=offload))
    if offload and rank0_only:
        return get(StateDictOptions(full_state_dict=True, cpu_offload=True))
    state = get(StateDictOptions(full_state_dict=True))
    state = _on_cpu(state) if offload else state
    return _on_rank0(state) if rank0_only else state


def _model_state(model, kind, config=None):
    """What model.state_dict() gave under FSDP1's state_dict_type."""
    offload, rank0_only = getattr(config, "offload_to_cpu", False), getattr(config, "rank0_only", False)
    if rank0_only and _is_full(kind):
        return _on_first_rank(model, offload)
    return _get_state_dict(lambda options: get_model_state_dict(model, options=options), kind, offload, False)


def _load_model_state(model, state, kind, strict=True):
    """What model.load_state_dict(state) did under FSDP1's state_dict_type."""
    return set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=_is_full(kind), strict=strict))


def _optimizer_state(model, optimizer, kind, config=None):
    """What FSDP.optim_state_dict(model, optimizer) gave under FSDP1's state_dict_type; {} before any step."""
    if not optimizer.state:
        return {}
    offload, rank0_only = getattr(config, "offload_to_cpu", True), getattr(config, "rank0_only", False)

    def get(options):
        return get_optimizer_state_dict(_reshard(model), optimizer, options=options)

    return _get_state_dict(get, kind, offload, rank0_only)


def _load_optimizer_state(model, optimizer, state, kind, config=None):
    """Load what FSDP.optim_state_dict_to_load(...) was given under FSDP1's state_dict_type."""
    is_full = _is_full(kind)
    from_rank0 = is_full and getattr(config, "rank0_only", False)
    options = StateDictOptions(full_state_dict=is_full, broadcast_from_rank0=from_rank0)
    set_optimizer_state_dict(model, optimizer, state, options=options)


def _is_sharded(model):
    """Whether a model has DTensors or units of FSDP2; other objects with a state dict have none."""
    parts = (*model.modules(), *model.parameters()) if isinstance(model, torch.nn.Module) else ()
    return any(isinstance(one, (FSDPModule, DTensor)) for one in parts)


def _whole_state(model):
    """model.state_dict() in whole tensors, for sharded models and plain ones."""
    if _is_sharded(model):
        return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return model.state_dict()


def _load_whole_state(model, state, **strict):
    """model.load_state_dict(state) from whole tensors, for sharded models and plain ones."""
    if _is_sharded(model):
        return set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, **strict))
    return model.load_state_dict(state, **strict)


def _load_optimizer(model, optimizer, state, **options):
    """optimizer.load_state_dict(state), for optimizers of sharded models and plain ones."""
    if _is_sharded(model):
        set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(**options))
    else:
        optimizer.load_state_dict(state)


def _read_optimizer_state(model, optimizer, key, storage_reader, planner=None):
    """An optimizer's state from a sharded checkpoint, under the key it was saved by."""
    state = {key: get_optimizer_state_dict(model, optimizer)}
    torch.distributed.checkpoint.load(state, storage_reader=storage_reader, planner=planner)
    return state
