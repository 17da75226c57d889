"""Write fully_shard calls for FSDP's constructors, or refuse with a reason."""

from __future__ import annotations

import ast
import re
from pathlib import PurePath

from shardwise.errors import SourceError
from shardwise.fsdp1.codemod import constructors, settings
from shardwise.fsdp1.codemod.constructors import CODE, Blocked, Wrap, has_stars
from shardwise.fsdp1.codemod.draft import FileDraft
from shardwise.fsdp1.codemod.emitted import FEATURES
from shardwise.fsdp1.codemod.order import refuse_early_optimizers
from shardwise.fsdp1.codemod.program import Program, called_fsdp_name, is_constant, is_none, is_simple, single_value
from shardwise.fsdp1.codemod.sharded import FLAT, built_subclasses
from shardwise.source.edits import apply
from shardwise.source.syntax import FSDP1, Binding, FileContext, Function, all_parameters, given_to

_PARTS = re.compile(r"\.(named_)?(modules|children)\(|\b\w*(layers|blocks)\b")
_LOOPS = ast.For | ast.ListComp | ast.GeneratorExp | ast.DictComp


def refuse_surroundings(wrap: Wrap) -> None:
    """Refuse a call for what its own function does with the model, or what is done with the function.

    Raises:
        Blocked: With the line that stands in the way.
    """
    _refuse_private_functions(wrap)
    _refuse_flat_parameters(wrap)
    _refuse_unknown_root(wrap)


def refuse_local_names(wrap: Wrap) -> None:
    """Refuse a call where one of the names we would use already means something else.

    Raises:
        Blocked: As in code that knows both FSDP1 and FSDP2, and imports the second where it needs it.
    """
    for name in sorted(wrap.draft.names):
        if wrap.draft.is_local(wrap.call, name):
            raise Blocked(f"{name} means something else here", f"rename it, or import torch's {name} at the top")


def wraps_parts(wrap: Wrap) -> int | None:
    """The line that shows that a call serves for parts of a model; None if nothing does.

    Its function, or the name of its `partial`, is handed on to others, called for modules inside one another, or called
    in a loop over modules.
    """
    context = wrap.context
    texts: list[str] = []
    for node in _uses(wrap):
        parent = context.parents[node]
        if not (isinstance(parent, ast.Call) and parent.func is node):
            return node.lineno
        first = parent.args[0] if parent.args else None
        texts += [context.source(first)] if first is not None else []
        if _in_loop_over_parts(context, parent):
            return node.lineno
    nested = any(one != other and re.match(rf"{re.escape(one)}[.\[]", other) for one in texts for other in texts)
    return wrap.call.lineno if nested else None


def _uses(wrap: Wrap) -> list[ast.expr]:
    """Where the function around the call is used, or the lambda, or what the `partial` is bound to."""
    context, call = wrap.context, wrap.call
    maker = next((one for one in context.ancestors(call) if isinstance(one, ast.Lambda | Function)), None)
    value = call if wrap.is_partial else maker
    if isinstance(value, Function) and _is_parameter(wrap, value):
        return [one for one in context.loads(value.name) if context.definition(one) is value]
    if not isinstance(value, ast.expr):
        return []
    parent = context.parents[value]
    targets = parent.targets if isinstance(parent, ast.Assign) else []
    if len(targets) != 1 or not isinstance(targets[0], ast.Name):
        return [value]
    return [one for one in context.loads(targets[0].id) if any(b.value is value for b in context.bindings(one))]


def _is_parameter(wrap: Wrap, function: Function) -> bool:
    """Whether the module is handed in; a function that builds the model itself wraps the whole of it."""
    module = wrap.value("module")
    return isinstance(module, ast.Name) and any(one.arg == module.id for one in all_parameters(function.args))


def _in_loop_over_parts(context: FileContext, call: ast.Call) -> bool:
    for parent in context.ancestors(call):
        if isinstance(parent, Function):
            return False
        if isinstance(parent, _LOOPS):
            iterated = [parent.iter] if isinstance(parent, ast.For) else [one.iter for one in parent.generators]
            if any(_PARTS.search(context.source(one)) for one in iterated):
                return True
    return False


def _refuse_private_functions(wrap: Wrap) -> None:
    """The result goes to a function that is private to FSDP1."""
    context, statement = wrap.context, wrap.statement
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    names = {context.source(target) for target in targets}
    home = context.enclosing_function(wrap.call)
    for call in context.calls:
        if context.enclosing_function(call) is not home or not any(context.source(one) in names for one in call.args):
            continue
        if any(origin.startswith("torch.distributed.fsdp._") for origin in context.origins(call.func, raw=True)):
            raise Blocked(
                f"its result goes to {context.source(call.func)} on line {call.lineno}, which is private to FSDP1",
                "find another way to do what that is for",
            )


