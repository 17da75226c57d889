"""FSDP settings of frameworks in YAML files and keyword arguments."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from shardwise.config.fsdp1_names import member_name
from shardwise.findings import Edit, SourceFinding, Status, source_finding
from shardwise.fsdp1.codemod import framework_settings
from shardwise.fsdp1.codemod.constructors import read_arguments
from shardwise.fsdp1.codemod.draft import finding_at, status_fields
from shardwise.fsdp1.codemod.framework_settings import COMPUTED, Become, ConfigConversion, Drop, Undecided
from shardwise.fsdp1.codemod.program import single_value
from shardwise.source.edits import apply, change
from shardwise.source.syntax import FileContext

ACCELERATE, COMPOSER, LIGHTNING, TRANSFORMERS = "SW181", "SW182", "SW183", "SW184"
DECIDE = Status.NEEDS_DECISION
LIGHTNING_WHAT = "Lightning's FSDPStrategy is FSDP1; for FSDP2 the model shards itself"
LIGHTNING_FIX = (
    "use ModelParallelStrategy with data_parallel_size = all ranks and tensor_parallel_size = 1, and call fully_shard "
    "on the blocks and then on the model in configure_model (Trainer) or parallelize_fn (Fabric)"
)
_LIGHTNING_MORE = {
    "SHARD_GRAD_OP": "; pass reshard_after_forward=False for SHARD_GRAD_OP",
    "NO_SHARD": "; for NO_SHARD use strategy='ddp' instead",
    "HYBRID_SHARD": "; for HYBRID_SHARD build a (replicate, shard) mesh yourself: its own has no replicate axis",
}
TRANSFORMERS_FIX = "set fsdp_version: 2 and reshard_after_forward in fsdp_config, and drop the strategy from fsdp"
_LIGHTNING_STRATEGIES = ("fsdp", "fsdp_native", "fsdp_cpu_offload", "fsdp_native_full_shard_offload")
_INTERPOLATED = re.compile(r"\$\{|\{\{")


def may_hold_config(text: str) -> bool:
    """Whether a YAML file is worth parsing."""
    return "fsdp" in text.lower()


def convert_yaml(text: str, path: str) -> tuple[str, list[SourceFinding]]:
    """Move the FSDP1 settings of a YAML file to FSDP2, all of a config or none of it.

    Returns:
        The new text, with every line that did not have to change as it was, and what was found; nothing is found
        in files that hold no FSDP1 settings of a known framework.
    """
    try:
        roots = list(yaml.compose_all(text, Loader=yaml.SafeLoader)) if may_hold_config(text) else []
    except (yaml.YAMLError, RecursionError):
        roots = []  # a template, say
    found: list[SourceFinding] = []
    seen: set[int] = set()  # an anchored config is edited once, where it is written
    for root in roots:
        for node in _mappings(root) if root is not None else ():
            config = _entry(node, "fsdp_config")
            if config is not None and isinstance(config[1], yaml.MappingNode) and config[1].value:
                found += _yaml_config(text, path, root, node, config[1]) if id(config[1]) not in seen else []
                seen.add(id(config[1]))
            found += _yaml_lightning(path, node)
    return apply(text, [edit for finding in found for edit in finding.edits]), found


def _mappings(node: yaml.Node) -> Iterator[yaml.MappingNode]:
    """Every mapping of a document, outermost first, each one once."""
    seen: set[int] = set()
    pending = [node]
    while pending:
        one = pending.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, yaml.MappingNode):
            yield one
            pending += [value for _, value in reversed(one.value)]
        elif isinstance(one, yaml.SequenceNode):
            pending += reversed(one.value)


def _plain(node: yaml.Node) -> Any:
    """A node as a plain Python value; interpolations and tags of other programs are COMPUTED."""
    if isinstance(node, yaml.MappingNode):
        return {str(key.value): _plain(value) for key, value in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [_plain(one) for one in node.value]
    if _INTERPOLATED.search(node.value) or not node.tag.startswith("tag:yaml.org"):
        return COMPUTED
    try:
        return yaml.SafeLoader("").construct_object(node, deep=True)
    except yaml.YAMLError:
        return COMPUTED


def _entry(node: yaml.MappingNode, name: str) -> tuple[yaml.Node, yaml.Node] | None:
    """The key and value nodes of a mapping's entry."""
    return next(((key, value) for key, value in node.value if str(key.value) == name), None)


