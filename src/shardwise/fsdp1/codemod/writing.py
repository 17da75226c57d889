"""Write fully_shard calls for FSDP's constructors, or refuse with a reason."""

from __future__ import annotations

import ast
import re
from pathlib import PurePath

from shardwise.config.fsdp1_names import NOT_NEEDED
from shardwise.fsdp1.codemod import constructors
from shardwise.fsdp1.codemod.constructors import CODE, Options, Wrap, are_nested, moved_text
from shardwise.fsdp1.codemod.draft import FEATURES, KEEP_FSDP1_API, Blocked, FileDraft, assemble
from shardwise.fsdp1.codemod.flow import flow_of
from shardwise.fsdp1.codemod.order import (
    goes_elsewhere,
    groups_by_name,
    kept_optimizers,
    marked_parameters,
    may_come_late,
)
from shardwise.fsdp1.codemod.program import (
    ENABLE_WRAP,
    WRAP,
    Program,
    called_fsdp_name,
    is_constant,
    is_none,
    is_simple,
    iterated_around,
    once,
    single_value,
)
from shardwise.source.syntax import (
    FSDP1,
    Binding,
    Comprehension,
    FileContext,
    Function,
    all_parameters,
    argument_of,
    given_to,
)

_PARTS = re.compile(r"\.(named_)?(modules|children)\(|\b\w*(layers|blocks)\b")


def _wraps_parts(wrap: Wrap) -> int | None:
    """The line that shows that a call serves for parts of a model; None if nothing does.

    Its function, or the name of its `partial`, is handed on to others, called for modules inside one another, or called
    in a loop over modules.
    """
    context, texts = wrap.context, set[str]()
    for node in _uses(wrap):
        parent = context.parents[node]
        in_loop = any(map(_PARTS.search, iterated_around(context, node)))
        if not (isinstance(parent, ast.Call) and parent.func is node) or in_loop:
            return node.lineno
        texts |= {context.source(one) for one in parent.args[:1]}
    return wrap.call.lineno if are_nested(texts) else None


def _uses(wrap: Wrap) -> list[ast.expr]:
    """Where the function around the call is used, or the lambda, or what the `partial` is bound to."""
    context, module = wrap.context, wrap.value("module")
    makers = (one for one in context.ancestors(wrap.call) if isinstance(one, ast.Lambda | Function))
    value = wrap.call if wrap.is_partial else next(makers, None)
    if isinstance(value, Function):  # one that builds the model itself wraps the whole of it
        handed = isinstance(module, ast.Name) and module.id in {one.arg for one in all_parameters(value.args)}
        return [one for one in context.loads(value.name) if handed and context.definition(one) is value]
    if value is None:
        return []
    match context.parents[value]:
        case ast.Assign(targets=[ast.Name(id=name)]):
            return [one for one in context.loads(name) if any(b.value is value for b in context.bindings(one))]
    return [value]


def _casts_outermost(wrap: Wrap) -> bool:
    """Whether mixed precision casts the inputs of the outermost module, and only the run knows which one that is."""
    given = wrap.value("mixed_precision")
    is_told = not is_none(given) and not wrap.is_inner and not _casts_all(wrap, given)
    return is_told and _wraps_parts(wrap) is not None


def _casts_all(wrap: Wrap, node: ast.expr | None) -> bool:
    value = single_value(wrap.context, node) if node is not None else None
    keywords = value.keywords if isinstance(value, ast.Call) else []
    casts = any(one.arg == "cast_forward_inputs" and is_constant(one.value, True) for one in keywords)
    return casts and called_fsdp_name(wrap.context, value) == "MixedPrecision"