def _refuse_flat_parameters(wrap: Wrap) -> None:
    """The same function works on the flat parameters."""
    context = wrap.context
    home = context.enclosing_function(wrap.call)
    for node in context.parents:
        if not isinstance(node, ast.Attribute) or node.attr not in FLAT or node.lineno <= wrap.call.lineno:
            continue
        if context.enclosing_function(node) is home:
            raise Blocked(
                f"line {node.lineno} works on its flat parameters, which FSDP2 does not have",
                "do that on the DTensors that model.parameters() gives",
            )


def _refuse_unknown_root(wrap: Wrap) -> None:
    """Mixed precision casts the inputs of the outermost module only: it must be known which one that is."""
    given = wrap.value("mixed_precision")
    if (is_none(given) and not has_stars(wrap)) or wrap.is_inner or _casts_all(wrap, given):
        return
    line = wraps_parts(wrap)
    if line is not None:
        raise Blocked(
            f"its function serves for parts of a model (line {line}), and mixed precision casts the inputs of the "
            "outermost module only",
            "call fully_shard on the parts with cast_forward_inputs=False, then on the model with True",
        )


def _casts_all(wrap: Wrap, node: ast.expr | None) -> bool:
    value = single_value(wrap.context, node) if node is not None else None
    if called_fsdp_name(wrap.context, value) != "MixedPrecision" or not isinstance(value, ast.Call):
        return False
    return any(one.arg == "cast_forward_inputs" and is_constant(one.value, True) for one in value.keywords)


SEEDING_CODE = "SW134"
_SEEDS = re.compile(r"seed", re.IGNORECASE)
_SETS = re.compile(r"^seed_\w+$|^(?!manual_)\w+_seeds?(_\w+)?$", re.IGNORECASE)
"""Functions that seed everything; `manual_seed` and `seed` of other objects do not."""
_RANK = re.compile(r"(?<![a-z])rank|procid|process_index", re.IGNORECASE)
_TORCH = ("torch.manual_seed", "torch.random.manual_seed", "torch.cuda.manual_seed", "torch.cuda.manual_seed_all")
_ELSEWHERE = re.compile(r"^(np|numpy|random)\b|enerator|^rng|Sampler|Loader|ataset|shuffle", re.IGNORECASE)
"""Random numbers that weights are not drawn from."""


def report_seeds(wrap: Wrap, program: Program) -> bool:
    """Whether ranks may hold different weights, which FSDP1 shards as they are and `sw.shard` refuses; say so."""
    place = "" if is_constant(wrap.value("sync_module_states"), True) else seeded_by_rank(wrap.context, program)
    if place:
        wrap.draft.reported(
            SEEDING_CODE,
            wrap.call,
            f"ranks are seeded differently ({place}): weights drawn after that differ; as with FSDP1, each rank keeps "
            "its part of its own",
            "seed all ranks alike until the model is built, or load or broadcast its weights before this line",
        )
    return bool(place)


def seeded_by_rank(context: FileContext, program: Program) -> str:
    """Where the program seeds torch by the rank, in a constructor's file or one that imports it; empty if nowhere."""
    found = _line(context)
    if found is not None:
        return f"line {found}"
    stem = PurePath(context.path).stem
    imports = re.compile(rf"^[ \t]*(from|import)\b[^\n]*\b{re.escape(stem)}\b", re.MULTILINE)
    for other in program.files(lambda text: "seed" in text and _RANK.search(text) and imports.search(text)):
        found = _line(other) if other is not context else None
        if found is not None:
            return f"{other.path}:{found}"
    return ""


def _line(context: FileContext) -> int | None:
    for call in context.calls:
        name = context.source(call.func)
        if _ELSEWHERE.search(name):
            continue
        seeds = [keyword.value for keyword in call.keywords if _SEEDS.search(keyword.arg or "")]
        if context.is_any(call.func, _TORCH) or _SETS.search(name.rpartition(".")[2]):
            seeds = given_to(call)
        if any(_depends_on_rank(context, one) for one in seeds):
            return call.lineno
    return None


def _depends_on_rank(context: FileContext, node: ast.expr, hops: int = 0) -> bool:
    for one in ast.walk(node):
        word = one.id if isinstance(one, ast.Name) else one.attr if isinstance(one, ast.Attribute) else ""
        key = one.value if isinstance(one, ast.Constant) and isinstance(one.value, str) else ""
        if (word and _RANK.search(word)) or key.endswith("RANK"):
            return True
        if isinstance(one, ast.Name) and hops < 2:
            values = [binding.value for binding in context.bindings(one)]
            if any(value is not None and _depends_on_rank(context, value, hops + 1) for value in values):
                return True
    return False