def _yaml_config(
    text: str, path: str, root: yaml.Node, node: yaml.MappingNode, config: yaml.MappingNode
) -> list[SourceFinding]:
    settings, around = _plain(config), _plain(node)
    bare = {key.removeprefix("fsdp_"): value for key, value in settings.items()}
    has_prefix = any(key.startswith("fsdp_") for key in settings)
    is_fsdp2 = str(bare.get("version", 1)) == "2"
    if str(around.get("distributed_type")).upper() == "FSDP" and not is_fsdp2:
        conversion = framework_settings.convert_accelerate(bare, launched=True, around=around)
        for key in [key for key in settings if has_prefix and not key.startswith("fsdp_")]:
            why = f"accelerate reads only settings that start with fsdp_, not {key}"
            conversion.blocks.append(Undecided(why, f"write fsdp_{key} if that was meant, or remove it"))
        if "parallelism_config" in around and conversion.beside:
            conversion.beside.clear()
            conversion.notes.append("parallelism_config is there already; check its sizes")
        return _yaml_converted(text, path, ACCELERATE, node, config, conversion, "fsdp_" if has_prefix else "")
    if "distributed_type" in around:  # accelerate's, for FSDP2 or for something other than FSDP
        return []
    if has_prefix and "fsdp" in around and bare.keys() <= framework_settings.ACCELERATE_KEYS:
        message = "fsdp_config of a trainer that hands it to accelerate: FSDP1 unless it says fsdp_version: 2"
        return [] if is_fsdp2 else [_yaml_finding(path, TRANSFORMERS, config, message, DECIDE, TRANSFORMERS_FIX)]
    is_composers = "sharding_strategy" in settings and settings.keys() & framework_settings.COMPOSER_KEYS - {
        "sharding_strategy"
    }
    if not is_composers or settings.keys() & framework_settings.COMPOSER_FSDP2_KEYS:
        return []
    conversion = framework_settings.convert_composer(settings, around=_plain(root))
    return _yaml_converted(text, path, COMPOSER, node, config, conversion, "")


def _yaml_converted(
    text: str,
    path: str,
    code: str,
    node: yaml.MappingNode,
    config: yaml.MappingNode,
    conversion: ConfigConversion,
    prefix: str,
) -> list[SourceFinding]:
    """Findings for one config: its edits if every setting converts, otherwise what a person must decide."""
    lines = {str(key.value).removeprefix(prefix): key for key, _ in config.value}
    starts = {text.rfind("\n", 0, key.start_mark.index) for key in lines.values()}
    if config.flow_style or node.flow_style or "<<" in lines or len(starts) < len(config.value):
        message = "this config is written inline or with merge keys, which is not edited"
        return [_yaml_finding(path, code, config, message, DECIDE, "write one setting a line and run again")]
    if conversion.blocked:
        return [
            _yaml_finding(path, code, lines.get(key, config), _reason(key, block, prefix), DECIDE, block.fix)
            for key, block in conversion.blocked
        ]
    edits = _conversion_edits(text, config, conversion, prefix)
    for name, values in conversion.beside.items():
        edits.append(_insertion(text, node, [f"{name}:", *(f"  {key}: {value}" for key, value in values.items())]))
    found = [_yaml_finding(path, code, config, _summary(conversion, prefix), Status.REWRITTEN, edits=edits)]
    notes = [(key, getattr(step, "note", "")) for key, step in conversion.steps.items()]
    told = [(lines.get(key, config), f"{prefix}{key}: {note}") for key, note in notes if note]
    told += [(config, note) for note in conversion.notes]
    return found + [_yaml_finding(path, code, at, message, Status.REPORTED) for at, message in told]


def _reason(key: str, block: Undecided, prefix: str = "") -> str:
    return f"{prefix}{key}: {block.why}" if key else block.why