_SEEDS = re.compile(r"seed", re.IGNORECASE)
_SETS = re.compile(r"^seed_\w+$|^(?!manual_)\w+_seeds?(_\w+)?$", re.IGNORECASE)
"""Functions that seed everything; `manual_seed` and `seed` of other objects do not."""
_RANK = re.compile(r"(?<![a-z])rank|procid|process_index", re.IGNORECASE)
_TORCH = ("torch.manual_seed", "torch.random.manual_seed", "torch.cuda.manual_seed", "torch.cuda.manual_seed_all")
_ELSEWHERE = re.compile(r"^(np|numpy|random)\b|enerator|^rng|Sampler|Loader|ataset|shuffle", re.IGNORECASE)
"""Random numbers that weights are not drawn from."""


def _report_seeds(wrap: Wrap) -> bool:
    """Whether ranks may hold different weights, which FSDP1 shards as they are and `sw.shard` refuses; say so."""
    is_synced = is_constant(wrap.value("sync_module_states"), True)
    place = "" if is_synced else _seeded_by_rank(wrap.context, wrap.draft.program)
    if place:
        wrap.draft.reported(
            "SW134",
            wrap.call,
            f"ranks are seeded differently ({place}): weights drawn after that differ; as with FSDP1, each rank keeps "
            "its part of its own",
            "seed all ranks alike until the model is built, or load or broadcast its weights before this line",
        )
    return bool(place)


def _seeded_by_rank(context: FileContext, program: Program) -> str:
    """Where the program seeds torch by the rank, in a constructor's file or one that imports it; empty if nowhere."""
    if (found := _seeding_line(context)) is not None:
        return f"line {found}"
    importers = program.importers(PurePath(context.path).stem)
    for other in program.files(lambda text: "seed" in text and _RANK.search(text), importers):
        if other is not context and (found := _seeding_line(other)) is not None:
            return f"{other.path}:{found}"
    return ""


def _seeding_line(context: FileContext) -> int | None:
    for call in context.calls:
        name = context.source(call.func)
        seeds = [keyword.value for keyword in call.keywords if _SEEDS.search(keyword.arg or "")]
        if context.is_any(call.func, _TORCH) or _SETS.search(name.rpartition(".")[2]):
            seeds = given_to(call)
        if not _ELSEWHERE.search(name) and any(_depends_on_rank(context, one) for one in seeds):
            return call.lineno
    return None


def _depends_on_rank(context: FileContext, node: ast.expr, hops: int = 0) -> bool:
    for one in ast.walk(node):
        match one:
            case ast.Name(id=word) | ast.Attribute(attr=word) if _RANK.search(word):
                return True
            case ast.Constant(value=str(key)) if key.endswith("RANK"):
                return True
            case ast.Name() if hops < 2:
                values = [binding.value for binding in context.bindings(one) if binding.value is not None]
                if any(_depends_on_rank(context, value, hops + 1) for value in values):
                    return True
    return False


# sw.shard averages gradients of ignored parameters, fills models afterwards, and takes no DTensors.
_TORCH_ONLY = {"param_init_fn", "ignored", "is_part", "use_orig_params"}
_TENSOR_PARALLEL = re.compile(r"\bparallelize_module\(|\bdistribute_module\(")
_META = re.compile(r"""["']meta["']|init_empty_weights|deferred_init""")