_TORCH_ONLY = {
    "param_init_fn",
    "ignored",
}  # sw.shard averages gradients of ignored parameters, and fills models afterwards
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
        settings.refuse_unknown(wrap, policy)
    else:
        wrap.drop("auto_wrap_policy")
    options = settings.convert_placement(wrap)
    for_helper, features = settings.convert_precision(wrap, has_policy=has_policy)
    options += settings.convert_offload(wrap)
    more, needed = _prepare(wrap)
    for_helper += more
    features |= needed
    picked = settings.classes(wrap, policy) if policy is not None else None
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
    _callee(wrap, draft.helper("_shard_as_told", *FEATURES))
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
        features.add("sync_from_rank0")
    init = wrap.value("param_init_fn")
    if is_none(init):
        wrap.drop("param_init_fn")
    if not is_none(init) or _META.search(wrap.context.text):
        features.add("param_init_fn")
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
    for key, text in [*options, *for_helper]:
        wrap.list.add(text if key == "**" else f"{key}={text}")
    what = "each unit of the policy and the root are sharded" if has_policy else "the whole is one unit"
    if draft.target == "shardwise" and not features & _TORCH_ONLY and not by_parts:
        features |= set() if is_none(wrap.value("mixed_precision")) else {"mp_policy"}
        _callee(wrap, draft.helper("_sw_shard", *features))
        _finish(wrap, what, "sw.shard")
        return
    _callee(wrap, draft.helper("_shard_units", *features) if features else draft.name("fully_shard"))
    _finish(wrap, what)


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


ENABLE_CODE = "SW103"
_WRAP = {"torch.distributed.fsdp.wrap.wrap"}
_ENABLE = {"torch.distributed.fsdp.wrap.enable_wrap"}


def rewrite_chosen_class(draft: FileDraft, program: Program, call: ast.Call) -> None:
    """`wrapper = FSDP if sharded else DDP` and `wrapper(model, ...)`: the choice changes, the call stays.

    Raises:
        Blocked: The name gets its value in another way.
    """
    context = draft.context
    bindings = context.bindings(call.func) if isinstance(call.func, ast.Name) else [Binding(call.func, value=call.func)]
    found = [node for binding in bindings for node in _classes(draft, program, binding)]
    others = [binding for binding in bindings if binding.origin]
    if not found or others or not _is_only_called(draft, call):
        raise Blocked("the class is chosen at run time", "call fully_shard in the branch that means FSDP")
    for node in found:
        if node not in draft.taken:
            draft.replace(node, draft.helper("_shard_as_told", *FEATURES))
    draft.taken.add(call)
    draft.rewritten(CODE, call, "where FSDP is chosen, a function now shards with fully_shard and returns the module")


def _classes(draft: FileDraft, program: Program, binding: Binding) -> list[ast.expr]:
    """The mentions of the class in what a name is given, if it is chosen between values there."""
    if not isinstance(binding.value, ast.IfExp | ast.Name | ast.Attribute):
        return []
    nodes = ast.walk(binding.value)
    mentions = [node for node in nodes if isinstance(node, ast.Name | ast.Attribute)]
    return [node for node in mentions if program.origins(draft.context, node) == {FSDP1}]


def _is_only_called(draft: FileDraft, call: ast.Call) -> bool:
    """Whether the name of the chosen class serves for nothing but calls."""
    context = draft.context
    if not isinstance(call.func, ast.Name):
        return True
    home = context.scope(call.func).find(call.func.id)
    for node in context.loads(call.func.id):
        parent, same = context.parents[node], context.scope(node).find(node.id)
        is_called = isinstance(parent, ast.Call) and parent.func is node
        if home and same and same[0] is home[0] and not is_called:
            return False
    return True


def rewrite_enable_wrap(draft: FileDraft, program: Program) -> None:
    """`enable_wrap(wrapper_cls=FSDP, ...)` takes any function: `wrap` keeps working, on FSDP2."""
    context = draft.context
    for call in draft.calls():
        if not context.is_any(call.func, _ENABLE):
            continue
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        wrapper = given.get("wrapper_cls")
        if wrapper is None or program.origins(context, wrapper) != {FSDP1}:
            continue
        if "mixed_precision" in given or None in given:
            continue  # which inputs FSDP1 casts depends on which module is the root in the end
        draft.replace(wrapper, draft.helper("_shard_as_told", *FEATURES))
        draft.taken.add(call)
        draft.taken.update(one for one in draft.calls() if context.is_any(one.func, _WRAP))
        draft.rewritten(ENABLE_CODE, call, "wrap now calls a function that shards with fully_shard")


def rewrite_constructors(draft: FileDraft, program: Program) -> None:
    """Rewrite every constructor call of a file that can be, and note why the others cannot."""
    inherited = built_subclasses(draft.context, program)
    for call, is_partial in constructors.find(draft.context, program):
        earlier = draft.snapshot()
        try:
            if inherited:
                raise Blocked(f"the file also builds {inherited[0]}, a subclass of FSDP", "move both together")
            if not is_partial and not constructors.is_certain(draft.context, program, call.func):
                rewrite_chosen_class(draft, program, call)
                continue
            wrap = constructors.read(draft, call, is_partial)
            refuse_surroundings(wrap)
            refuse_early_optimizers(draft, wrap)
            rewrite(wrap, program)
            refuse_local_names(wrap)
            apply(draft.context.text, draft.edits)
        except Blocked as blocked:
            draft.restore(earlier)
            constructors.leave(draft, call, blocked)
        except SourceError:
            draft.restore(earlier)
            constructors.leave(draft, call, Blocked("another rewrite touches the same lines", "rewrite it by hand"))