def _summary(conversion: ConfigConversion, prefix: str) -> str:
    steps = conversion.steps.items()
    became = [f"{prefix}{key} -> {prefix}{one.key}" for key, one in steps if isinstance(one, Become) and one.key != key]
    dropped = [prefix + key for key, one in steps if isinstance(one, Drop)]
    added = [*(prefix + key for key in conversion.added), *conversion.beside]
    parts = [", ".join(became)]
    parts += [f"{verb} {', '.join(keys)}" for verb, keys in (("dropped", dropped), ("added", added)) if keys]
    return "FSDP1 config moved to FSDP2: " + ("; ".join(filter(None, parts)) or "no setting had to change")


def _conversion_edits(text: str, node: yaml.MappingNode, conversion: ConfigConversion, prefix: str) -> list[Edit]:
    """The edits that carry out a conversion on a block mapping; `prefix` goes before the keys it writes."""
    edits, written = [], set[str]()
    for key, value in node.value:
        old_key = str(key.value)
        match conversion.steps.get(old_key.removeprefix(prefix)):
            case Drop():
                start = text.rfind("\n", 0, key.start_mark.index) + 1
                end = text.find("\n", max(value.end_mark.index - 1, key.end_mark.index))
                edits.append(change(start, len(text) if end < 0 else end + 1, ""))
            case Become(new_key, new_value):
                shown = prefix if old_key.startswith(prefix) else ""
                for one, new in ((key, shown + new_key), (value, _as_yaml(new_value))):
                    edits.append(change(one.start_mark.index, one.end_mark.index, new))
                written.add(new_key)
    added = [f"{prefix}{key}: {_as_yaml(one)}" for key, one in conversion.added.items() if key not in written]
    edits += [_insertion(text, node, added)] if added else []
    return [edit for edit in edits if text[edit.start : edit.end] != edit.text]


def _as_yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _insertion(text: str, mapping: yaml.MappingNode, lines: list[str]) -> Edit:
    """New lines behind the last entry of a block mapping, indented as its first key is."""
    newline = "\r\n" if "\r\n" in text else "\n"
    first = mapping.value[0][0].start_mark.index
    indent = " " * (first - (text.rfind("\n", 0, first) + 1))
    key, node = mapping.value[-1]
    while isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]  # PyYAML ends a block collection where the next token starts
        key, node = last if isinstance(last, tuple) else (last, last)
    end = max(node.end_mark.index if node.end_mark.index > node.start_mark.index else 0, key.end_mark.index)
    if isinstance(node, yaml.ScalarNode) and node.style in {"|", ">"}:
        end = node.end_mark.index - 1
    stop = text.find("\n", end)
    block = newline.join(indent + line for line in lines)
    return change(len(text), len(text), newline + block) if stop < 0 else change(stop + 1, stop + 1, block + newline)


def _yaml_lightning(path: str, node: yaml.MappingNode) -> Iterator[SourceFinding]:
    class_path, strategy = _entry(node, "class_path"), _entry(node, "strategy")
    if class_path is not None and str(class_path[1].value).endswith("FSDPStrategy"):
        arguments = _plain(node).get("init_args")
        given = arguments.get("sharding_strategy", "") if isinstance(arguments, dict) else ""
        yield _yaml_finding(path, LIGHTNING, class_path[0], LIGHTNING_WHAT, DECIDE, _lightning_fix(given))
    elif strategy is not None and isinstance(strategy[1], yaml.ScalarNode):
        siblings = {str(key.value) for key, _ in node.value}
        if strategy[1].value in _LIGHTNING_STRATEGIES and siblings & {"accelerator", "devices", "num_nodes"}:
            yield _yaml_finding(path, LIGHTNING, strategy[0], LIGHTNING_WHAT, DECIDE, LIGHTNING_FIX)


def _lightning_fix(strategy: object) -> str:
    return LIGHTNING_FIX + _LIGHTNING_MORE.get(member_name(strategy) or "", "")


def _yaml_finding(
    path: str, code: str, node: yaml.Node, message: str, status: Status, fix: str = "", edits: Sequence[Edit] = ()
) -> SourceFinding:
    more = {"message": message, "fix": fix, "edits": tuple(edits)}
    mark = node.start_mark
    return source_finding(path, mark.line + 1, mark.column + 1, **status_fields(code, status), **more)