def _rewrite(wrap: Wrap) -> None:
    """Put the edits for one call into the draft.

    Raises:
        Blocked: An argument has no counterpart; the draft must be thrown away.
    """
    draft, drawn_apart = wrap.draft, _report_seeds(wrap)
    constructors.refuse_container(wrap)
    if wrap.has_stars:
        _write_as_keyword_arguments(wrap)
        return
    optimizers = kept_optimizers(wrap)
    _drop_what_is_gone(wrap)
    policy = wrap.value("auto_wrap_policy")
    has_policy = not is_none(policy)
    if policy is None or not has_policy:
        wrap.drop("auto_wrap_policy")
    elif called_fsdp_name(wrap.context, single_value(wrap.context, policy)) == "wrap.CustomPolicy":
        raise Blocked(
            "CustomPolicy may give single modules FSDP1 settings of their own",
            "call fully_shard on the modules it picks, with FSDP2 settings, children first",
        )
    options = constructors.convert_placement(wrap)
    for_helper, features = constructors.convert_precision(wrap, has_policy=has_policy)
    options += constructors.convert_offload(wrap)
    features |= _prepare(wrap)
    is_part = _casts_outermost(wrap)
    for feature, is_needed in (
        ("is_part", is_part),
        ("use_orig_params", optimizers or marked_parameters(draft.program)),
    ):
        if is_needed:
            options.append((feature, "True"))
            features |= {feature, *(["mp_policy"] if is_part else [])}
    picked = constructors.classes(wrap, policy)
    by_parts = _by_parts(wrap) or drawn_apart or _TENSOR_PARALLEL.search(wrap.context.text) is not None
    is_spelled_out = not features and (picked or not has_policy)
    known = [wrap.by_name.get(name) for name in ("module", "auto_wrap_policy", "cls")]
    if (
        draft.target == "shardwise"
        and not by_parts
        and is_spelled_out
        and all(one in known for one in wrap.list.kept())
    ):
        _write_config(wrap, picked, options)
    elif picked and draft.target == "torch" and not features and _can_loop(wrap):
        _write_loop(wrap, picked, options)
    else:
        _write_call(wrap, [*options, *for_helper], features, has_policy, by_parts=by_parts)
    _report_optimizers(wrap, optimizers)


def _by_parts(wrap: Wrap) -> bool:
    """Whether a model is wrapped part by part: `sw.shard` takes it as a whole, `fully_shard` does not mind."""
    same, loops = wrap.same_calls(), ast.For | ast.While | Comprehension
    in_loop = any(isinstance(one, loops) for call in same for one in wrap.context.ancestors(call))
    texts = {moved_text(wrap.context, call.args[0]) for call in same if call.args}
    return (len(same) > 1 and (in_loop or are_nested(texts))) or _wraps_parts(wrap) is not None


def _write_as_keyword_arguments(wrap: Wrap) -> None:
    for name, argument in wrap.by_name.items():
        if argument.name not in ("", "*", "**", name):
            wrap.list.rename(argument, name)
    _finish(wrap, wrap.draft.helper("_fully_shard_like_fsdp1", *FEATURES), "settings arrive at run time")
    _report_optimizers(wrap, kept_optimizers(wrap))


def _report_optimizers(wrap: Wrap, places: list[str]) -> None:
    function = wrap.context.enclosing_function(wrap.call)
    if function is not None and goes_elsewhere(wrap):
        message = "no file given uses the model that this returns; where it goes, state_dict() gives shards now"
        fix = "run migrate on the files that use it too: clip_grad_norm_(), no_sync() and .module differ as well"
        wrap.draft.reported("SW132", function, message, fix)
    is_late = may_come_late(wrap)
    if places or (is_late and wrap.has_stars):
        optimizer = f"the optimizer of {places[0]}" if places else "an optimizer built before"
        wrap.draft.reported(
            "SW128",
            wrap.call,
            f"{optimizer} is pointed at the new parameters at the first forward or step, as use_orig_params did",
            "build it after this line; until then its groups hold the old parameters, without gradients",
        )
    elif is_late:
        wrap.draft.reported(
            "SW128",
            wrap.call,
            "no file given calls this function: an optimizer that its caller has built before would update nothing, as "
            "fully_shard replaces the parameters that use_orig_params kept",
            "build the optimizer after this call; or run migrate on the caller's file too",
        )


_DEFAULTS = {"use_orig_params": ("True",), "backward_prefetch": ("BACKWARD_PRE",), "forward_prefetch": ("False",)}
"""Settings that FSDP2 does not need, and the values for which that makes no difference."""


def _drop_what_is_gone(wrap: Wrap) -> None:
    """Drop arguments that FSDP2 does not have because it needs none."""
    for name, defaults in _DEFAULTS.items():
        value = wrap.value(name)
        is_told = value is not None and not wrap.draft.source(value).endswith(defaults)
        if is_told or (name == "use_orig_params" and value is None and groups_by_name(wrap.draft.program)):
            wrap.dropped.append(f"{name}: {NOT_NEEDED[name]}")
    wrap.drop("limit_all_gathers", *_DEFAULTS)


