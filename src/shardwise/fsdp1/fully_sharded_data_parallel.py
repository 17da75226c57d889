"""FullyShardedDataParallel on FSDP2."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shardwise import compat
from shardwise.fsdp1 import api, initialising
from shardwise.fsdp1 import units as fsdp1_units
from shardwise.fsdp1.api import *  # noqa: F403  # scripts import FSDP1's settings from this module too
from shardwise.fsdp1.initialising import warn_once
from shardwise.fsdp1.state_dicts import OptimizerStates
from shardwise.fsdp1.units import PREFIX, Unit, WrongArgument, WrongUse, outer_units, refuse_while_running, units_in
from shardwise.planning.plan import Plan
from shardwise.sharding.full_params import find_slots, full_params, reshard
from shardwise.sharding.hooks.gradients import step_in_backward, watch_zero_grad
from shardwise.sharding.hooks.outside import OutsideUse
from shardwise.sharding.hooks.parameter_writes import is_watched, watch_writes
from shardwise.sharding.hooks.watching import watch_by_default
from shardwise.sharding.inventory import local_part, local_tensor
from shardwise.sharding.registry import ShardedState, remember
from shardwise.sharding.repointing import follow, watch_optimizers
from shardwise.training.step import clip_grad_norm_

# Arguments of the constructor that a policy does not hand on to the units below.
_ROOTS_OWN = ("self", "__class__", "module", "auto_wrap_policy", "ignored_modules", "ignored_states")


@contextmanager
def summon(
    module: nn.Module,
    units: Iterable[Any],
    *,
    recurse: bool = False,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """What `FullyShardedDataParallel.summon_full_params` does, for some units of a module.

    A unit that is called inside runs on the whole parameters; one that is not summoned (`recurse=False`) unshards its
    own as ever, so that a wrapped model's `generate` can be called.
    """
    where = "summon_full_params"
    if writeback and rank0_only:
        what, why = "writeback=True and rank0_only=True are given", "the other ranks have nothing to write back"
        raise WrongArgument(what, where=where, why=why, fix="writeback=False, or rank0_only=False")
    if with_grads and offload_to_cpu:
        what, why = "with_grads=True and offload_to_cpu=True are given", "a gradient is where its parameter is"
        raise WrongArgument(what, where=where, why=why, fix="leave one of them out")
    if offload_to_cpu and not rank0_only:
        warn_once("offload_to_cpu=True", "every rank holds the whole model in CPU memory; rank0_only=True spares that")
    refuse_while_running(units_in(module), where)
    reshard(module)
    slots = find_slots(module, recurse)
    grads = {sharded: _whole(sharded.grad) for sharded in slots} if with_grads else {}
    before = {unit: unit.is_summoned for unit in units}
    with full_params(module, writeback=writeback, rank0_only=rank0_only, recurse=recurse):
        shown: dict[nn.Parameter, Any] = {}
        for sharded, ((owner, name), *_) in slots.items():
            shown[sharded] = owner._parameters[name]
            if offload_to_cpu and not shown[sharded].is_meta:
                shown[sharded].data = shown[sharded].data.cpu()
            if with_grads and not shown[sharded].is_meta:
                shown[sharded].grad = grads[sharded]
        for unit in before:
            unit.is_summoned = True
        try:
            yield
            if writeback and with_grads:
                for sharded, ((owner, name), *_) in slots.items():
                    _write_gradient(sharded, owner._parameters[name].grad)  # pyrefly: ignore[missing-attribute]
        finally:
            for unit, was_summoned in before.items():
                unit.is_summoned = was_summoned


def _whole(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return the full value of a tensor. Collective if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _write_gradient(sharded: nn.Parameter, whole: torch.Tensor | None) -> None:
    if sharded.grad is None or whole is None:
        sharded.grad = None if whole is None else sharded.grad
    elif whole is not sharded.grad:
        local_tensor(sharded.grad).copy_(local_part(whole, sharded.grad))


def _check_module(module: nn.Module) -> None:
    """Raise if a module is sharded already, or holds a unit that has run; warn about one that cannot be called."""
    where = f"FullyShardedDataParallel({type(module).__name__})"
    nested = units_in(module)
    if any(compat.is_root(unit) for unit in nested):
        raise WrongUse(
            "a unit inside has already been run, or summoned, as a root of its own",
            where=where,
            why="which unit is the root is settled by the first forward",
            fix="wrap the whole model before the first forward, summon_full_params or clip_grad_norm_",
        )
    inside = {parameter for unit in nested for parameter in unit.parameters()}
    if any(is_watched(parameter) for parameter in module.parameters() if parameter not in inside):
        raise WrongUse(
            "its parameters are sharded already",
            where=where,
            why="a module is wrapped once",
            fix="use the unit that wraps it, or wrap another copy: copy.deepcopy(module) before",
        )
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        warn_once(type(module).__name__, "it has no forward, so its parameters are never gathered: wrap what is in it")


class FullyShardedDataParallel(OptimizerStates):
    """A module whose parameters are sharded over ranks, with FSDP1's constructor, methods and names.

    Args:
        module: To be wrapped; units inside it stay units of their own.
        process_group: Ranks to shard over; for hybrid strategies the pair (shard, replicate).
        sharding_strategy: FULL_SHARD unless given. NO_SHARD keeps a copy on every rank.
        cpu_offload: Keep shards, gradients and optimizer state in CPU memory.
        auto_wrap_policy: Which modules below become units first.
        backward_prefetch: FSDP2 always does BACKWARD_PRE.
        mixed_precision: As in FSDP1: root inputs are cast, BatchNorm is exempt under a policy, gradients are summed
            in `param_dtype` unless `reduce_dtype` says otherwise.
        ignored_modules: Left as they are. Their gradients are yours to average, as in FSDP1.
        param_init_fn: Gives modules on the meta device their values.
        device_id: Where to compute.
        sync_module_states: Every rank gets rank 0's values.
        forward_prefetch: FSDP2 gathers ahead by itself.
        limit_all_gathers: FSDP2 always does.
        use_orig_params: Parameters are always the original ones.
        ignored_states: Parameters or modules to ignore.
        device_mesh: `(shard)`, or `(replicate, shard)` for hybrid strategies.

    Raises:
        ConfigError: Arguments contradict each other.
        PlanError: The mesh has an axis of tensor parallelism or its like.
        ShardError: The module cannot be wrapped.
        EnvironmentProblem: The installed torch lacks something that sharding needs.

    Ranks:
        Collective: wrap on every rank, in the same order.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: api.ShardingStrategy | None = None,
        cpu_offload: api.CPUOffload | None = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: api.BackwardPrefetch | None = api.BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: api.MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name not in _ROOTS_OWN}
        super().__init__()
        compat.check_torch()
        _check_module(module)
        given = initialising.read_settings(sharding_strategy, cpu_offload, backward_prefetch, mixed_precision)
        ignored = initialising.find_ignored(module, ignored_modules, ignored_states, units_in(module))
        self._ignored_modules, self._ignored_params = ignored.modules, ignored.parameters
        # pyrefly takes torch.device, a callable, for a method
        self.compute_device = initialising.find_device(device_id, device_mesh, module)  # pyrefly: ignore[read-only]
        self.mesh = initialising.find_mesh(given.strategy, process_group, device_mesh, self.compute_device.type)
        self._take_settings(given, use_orig_params)
        self.backward_prefetch, self.forward_prefetch = backward_prefetch, forward_prefetch
        self.limit_all_gathers = limit_all_gathers
        if auto_wrap_policy is not None:
            arguments["ignored_states"] = self._ignored_params
            initialising.auto_wrap(module, auto_wrap_policy, ignored, arguments, FullyShardedDataParallel)
        apart = self._ignored_modules.union(units_in(module))
        initialising.initialise_unit(module, self.compute_device, apart, self._ignored_params, param_init_fn)
        self._fsdp_wrapped_module = module
        if sync_module_states:
            own = [parameter for parameter in find_slots(module, False) if parameter not in self._ignored_params]
            initialising.sync_from_first_rank(module, own, self.mesh, self.compute_device)
        self._shard(given)

    def _take_settings(self, given: initialising.Settings, use_orig_params: bool) -> None:
        """Show the settings under FSDP1's names, and start with FULL state dicts as it does."""
        self.sharding_strategy, self.mixed_precision = given.strategy, given.precision
        self.cpu_offload = api.CPUOffload(offload_params=given.offload)
        axis = 0 if given.strategy is api.ShardingStrategy.NO_SHARD else self.mesh.ndim - 1
        self.process_group = self.mesh.get_group(axis)
        self.rank, self.world_size = self.process_group.rank(), self.process_group.size()
        self._use_orig_params = use_orig_params
        self.is_summoned = self.has_comm_hook = self._is_prepared = self.is_full_precision = False
        self.is_full_precision_in_eval = os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL") == "1"
        self._state_dict_type = api.StateDictType.FULL_STATE_DICT
        self._state_dict_config, self._optim_state_dict_config = (
            api.FullStateDictConfig(),
            api.FullOptimStateDictConfig(),
        )
        self.register_load_state_dict_post_hook(self._clean_missing)

    def _shard(self, given: initialising.Settings) -> None:
        places = find_slots(self, recurse=True)
        fully_shard(self, mesh=self.mesh, ignored_params=self._ignored_params, **given.options)
        # FSDP2 gives the object a class of its own; scripts, printed models and messages know the old name.
        type(self).__name__ = type(self).__name__.removeprefix("FSDP")
        self.forward_hooks = initialising.UnitForwardHooks(self)
        compat.patch_accumulation(self)
        watch_writes(self)
        watch_optimizers(self, {old: owners[0][0]._parameters[owners[0][1]] for old, owners in places.items()})
        for old, ((module, name, *_), *_) in places.items():
            if module._parameters[name] is not old:
                follow(old, module, name)

    @property
    def module(self) -> nn.Module:
        """The module that was wrapped, activation checkpointing taken off."""
        wrapped = self._fsdp_wrapped_module
        return getattr(wrapped, "_checkpoint_wrapped_module", wrapped)

    @property
    def plan(self) -> Plan:
        """What the units do, as a plan: `print(model.plan)`."""
        return initialising.plan_of(self)

    @property
    def _has_params(self) -> bool:
        return bool(compat.groups_of(self))

    @property
    def _is_root(self) -> bool | None:
        return compat.is_root(self)

    def __getattr__(self, name: str) -> Any:
        """What the unit itself does not have is looked up in the module that was wrapped."""
        if name in fsdp1_units.INTERNALS:
            raise fsdp1_units.refuse_internal(name)
        try:
            return super().__getattr__(name)
        except AttributeError:
            if fsdp1_units.WRAPPED not in self.__dict__.get("_modules", {}):
                raise
            return getattr(self._modules[fsdp1_units.WRAPPED], name)

    def __getitem__(self, key: Any) -> Any:
        """Indexing a wrapped `nn.Sequential`."""
        return self._fsdp_wrapped_module[key]  # pyrefly: ignore[bad-index]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module; parameters are gathered and freed around it.

        Ranks:
            Collective.
        """
        return self._fsdp_wrapped_module(*args, **kwargs)

    def prepare_as_root(self) -> None:
        """What FSDP1's root does before its first forward.

        Ranks:
            Collective.
        """
        if not self._is_prepared:
            self._is_prepared = True
            fsdp1_units.cast_buffers(units_in(self))
            remember(self, ShardedState(plan=self.plan, mesh=self.mesh))
            self.forward_hooks.outside = OutsideUse(compat.param_groups(self), ())
            step_in_backward(self)
            watch_zero_grad()
            watch_by_default(self)

    def check_is_root(self) -> bool:
        """Whether this unit is the outermost of its model.

        Ranks:
            Local. Ask after the model is complete.
        """
        compat.initialise(self)
        return bool(self._is_root)

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[Unit]:
        """The units in `module`, itself included; with `root_only` those inside no other.

        Ranks:
            Local.
        """
        return list(outer_units(module)) if root_only else units_in(module)

    def apply(self, fn: Callable[[nn.Module], None]) -> "FullyShardedDataParallel":
        """Apply `fn` to every submodule and to this one, on whole parameters; changes are kept.

        Ranks:
            Collective. `fn` must do the same on every rank.
        """
        with summon(self, [self]):
            return super().apply(fn)

    @staticmethod
    @contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """Show whole parameters until the block ends.

        Args:
            module: A unit, or a module that holds some.
            recurse: Also the units inside a unit.
            writeback: Keep what the block changes.
            rank0_only: Only the first rank gets values; elsewhere parameters are on the meta device.
            offload_to_cpu: Whole parameters are put into CPU memory.
            with_grads: Gradients are whole too, and written back with `writeback`.

        Raises:
            ConfigError: A combination that FSDP1 refuses too.

        Ranks:
            Collective, on entering and, with `writeback`, on leaving.
        """
        outer = list(outer_units(module))
        for unit in outer:
            # A unit that is called inside the block without its root must not take itself for the root.
            compat.initialise(unit)
        units = units_in(module) if recurse else [unit for unit in outer if unit is module]
        with summon(
            module,
            units,
            recurse=recurse,
            writeback=writeback,
            rank0_only=rank0_only,
            offload_to_cpu=offload_to_cpu,
            with_grads=with_grads,
        ):
            yield

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without reducing them; the first backward after the block reduces the sum.

        Ranks:
            Local. Enter it on every rank.
        """
        self._refuse_inner("no_sync")
        refuse_while_running([self], "no_sync")
        with compat.gradient_sync(self, reduce=False, all_reduce=False, is_last=False):
            yield

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their norm, as one vector, is at most `max_norm`.

        Returns:
            The norm before, a plain tensor, in the widest dtype of the gradients.

        Ranks:
            Collective.
        """
        self._refuse_inner("clip_grad_norm_")
        norm = clip_grad_norm_(self, float(max_norm), float(norm_type))
        dtypes = [parameter.grad.dtype for parameter in self.parameters() if parameter.grad is not None]
        if not dtypes:
            warn_once("clip_grad_norm_", f"rank {self.rank} has no gradients; the norm is in float32")
        wide = torch.float32 if not dtypes else dtypes[0]
        for dtype in dtypes:
            wide = torch.promote_types(wide, dtype)
        return norm.to(wide)

    def register_comm_hook(self, state: object, hook: Callable[..., None]) -> None:
        """Reduce gradients by a hook of FSDP1: torch's own, or one with the signature for sharded strategies.

        Ranks:
            Local. Register the same on every rank.
        """
        self._refuse_inner("register_comm_hook")
        initialising.register(units_in(self), state, hook)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As in FSDP1: names are those of the wrapped model only while whole parameters are summoned.

        Ranks:
            Local.
        """
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield name.replace(PREFIX, "") if self.is_summoned else name, parameter

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """As in FSDP1: names are those of the wrapped model only while whole parameters are summoned.

        Ranks:
            Local.
        """
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield name.replace(PREFIX, "") if self.is_summoned else name, buffer

    def _refuse_inner(self, method: str) -> None:
        if not self.check_is_root():
            raise WrongUse(
                f"{method} is called on an inner unit",
                where=f"FullyShardedDataParallel.{method}",
                why="it is about the whole model",
                fix=f"call it on the outermost unit: model.{method}(...)",
            )