_WORDS = ("accelerate", "composer", "lightning", "transformers", "trl")
_NAMED = re.compile(r"fsdp|FullySharded", re.IGNORECASE)
_ENUMS = ("ShardingStrategy", "BackwardPrefetch", "StateDictType")


def framework_findings(file: FileContext) -> list[SourceFinding]:
    """What a file hands to a framework for FSDP1, with edits where every setting converts."""
    if not any(word in file.text for word in _WORDS) or not _NAMED.search(file.text):
        return []
    origins = [(call, origin.split(".")) for call in file.calls for origin in sorted(file.callee(call).origins)]
    return [one for call, parts in origins for one in _of_call(file, call, parts[0], parts[-1])]


def _of_call(file: FileContext, call: ast.Call, package: str, name: str) -> Iterator[SourceFinding]:
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    match package, name:
        case "accelerate", "FullyShardedDataParallelPlugin":
            yield from _plugin(file, call, given)
        case "composer", "Trainer":
            yield from _composer(file, given)
        case (("lightning" | "pytorch_lightning" | "lightning_fabric"), _):
            strategy = given.get("strategy")
            if name in ("FSDPStrategy", "DDPFullyShardedNativeStrategy"):
                sharding = given.get("sharding_strategy")
                fix = _lightning_fix(_value(file, sharding) if sharding else "")
                yield finding_at(file, call, LIGHTNING, LIGHTNING_WHAT, DECIDE, fix)
            elif name in ("Trainer", "Fabric") and strategy and str(_value(file, strategy)).startswith("fsdp"):
                yield finding_at(file, strategy, LIGHTNING, LIGHTNING_WHAT, DECIDE, LIGHTNING_FIX)
        case (("transformers" | "trl"), _) if name.endswith(("TrainingArguments", "Config")):
            yield from _training_arguments(file, given)


def _plugin(file: FileContext, call: ast.Call, given: dict[str | None, ast.expr]) -> Iterator[SourceFinding]:
    """`FullyShardedDataParallelPlugin(...)`: rewritten when it names its strategy and every keyword converts."""
    if "fsdp_version" in given and _value(file, given["fsdp_version"]) != 1:
        return
    if call.args or None in given:
        message = "the plugin's settings are not all written as keywords here"
        yield finding_at(file, call, ACCELERATE, message, DECIDE, "pass fsdp_version=2 and FSDP2's settings")
        return
    settings = {str(key).removeprefix("fsdp_"): _value(file, value) for key, value in given.items()}
    if "sharding_strategy" not in settings:
        message = "which FSDP this plugin uses is the launcher's choice, as no sharding_strategy is given"
        fix = "set fsdp_version: 2 in the launcher's config (`shardwise migrate` converts it), or pass fsdp_version=2"
        yield finding_at(file, call, ACCELERATE, message, Status.REPORTED, fix)
        return
    conversion = framework_settings.convert_accelerate(settings, launched=False, around={})
    for key, block in conversion.blocked:
        node = given.get(key) or given.get(f"fsdp_{key}") or call
        yield finding_at(file, node, ACCELERATE, _reason(key, block), DECIDE, block.fix)
    if not conversion.blocked:
        message, edits = (
            "FullyShardedDataParallelPlugin moved to fsdp_version=2",
            _keyword_edits(file, call, conversion),
        )
        yield finding_at(file, call, ACCELERATE, message, Status.REWRITTEN, edits=edits)


def _keyword_edits(file: FileContext, call: ast.Call, conversion: ConfigConversion) -> list[Edit]:
    """Drop and rename keywords; `fsdp_version=2` goes where the strategy was."""
    listed = read_arguments(file, call)
    for argument in listed.arguments:
        step = conversion.steps.get(argument.name.removeprefix("fsdp_"))
        argument.is_dropped = isinstance(step, Drop)
        if isinstance(step, Become):
            text = f"{'fsdp_' if step.key == 'version' else ''}{step.key}={step.value}"
            if argument.name == "sharding_strategy" and "version" in conversion.added:
                before = file.text[file.text.rfind("\n", 0, argument.start) + 1 : argument.start]
                has_own_lines = len({keyword.lineno for keyword in call.keywords}) == len(call.keywords)
                newline = "\r\n" if "\r\n" in file.text else "\n"
                text = f"fsdp_version=2,{newline + before if before.isspace() and has_own_lines else ' '}{text}"
            listed.replace(argument, text)
    return listed.edits()


