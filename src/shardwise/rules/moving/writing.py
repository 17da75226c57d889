"""Writing a constructor call anew: `fully_shard` or `sw.shard`, with a carried function where values come late."""

from __future__ import annotations

import ast
import re

from shardwise.rules.moving import placement, policies, precision
from shardwise.rules.moving.constructors import CODE, Wrap, has_stars
from shardwise.rules.moving.program import Program
from shardwise.rules.moving.refusals import wraps_parts
from shardwise.rules.moving.seeding import report_seeds
from shardwise.rules.moving.values import is_constant, is_none, is_simple

ALL_FEATURES = ("policy", "precision", "buffers", "ignored", "init", "sync", "strategy", "group", "mesh", "device")
_TORCH_ONLY = {"init", "ignored"}  # sw.shard averages gradients of ignored parameters, and fills models afterwards
_TENSOR_PARALLEL = re.compile(r"\bparallelize_module\(|\bdistribute_module\(")  # sw.shard takes no DTensors
_META = re.compile(r"""["']meta["']|init_empty_weights|deferred_init""")


def rewrite(wrap: Wrap, program: Program) -> None:
    """Put the edits for one call into the draft.

    Raises:
        Blocked: An argument has no counterpart; the draft must be thrown away.
    """
    drawn_apart = report_seeds(wrap, program)
    if has_stars(wrap):
        _as_told(wrap)
        return
    _drop_what_is_gone(wrap)
    policy = wrap.value("auto_wrap_policy")
    has_policy = not is_none(policy)
    if has_policy:
        assert policy is not None
        policies.refuse_unknown(wrap, policy)
    else:
        wrap.drop("auto_wrap_policy")
    options = placement.convert(wrap)
    for_helper, features = precision.convert(wrap, has_policy=has_policy)
    options += precision.convert_offload(wrap)
    more, needed = _prepare(wrap)
    for_helper += more
    features |= needed
    picked = policies.classes(wrap, policy) if policy is not None else None
    by_parts = _by_parts(wrap) or drawn_apart or _TENSOR_PARALLEL.search(wrap.context.text) is not None
    if (
        wrap.draft.target == "shardwise"
        and not by_parts
        and not features
        and (picked or not has_policy)
        and _nothing_else(wrap)
    ):
        _config(wrap, picked, options)
    elif picked and wrap.draft.target == "torch" and not features and _can_loop(wrap):
        _loop(wrap, picked, options)
    else:
        _call(wrap, options, for_helper, features, has_policy, by_parts=by_parts)


def _by_parts(wrap: Wrap) -> bool:
    """Whether a model is wrapped part by part: `sw.shard` takes it as a whole, `fully_shard` does not mind."""
    same = [
        call for call in wrap.context.calls if wrap.context.source(call.func) == wrap.context.source(wrap.call.func)
    ]
    loops = ast.For | ast.While | ast.ListComp | ast.GeneratorExp | ast.DictComp
    in_loop = any(isinstance(one, loops) for call in same for one in wrap.context.ancestors(call))
    texts = [wrap.context.source(call.args[0]) for call in same if call.args]
    nested = any(one != other and re.match(rf"{re.escape(one)}[.\[]", other) for one in texts for other in texts)
    return (len(same) > 1 and (in_loop or nested)) or wraps_parts(wrap) is not None


def _as_told(wrap: Wrap) -> None:
    draft = wrap.draft
    for name, argument in wrap.by_name.items():
        if argument.name and argument.name not in ("*", "**") and argument.name != name:
            wrap.list.rename(argument, name)
    _callee(wrap, draft.helper("_shard_as_told", *ALL_FEATURES, *_recomputation(wrap)))
    _finish(wrap, "settings arrive at run time")
    draft.reported(
        "SW128",
        wrap.call,
        "an optimizer built before is pointed at the new parameters at its first step, as use_orig_params did",
        "build it after this line; until its first step its groups hold the old parameters, without gradients",
    )


def _drop_what_is_gone(wrap: Wrap) -> None:
    """Arguments that FSDP2 does not have because it needs none."""
    if is_constant(wrap.value("use_orig_params"), False):
        wrap.dropped.append(
            "parameters keep their own names and shapes now: check parameter groups made by name or shape"
        )
    wrap.drop("use_orig_params")
    wrap.drop("limit_all_gathers")
    prefetch = wrap.value("backward_prefetch")
    if prefetch is not None and "BACKWARD_PRE" not in wrap.context.source(prefetch):
        wrap.dropped.append("FSDP2 always gathers one unit ahead in backward, whatever backward_prefetch said")
    wrap.drop("backward_prefetch")
    forward = wrap.value("forward_prefetch")
    if forward is not None and not is_constant(forward, False):
        wrap.dropped.append(
            "FSDP2 overlaps gathering in forward by itself: set_modules_to_forward_prefetch asks for more"
        )
    wrap.drop("forward_prefetch")


def _prepare(wrap: Wrap) -> tuple[list[tuple[str, str]], set[str]]:
    """`sync_module_states`, `param_init_fn` and `ignored_*`: done by the helper, unit by unit, as FSDP1 does."""
    features: set[str] = set()
    sync = wrap.value("sync_module_states")
    if sync is None or is_constant(sync, False):
        wrap.drop("sync_module_states")
    else:
        wrap.list.rename(wrap.by_name["sync_module_states"], "sync_from_rank0")
        features.add("sync")
    init = wrap.value("param_init_fn")
    if is_none(init):
        wrap.drop("param_init_fn")
    if not is_none(init) or _META.search(wrap.context.text):
        features.add("init")
    for name in ("ignored_modules", "ignored_states"):
        if is_none(wrap.value(name)):
            wrap.drop(name)
        else:
            wrap.list.rename(wrap.by_name[name], "ignored")
            features.add("ignored")
    return [], features


