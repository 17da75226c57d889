"""FSDP1's constructor arguments and wrapping policies."""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy

from shardwise.config.fsdp1_names import KEEPS_UNSHARDED
from shardwise.fsdp1.units import WrongArgument, WrongUse
from shardwise.models.nested_tensors import cast_floating

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
        raise WrongArgument(
            f"sharding_strategy is {strategy!r}",
            where="FullyShardedDataParallel(sharding_strategy=)",
            why="it is a member of ShardingStrategy",
            fix=f"choose among {', '.join(ShardingStrategy.__members__)}",
        )
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

    def refused(what: str, why: str, fix: str) -> WrongArgument:
        where = "FullyShardedDataParallel(ignored_modules=, ignored_states=)"
        return WrongArgument(what, where=where, why=why, fix=fix)

    states, given = list(ignored_states or ()), list(ignored_modules or ())
    if given and states:
        raise refused("both are given", "ignored_states takes both kinds", "keep ignored_states")
    wrong = [state for state in given if not isinstance(state, nn.Module)]
    wrong += [state for state in states if not isinstance(state, nn.Module | nn.Parameter)]
    if wrong:
        why = "ignored_modules takes modules, ignored_states modules or parameters"
        fix = "pass a parameter as ignored_states=[parameter]"
        raise refused(f"a {type(wrong[0]).__name__} is to be ignored", why, fix)
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