def _prepare(wrap: Wrap) -> set[str]:
    """`sync_module_states`, `param_init_fn` and `ignored_*`: done by the helper, unit by unit, as FSDP1 does."""
    became = {"sync_module_states": "sync_from_rank0", "ignored_modules": "ignored", "ignored_states": "ignored"}
    features: set[str] = set()
    if not is_none(wrap.value("ignored_modules")) and not is_none(wrap.value("ignored_states")):
        raise Blocked("both ignored_modules and ignored_states are given, which FSDP1 refuses too", "give one of them")
    for name, feature in {**became, "param_init_fn": "param_init_fn"}.items():
        value = wrap.value(name)
        if is_none(value) or (name == "sync_module_states" and is_constant(value, False)):
            wrap.drop(name)
            continue
        features.add(feature)
        if name in became:
            wrap.rename(name, feature)
    return features | ({"param_init_fn"} if _META.search(wrap.context.text) else set())


def _can_loop(wrap: Wrap) -> bool:
    module, statement = wrap.value("module"), wrap.statement
    is_whole = isinstance(statement, ast.Assign | ast.Return | ast.Expr) and statement.value is wrap.call
    return wrap.is_plain and is_whole and module is not None and is_simple(module) and len(wrap.targets) < 2


def _kinds(picked: list[str]) -> str:
    return picked[0] if len(picked) == 1 else f"({', '.join(picked)})"


def _write_loop(wrap: Wrap, picked: list[str], options: Options) -> None:
    """Blocks by class: a loop, children first, and the root."""
    names = {node.id for node in wrap.context.parents if isinstance(node, ast.Name)}
    name = next(one for one in ("block", "unit", "sharded_block", "fsdp_block") if one not in names)
    module, shards = wrap.text("module"), wrap.draft.name("fully_shard")
    wrap.list.add(*_keyword_arguments(options))
    wrap.draft.insert_before(
        wrap.statement,
        [
            f"for {name} in reversed(list({module}.modules())):  # children first",
            f"    if isinstance({name}, {_kinds(picked)}) and {name} is not {module}:",
            f"        {shards}({', '.join([name, *_keyword_arguments(options)])})",
        ],
    )
    wrap.drop("auto_wrap_policy")
    _finish(wrap, shards, "each block and the root are sharded")


def _write_config(wrap: Wrap, picked: list[str], options: Options) -> None:
    """Everything is written in the call: a `ShardConfig` says the same."""
    draft, module = wrap.draft, wrap.by_name.get("module")
    draft.name("sw")
    told = [f"wrap_if=lambda module: isinstance(module, {_kinds(picked)})" if picked else 'group_by="root"']
    told.append('precision=sw.PrecisionConfig(param_dtype="storage", reduce_dtype="storage")')
    wrap.drop("auto_wrap_policy")
    for key, text in options:
        if key == "offload_policy":
            condition = re.fullmatch(r"CPUOffloadPolicy\(\) if (.*) else OffloadPolicy\(\)", text, re.DOTALL)
            told.append(f"offload=bool({condition[1]})" if condition else "offload=True")
        elif key != "mesh":
            told.append(f"{key}={text}")
    is_named = module is not None and module.name == "module"
    if is_named:
        wrap.rename("module", "model")
    wrap.list.add(f"{'config=' if is_named or wrap.is_partial else ''}sw.ShardConfig({', '.join(told)})")
    wrap.list.add(*_keyword_arguments([one for one in options if one[0] == "mesh"]))
    draft.names -= {"CPUOffloadPolicy", "OffloadPolicy"} if not draft.helpers else set()
    _finish(wrap, "sw.shard", "each block and the rest are groups" if picked else "the whole is one group")


def _keyword_arguments(options: Options) -> list[str]:
    return [text if key == "**" else f"{key}={text}" for key, text in options]