def _can_loop(wrap: Wrap) -> bool:
    module = wrap.value("module")
    targets = wrap.statement.targets if isinstance(wrap.statement, ast.Assign) else []
    whole = isinstance(wrap.statement, ast.Assign | ast.Return | ast.Expr) and wrap.statement.value is wrap.call
    return wrap.is_plain and whole and module is not None and is_simple(module) and len(targets) < 2


def _loop(wrap: Wrap, picked: list[str], options: list[tuple[str, str]]) -> None:
    """Blocks by class: a loop, children first, and the root."""
    draft = wrap.draft
    module, name = wrap.text("module"), _free_name(wrap)
    told = [f"{key}={text}" if key != "**" else text for key, text in options]
    kinds = picked[0] if len(picked) == 1 else f"({', '.join(picked)})"
    given = "".join(f", {one}" for one in told)
    draft.insert_before(
        wrap.statement,
        [
            f"for {name} in reversed(list({module}.modules())):  # children first",
            f"    if isinstance({name}, {kinds}) and {name} is not {module}:",
            f"        {draft.name('fully_shard')}({name}{given})",
        ],
    )
    wrap.drop("auto_wrap_policy")
    for one in told:
        wrap.list.add(one)
    _callee(wrap, draft.name("fully_shard"))
    _finish(wrap, "each block and the root are sharded")


def _nothing_else(wrap: Wrap) -> bool:
    """Whether all that is left of the arguments is the module and the policy."""
    return {id(one) for one in wrap.list.kept()} <= {
        id(wrap.by_name.get(name)) for name in ("module", "auto_wrap_policy", "cls")
    }


def _config(wrap: Wrap, picked: list[str] | None, options: list[tuple[str, str]]) -> None:
    """Everything is written in the call: a `ShardConfig` says the same."""
    draft = wrap.draft
    draft.name("sw")
    told = ['precision=sw.PrecisionConfig(param_dtype="storage", reduce_dtype="storage")']
    if picked:
        kinds = picked[0] if len(picked) == 1 else f"({', '.join(picked)})"
        told.insert(0, f"wrap_if=lambda module: isinstance(module, {kinds})")
        wrap.drop("auto_wrap_policy")
    else:
        told.insert(0, 'group_by="root"')
    mesh = ""
    for key, text in options:
        if key == "mesh":
            mesh = text
        elif key == "offload_policy":
            condition = re.fullmatch(r"CPUOffloadPolicy\(\) if (.*) else OffloadPolicy\(\)", text, re.DOTALL)
            told.append(f"offload=bool({condition[1]})" if condition else "offload=True")
        else:
            told.append(f"{key}={text}")
    module = wrap.by_name.get("module")
    named = module is not None and module.name == "module"
    if module is not None and named:
        wrap.list.rename(module, "model")
    config = f"sw.ShardConfig({', '.join(told)})"
    wrap.list.add(f"config={config}" if named or wrap.is_partial else config)
    if mesh:
        wrap.list.add(f"mesh={mesh}")
    draft.names -= {"CPUOffloadPolicy", "OffloadPolicy"} if not wrap.draft.helpers else set()
    _callee(wrap, "sw.shard")
    _finish(wrap, "each block and the rest are groups" if picked else "the whole is one group", "sw.shard")


def _free_name(wrap: Wrap) -> str:
    names = {node.id for node in wrap.context.parents if isinstance(node, ast.Name)}
    return next(name for name in ("block", "unit", "sharded_block", "fsdp_block") if name not in names)


def _call(
    wrap: Wrap,
    options: list[tuple[str, str]],
    for_helper: list[tuple[str, str]],
    features: set[str],
    has_policy: bool,
    *,
    by_parts: bool,
) -> None:
    draft = wrap.draft
    if has_policy:
        features.add("policy")
        wrap.list.rename(wrap.by_name["auto_wrap_policy"], "policy")
        features |= _recomputation(wrap)
    for key, text in [*options, *for_helper]:
        wrap.list.add(text if key == "**" else f"{key}={text}")
    what = "each unit of the policy and the root are sharded" if has_policy else "the whole is one unit"
    if draft.target == "shardwise" and not features & _TORCH_ONLY and not by_parts:
        features |= set() if is_none(wrap.value("mixed_precision")) else {"precision"}
        _callee(wrap, draft.helper("_sw_shard", *features, *_offload(wrap)))
        _finish(wrap, what, "sw.shard")
        return
    _callee(wrap, draft.helper("_shard_units", *features) if features else draft.name("fully_shard"))
    _finish(wrap, what)


def _offload(wrap: Wrap) -> set[str]:
    return {"offload"} if "cpu_offload" in wrap.by_name else set()


def _recomputation(wrap: Wrap) -> set[str]:
    return {"ac"} if "checkpoint_wrapper" in wrap.context.text else set()


def _callee(wrap: Wrap, text: str) -> None:
    if wrap.is_partial:
        wrap.list.replace(wrap.by_name["cls"], text)
        wrap.draft.taken.add(wrap.by_name["cls"].value)
    else:
        wrap.draft.replace(wrap.call.func, text)


def _finish(wrap: Wrap, what: str, became: str = "fully_shard") -> None:
    wrap.draft.edits += wrap.list.edits()
    wrap.draft.taken.add(wrap.call)
    notes = "".join(f"; {one}" for one in wrap.dropped)
    wrap.draft.rewritten(CODE, wrap.call, f"FSDP(...) became {became}: {what}{notes}")