def _composer(file: FileContext, given: dict[str | None, ast.expr]) -> Iterator[SourceFinding]:
    """`Trainer(parallelism_config={"fsdp": {...}})` and the older `fsdp_config={...}`."""
    outer = given.get("parallelism_config")
    written = outer or given.get("fsdp_config")
    if written is None:
        return
    config = _items(file, written)
    if outer is not None and config is not None:
        written_config = config.get("fsdp", outer)
        config = _items(file, written_config) if "fsdp" in config else None
        if config is None:
            return
    elif config is None:
        message = "Composer's FSDP settings are not written out here"
        fix = 'pass parallelism_config={"fsdp": FSDP2Config(...)} with FSDP2\'s settings'
        yield finding_at(file, written, COMPOSER, message, Status.REPORTED if outer else DECIDE, fix)
        return
    else:
        written_config = written
    settings = {key: _value(file, value) for key, value in config.items()}
    if settings.keys() & framework_settings.COMPOSER_FSDP2_KEYS:
        return
    conversion = framework_settings.convert_composer(settings, around={})
    for key, block in conversion.blocked:
        at = single_value(file, written_config)
        yield finding_at(file, at, COMPOSER, _reason(key, block), DECIDE, block.fix)
    if not conversion.blocked:
        became = {key: step for key, step in conversion.steps.items() if isinstance(step, Become)}
        parts = [
            f"{became[key].key}={became[key].value!r}" if key in became else f"{key}={file.source(value)}"
            for key, value in config.items()
            if not isinstance(conversion.steps.get(key), Drop)
        ]
        parts += [f"{key}={value!r}" for key, value in conversion.added.items()]
        fix = f'pass parallelism_config={{"fsdp": FSDP2Config({", ".join(parts)})}}'
        message = "Composer's FSDP1 settings; each has a place in FSDP2Config"
        yield finding_at(file, written, COMPOSER, message, DECIDE, fix)


def _training_arguments(file: FileContext, given: dict[str | None, ast.expr]) -> Iterator[SourceFinding]:
    """`TrainingArguments(fsdp="full_shard auto_wrap", fsdp_config={...})`: FSDP1 unless fsdp_config says otherwise."""
    switch, config = given.get("fsdp"), given.get("fsdp_config")
    if switch is None or _value(file, switch) in ("", None, False, []):
        return
    settings = (_items(file, config) if config is not None else None) or {}
    version = settings.get("fsdp_version") or settings.get("version")
    if version is None or str(_value(file, version)) != "2":
        message = "fsdp= of the trainer's arguments is FSDP1 unless fsdp_config says fsdp_version: 2"
        yield finding_at(file, switch, TRANSFORMERS, message, DECIDE, TRANSFORMERS_FIX)


def _value(file: FileContext, node: ast.expr) -> Any:
    """A literal's value, an enum member as `Class.NAME`, a name assigned one literal; everything else is COMPUTED."""
    resolved = single_value(file, node)
    node = resolved if isinstance(resolved, ast.Constant | ast.Attribute) else node
    if isinstance(node, ast.Attribute):
        enum = next((one for one in _ENUMS if any(f".{one}." in origin for origin in file.origins(node))), None)
        return f"{enum}.{node.attr}" if enum else COMPUTED
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return COMPUTED


def _items(file: FileContext, node: ast.expr) -> dict[str, ast.expr] | None:
    """The entries of a dict with constant keys, written here or assigned once to the name used here."""
    node = single_value(file, node)
    keys = [key.value for key in node.keys if isinstance(key, ast.Constant)] if isinstance(node, ast.Dict) else []
    if not isinstance(node, ast.Dict) or len(keys) < len(node.keys):
        return None
    return dict(zip(map(str, keys), node.values, strict=True))
