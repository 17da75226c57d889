"""`auto_wrap_policy`: run FSDP1's policies over a model, innermost modules first, and wrap what they choose."""

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from shardwise.errors import ShardError
from shardwise.fsdp1.settings import Ignored
from shardwise.fsdp1.warned import warn_once
from shardwise.sharding.inputs import cast_floating

Wrap = Callable[..., nn.Module]


def auto_wrap(
    root: nn.Module, policy: Any, ignored: Ignored, arguments: dict[str, Any], wrap: Wrap, unit_class: type
) -> None:
    """Wrap the modules below `root` that the policy chooses, each with the root's arguments or its own.

    Args:
        root: Not wrapped itself.
        policy: A `ModuleWrapPolicy`, a `CustomPolicy`, or a function of `module`, `recurse`, `nonwrapped_numel`.
        ignored: Never looked into.
        arguments: What the constructor of the root was given.
        wrap: Makes a unit of a module.
        unit_class: What `wrap` makes; a model that holds one already is refused.

    Raises:
        ShardError: A part of the model is wrapped already.

    Ranks:
        Local, apart from what `wrap` does.
    """
    _refuse_wrapped(root, unit_class)
    precision = arguments["mixed_precision"]
    exempt = tuple(precision._module_classes_to_ignore) if precision is not None else ()
    exempted = _keep_precise(root, exempt)
    if hasattr(policy, "_run_policy"):
        _wrap_chosen(root, _run(policy, root, ignored, arguments, exempted), wrap)
        return
    overrides = {module: arguments | {"mixed_precision": None} for module in exempted}
    chooses = functools.partial(_chooses, policy, exempt)
    _wrap_below(root, chooses, ignored, lambda module: wrap(module, **overrides.get(module, arguments)))


def _refuse_wrapped(root: nn.Module, unit_class: type) -> None:
    for name, module in root.named_modules():
        if isinstance(module, unit_class):
            raise ShardError(
                f"{name or 'the model'} is wrapped already",
                where="FullyShardedDataParallel(auto_wrap_policy=)",
                why="a policy decides about the whole model, innermost modules first",
                fix="leave out auto_wrap_policy, or the wrapping by hand",
            )


def _run(
    policy: Any, root: nn.Module, ignored: Ignored, arguments: dict[str, Any], exempted: Iterable[nn.Module]
) -> dict[nn.Module, dict[str, Any]]:
    """What each chosen module is to be wrapped with."""
    chosen: dict[nn.Module, dict[str, Any]] = policy._run_policy(root, ignored.modules, dict(arguments))
    for module in exempted:
        if module not in ignored.modules:
            chosen[module] = chosen.get(module, copy.copy(arguments)) | {"mixed_precision": None}
    return chosen


def _wrap_chosen(root: nn.Module, chosen: dict[nn.Module, dict[str, Any]], wrap: Wrap) -> None:
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
                    units[child] = wrap(child, **chosen[child])
            setattr(parent, name, units[child])

    visit(root)


def _chooses(policy: Callable[..., bool], exempt: tuple[type, ...], **question: Any) -> bool:
    """Ask a policy function; what keeps its precision is chosen whatever it says."""
    if policy(**question):
        return True
    return bool(exempt) and (question["recurse"] or isinstance(question["module"], exempt))


def _wrap_below(root: nn.Module, chooses: Callable[..., bool], ignored: Ignored, wrap: Wrap) -> None:
    """Wrap by a function that sees how many elements below a module are not wrapped yet."""

    seen: dict[nn.Module, nn.Module] = {}

    def visit(module: nn.Module, is_root: bool) -> tuple[nn.Module, int]:
        left = sum(parameter.numel() for parameter in module.parameters() if parameter not in ignored.parameters)
        if not chooses(module=module, recurse=True, nonwrapped_numel=left):
            return module, 0
        wrapped = 0
        for name, child in list(module._modules.items()):
            if child is None or child in ignored.modules:
                continue
            if child not in seen:
                seen[child], num = visit(child, False)
                wrapped += num
            setattr(module, name, seen[child])
        if not is_root and chooses(module=module, recurse=False, nonwrapped_numel=left - wrapped):
            return wrap(module), left
        return module, wrapped

    visit(root, True)


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
