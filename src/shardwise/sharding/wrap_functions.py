"""Groups a model asks for itself, with settings per module: Composer's `fsdp_wrap_fn` and `_fsdp_wrap`."""

import difflib
from collections.abc import Callable
from typing import Any

from torch import nn

from shardwise.config.schema import ROOT_PATTERN, GroupOverride
from shardwise.planning.places import has_forward
from shardwise.planning.plan import Plan
from shardwise.planning.ties import find_tensors
from shardwise.planning.tree import name_matcher
from shardwise.sharding.blocks import find_blocks
from shardwise.sharding.fsdp1_precision import NAMED, fields_of, read_fields
from shardwise.sharding.translation import Translation

_PLAIN = ("reshard_after_forward", "offload", "forward_prefetch", "backward_prefetch")
_KEYS = (*_PLAIN, "cpu_offload", "mixed_precision", "mp_policy")


def chosen_modules(model: nn.Module, translation: Translation) -> dict[str, dict[str, Any]] | None:
    """The modules that the model wants to be groups, with their own settings, in the model's order.

    `_fsdp_wrap` of a module comes first, then `fsdp_wrap_fn` of the nearest module above it that has one.

    Returns:
        Name to fields of `GroupOverride`, of the root as `(root)`; None when the model says nothing.
    """
    chosen: dict[str, dict[str, Any]] = {}
    answers, has_opinion = _answers(model, "_fsdp_wrap", "fsdp_wrap_fn")
    for name, answer in answers.items():
        settings = _read(translation, name or ROOT_PATTERN, answer) if isinstance(answer, dict) else None
        if not name:
            if settings:
                chosen[ROOT_PATTERN] = settings
        elif (answer or settings is not None) and next(model.get_submodule(name).parameters(), None) is not None:
            chosen[name] = settings or {}
    if getattr(model, "_fsdp_wrap", None) is False:
        translation.note("_fsdp_wrap", "False on the root: it is a group all the same, of what no other group holds")
    return chosen if has_opinion else None


def recomputed_modules(model: nn.Module, plan: Plan) -> dict[str, nn.Module]:
    """The modules to recompute in backward, by name.

    The outermost that the model chooses by `_activation_checkpointing` and `activation_checkpointing_fn`; the blocks
    of the plan where it has neither.

    Raises:
        ShardError: The model chooses none and the plan has no blocks.

    Ranks:
        Local.
    """
    answers, has_opinion = _answers(model, "_activation_checkpointing", "activation_checkpointing_fn")
    if not has_opinion:
        blocks = find_blocks(model, plan, action="checkpoint_activations")
        return {name: block for name, block in blocks.items() if getattr(block, "_activation_checkpointing", True)}
    chosen = {name: {} for name, answer in answers.items() if name and answer}
    return {name: model.get_submodule(name) for name in chosen if not _nearest(name, chosen)}


def _answers(model: nn.Module, mark_name: str, function_name: str) -> tuple[dict[str, Any], bool]:
    """What the model says about each module, by name, and whether it chooses any."""
    asked: dict[str, Callable[[nn.Module], Any]] = {}
    answers: dict[str, Any] = {}
    has_opinion = False
    for name, module in model.named_modules():
        function = asked.get(_nearest(name, asked)) if asked else None
        if callable(own := getattr(module, function_name, None)):
            asked[name] = own
            has_opinion = True
            function = function or (own if not name else None)
        mark = getattr(module, mark_name, None)
        has_opinion = has_opinion or bool(mark)
        answers[name] = mark if mark is not None else function(module) if function is not None else False
    return answers, has_opinion


def direct_children(module: nn.Module, prefix: str = "") -> list[str]:
    """Names of the children that can be called; of a list or dictionary, those of its elements."""
    names: list[str] = []
    for name, child in module.named_children():
        if next(child.parameters(), None) is not None:
            names += [prefix + name] if has_forward(child) else direct_children(child, f"{prefix}{name}.")
    return names


def drop_ignored(chosen: dict[str, dict[str, Any]], patterns: tuple[str, ...]) -> None:
    """Take out the modules that are ignored or lie inside an ignored one: they hold nothing to group."""
    ignored = [name_matcher(pattern) for pattern in patterns]
    for name in list(chosen):
        parts = name.split(".")
        around = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
        if any(fits(outer) for outer in around for fits in ignored):
            del chosen[name]


def _nearest(name: str, asked: dict[str, Any]) -> str:
    """The longest proper prefix of `name` among the names of those that can be asked."""
    while name:
        name = name.rpartition(".")[0]
        if name in asked:
            return name
    return ""


def _read(translation: Translation, name: str, answer: dict[str, Any]) -> dict[str, Any]:
    """The settings a module asks for, as fields of `GroupOverride`."""
    fields: dict[str, Any] = {}
    for key, value in answer.items():
        where = f"fsdp_wrap_fn({name}).{key}"
        if key in _PLAIN:
            fields[key] = value
        elif key == "cpu_offload":
            fields["offload"] = bool((fields_of(value) or {"offload_params": value}).get("offload_params"))
        elif key in ("mixed_precision", "mp_policy"):
            fields |= _precision(translation, where, value)
        else:
            near = difflib.get_close_matches(key, _KEYS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"choose among {', '.join(_KEYS)}"
            translation.problem(where, "is no setting of a single group", hint)
    return fields


def _precision(translation: Translation, where: str, value: Any) -> dict[str, Any]:
    if isinstance(value, str) and value.upper() == "FULL":
        return {"param_dtype": "storage"}
    if (given := fields_of(value)) is not None:
        return read_fields(translation, where, given)
    named = isinstance(value, str) and value.upper() in NAMED
    what = f"{value!r} does not name a dtype" if named else f"is {value!r}"
    translation.problem(where, what, 'give {"param_dtype": "bf16", "reduce_dtype": "fp32"} or "FULL"')
    return {}


def join_ties(model: nn.Module, chosen: dict[str, dict[str, Any]], translation: Translation) -> None:
    """Leave a tied tensor to the group around: of `chosen`, take out those that hold it with others."""
    tied = [tensor.names for tensor in find_tensors(model) if len(tensor.names) > 1]
    for names in tied:
        while len(homes := {_nearest(name, chosen) for name in names} - {""}) > 1:
            for home in homes:
                del chosen[home]
            around = " and ".join(sorted(homes))
            translation.note("ties", f"{around} share {' = '.join(names)}; the group around them holds both")


def overrides_of(chosen: dict[str, dict[str, Any]], base: dict[str, Any]) -> tuple[GroupOverride, ...]:
    """Overrides that give each module its own settings, and those inside it the config's again.

    Args:
        chosen: From `chosen_modules`, outer modules first.
        base: What the config asks for, by field of `GroupOverride`.
    """
    overrides: list[GroupOverride] = []
    touched: dict[str, set[str]] = {}
    for name, fields in chosen.items():
        above = touched.get(_nearest(name, touched), set())
        complete = {field: base[field] for field in sorted(above) if base.get(field) is not None} | fields
        if complete:
            touched[name] = above | complete.keys()
            overrides.append(GroupOverride(pattern=name, **complete))
    return tuple(overrides)