def _write_call(wrap: Wrap, options: Options, features: set[str], has_policy: bool, *, by_parts: bool) -> None:
    draft = wrap.draft
    if has_policy:
        features.add("policy")
        wrap.rename("auto_wrap_policy", "policy")
    wrap.list.add(*_keyword_arguments(options))
    what = "each unit of the policy and the root are sharded" if has_policy else "the whole is one unit"
    if draft.target == "shardwise" and not features & _TORCH_ONLY and not by_parts:
        features |= set() if is_none(wrap.value("mixed_precision")) else {"mp_policy"}
        _finish(wrap, draft.helper("_sw_shard", *features), what)
    else:
        _finish(wrap, draft.helper("_shard_units", *features) if features else draft.name("fully_shard"), what)


def _finish(wrap: Wrap, callee: str, what: str) -> None:
    draft = wrap.draft
    if wrap.is_partial:
        wrap.list.replace(wrap.by_name["cls"], callee)
        draft.taken.add(wrap.by_name["cls"].value)
    else:
        draft.replace(wrap.call.func, callee)
    draft.edits += wrap.list.edits()
    draft.taken.add(wrap.call)
    became = "sw.shard" if "sw" in callee else "fully_shard"
    draft.rewritten(CODE, wrap.call, "; ".join([f"FSDP(...) became {became}: {what}", *wrap.dropped]))


def _rewrite_chosen_class(draft: FileDraft, call: ast.Call) -> None:
    """`wrapper = FSDP if sharded else DDP` and `wrapper(model, ...)`: the choice changes, the call stays.

    Raises:
        Blocked: The name gets its value in another way, or serves for something else than calls.
    """
    context, func = draft.context, call.func
    bindings = context.bindings(func) if isinstance(func, ast.Name) else [Binding(func, value=func)]
    chosen = [one.value for one in bindings if isinstance(one.value, ast.IfExp | ast.Name | ast.Attribute)]
    mentions = [one for value in chosen for one in ast.walk(value) if isinstance(one, ast.Name | ast.Attribute)]
    found = [node for node in mentions if draft.program.origins(context, node) == {FSDP1}]
    is_called = True
    if isinstance(func, ast.Name) and (home := context.scope(func).find(func.id)):
        loads = [(node, context.scope(node).find(node.id)) for node in context.loads(func.id)]
        parents = [(node, context.parents[node]) for node, same in loads if same and same[0] is home[0]]
        is_called = all(
            (isinstance(parent, ast.Call) and parent.func is node) or getattr(parent, "attr", "") == "__name__"
            for node, parent in parents
        )
    if not found or not is_called or any(one.origin for one in bindings):
        raise Blocked("the class is chosen at run time", "call fully_shard in the branch that means FSDP")
    for node in found:
        if node not in draft.taken:
            draft.replace(node, draft.helper("_fully_shard_like_fsdp1", *FEATURES))
    draft.taken.add(call)
    draft.rewritten(CODE, call, "where FSDP is chosen, a function now shards with fully_shard and returns the module")


def _rewrite_subclasses(draft: FileDraft) -> None:
    """Let subclasses of FSDP1's class inherit from a class that holds the module and shards both."""
    program, context = draft.program, draft.context
    for node in context.classes.values():
        for base in [one for one in node.bases if program.is_fsdp(context, one)]:
            draft.replace(base, draft.helper("_ShardedWrapper", *FEATURES))
            draft.rewritten("SW102", node, f"{node.name} inherits from a class that shards with fully_shard")
    for call in draft.calls():
        if (built := program.subclass(context, call.func)) is not None:
            draft.taken.add(call)
            draft.rewritten(CODE, call, f"{built.name}(...) shards with fully_shard in its base class")


def rewrite_enable_wrap(draft: FileDraft) -> None:
    """`enable_wrap(wrapper_cls=FSDP, ...)` takes any function: `wrap` keeps working, on FSDP2."""
    for call in draft.context.calls_to(ENABLE_WRAP):
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        wrapper = given.get("wrapper_cls")
        if wrapper is None or None in given:
            continue
        if draft.program.origins(draft.context, wrapper) == {FSDP1}:
            draft.replace(wrapper, draft.helper("_fully_shard_like_fsdp1", *FEATURES))
            draft.taken.update([call, *draft.context.calls_to(WRAP)])
            draft.rewritten("SW103", call, "wrap now calls a function that shards with fully_shard")


def rewrite_constructors(draft: FileDraft) -> None:
    """Rewrite every constructor call of a file that can be, and note why the others cannot."""
    _rewrite_subclasses(draft)
    for call, is_partial in draft.sharded.constructors.items():
        try:
            with draft.attempt():
                if not is_partial and not constructors.is_certain(draft.context, draft.program, call.func):
                    _rewrite_chosen_class(draft, call)
                    continue
                wrap = constructors.read(draft, call, is_partial)
                _rewrite(wrap)
                # Code that knows both FSDP1 and FSDP2 may import the second where it needs it.
                for name in sorted(one for one in draft.names if draft.is_local(call, one)):
                    raise Blocked(
                        f"{name} means something else here", f"rename it, or import torch's {name} at the top"
                    )
        except Blocked as blocked:
            fix = f"{blocked.fix}; or {KEEP_FSDP1_API}"
            draft.undecided(CODE, call, f"FSDP(...) is left alone: {blocked.why}", fix)


@once
def constructed(program: Program) -> dict[str, FileDraft]:
    """The files that have FSDP(...) calls, with these rewritten to torch."""
    files = {path: file for path, file in flow_of(program).files.items() if file.constructors}
    drafts = {path: FileDraft(file.context, program, "torch") for path, file in files.items()}
    for draft in drafts.values():
        rewrite_constructors(draft)
    return drafts


_ASKS = r"\bCPUOffload\((?!\s*(?:offload_params\s*=\s*)?(?:False\s*)?\))"
_OFFLOADS = re.compile(rf"{_ASKS}|\bcpu_offload\b[\"']?\s*[=:](?!\s*None|\s*CPUOffload\()")
_STARTS = "init_process_group("


@once
def _offloading(program: Program) -> list[str]:
    """The files whose models are offloaded to the CPU, at least on some runs."""
    asks, found = any(map(_OFFLOADS.search, program.texts.values())), []
    for path, draft in constructed(program).items():
        is_asked = asks and "_offload_policy" in dict(assemble(draft.helpers, draft.features))
        if is_asked or "CPUOffloadPolicy" in draft.names or "_offload_policy" in draft.helpers:
            found.append(path)
    return found


def starts_offloaded(program: Program, path: str) -> bool:
    """Whether a file starts the process group of a model that is offloaded: in it, or in a file that starts none."""
    text, flow = program.texts[path], flow_of(program)
    offloading = _offloading(program) if _STARTS in text else []
    others = {one for one in offloading if _STARTS not in program.texts[one]}
    reached = [flow.reached_by(one) for one in (path, *flow.files)] if others else []
    return path in offloading or any(path in some and not others.isdisjoint(some) for some in reached)


def rewrite_backends(draft: FileDraft) -> None:
    """Add gloo to `init_process_group("nccl")` where FSDP is asked to offload."""
    text = draft.context.text
    is_framework = not draft.sharded.constructors and "offload=" in text and re.search(_ASKS, text)
    if not is_framework and not starts_offloaded(draft.program, draft.context.path):
        return
    for call in draft.context.calls_to("torch.distributed.init_process_group"):
        backend = argument_of(call, 0, "backend")
        if isinstance(backend, ast.Constant) and backend.value == "nccl":
            draft.replace(backend, '"cpu:gloo,cuda:nccl"')
            draft.rewritten("SW129", call, "gloo joins nccl: offloaded gradients are on the CPU")
        elif backend is not None and not isinstance(backend, ast.Constant):
            message = "offloaded gradients are on the CPU, where NCCL cannot reduce them"
            draft.reported("SW129", call, message, 'use "cpu:gloo,cuda:nccl" where the backend is "nccl"')
