"""FSDP settings of frameworks in YAML files and keyword arguments."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import yaml

from shardwise.findings import Edit, Severity, SourceFinding, Status
from shardwise.fsdp1.codemod.framework_settings import (
    ACCELERATE_KEYS,
    COMPOSER_FSDP2_KEYS,
    COMPOSER_KEYS,
    COMPUTED,
    Become,
    ConfigConversion,
    Drop,
    Undecided,
    convert_accelerate,
    convert_composer,
    strategy_name,
)
from shardwise.source.edits import apply
from shardwise.source.syntax import FileContext

_INTERPOLATED = re.compile(r"\$\{|\{\{")


def documents(text: str) -> list[yaml.Node]:
    """The root node of each document in a file; none where it is not YAML (a template, say)."""
    try:
        return [node for node in yaml.compose_all(text, Loader=yaml.SafeLoader) if node is not None]
    except (yaml.YAMLError, RecursionError):
        return []


def mappings(node: yaml.Node) -> Iterator[yaml.MappingNode]:
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


def plain(node: yaml.Node) -> Any:
    """A node as a plain Python value; interpolations and tags of other programs are COMPUTED."""
    if isinstance(node, yaml.MappingNode):
        return {str(key.value): plain(value) for key, value in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [plain(one) for one in node.value]
    if _INTERPOLATED.search(node.value) or not node.tag.startswith("tag:yaml.org"):
        return COMPUTED
    try:
        return yaml.SafeLoader("").construct_object(node, deep=True)
    except yaml.YAMLError:
        return COMPUTED


def entry(node: yaml.MappingNode, name: str) -> tuple[yaml.Node, yaml.Node] | None:
    """The key and value nodes of a mapping's entry."""
    return next(((key, value) for key, value in node.value if str(key.value) == name), None)


def conversion_edits(text: str, node: yaml.MappingNode, conversion: ConfigConversion, prefix: str) -> list[Edit]:
    """The edits that carry out a conversion on a block mapping; `prefix` goes before the keys it writes."""
    edits = []
    written: set[str] = set()
    for key, value in node.value:
        match conversion.steps.get(str(key.value).removeprefix(prefix) if prefix else str(key.value)):
            case Drop():
                edits.append(_without_entry(text, key, value))
            case Become(new_key, new_value):
                shown = prefix if not prefix or str(key.value).startswith(prefix) else ""
                edits.append(_replacement(key, shown + new_key))
                edits.append(_replacement(value, as_yaml(new_value)))
                written.add(new_key)
    added = {key: value for key, value in conversion.added.items() if key not in written}
    if added:
        edits.append(_insertion(text, node, [f"{prefix}{key}: {as_yaml(value)}" for key, value in added.items()]))
    return [edit for edit in edits if text[edit.start : edit.end] != edit.text]


def mapping_insertion(text: str, root: yaml.MappingNode, name: str, values: dict[str, Any]) -> Edit:
    """Add a whole new mapping at the end of a block mapping."""
    return _insertion(text, root, [f"{name}:", *(f"  {key}: {as_yaml(value)}" for key, value in values.items())])


def as_yaml(value: Any) -> str:
    """A scalar as YAML writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _replacement(node: yaml.Node, text: str) -> Edit:
    return Edit(start=node.start_mark.index, end=node.end_mark.index, text=text)


def _without_entry(text: str, key: yaml.Node, value: yaml.Node) -> Edit:
    start = text.rfind("\n", 0, key.start_mark.index) + 1
    end = text.find("\n", max(value.end_mark.index - 1, key.end_mark.index))
    return Edit(start=start, end=len(text) if end < 0 else end + 1, text="")


def _insertion(text: str, node: yaml.MappingNode, lines: list[str]) -> Edit:
    """New lines behind the last entry of a block mapping, indented as its first key is."""
    first, last = node.value[0][0], node.value[-1]
    newline = "\r\n" if "\r\n" in text else "\n"
    column = first.start_mark.index - (text.rfind("\n", 0, first.start_mark.index) + 1)
    end = _content_end(last[1], last[0])
    stop = text.find("\n", end)
    block = newline.join(" " * column + line for line in lines)
    if stop < 0:
        return Edit(start=len(text), end=len(text), text=newline + block)
    return Edit(start=stop + 1, end=stop + 1, text=block + newline)


def _content_end(node: yaml.Node, key: yaml.Node) -> int:
    """Where an entry's last character is: PyYAML ends a block collection where the next token starts."""
    while isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        key, node = last if isinstance(last, tuple) else (last, last)
    if isinstance(node, yaml.ScalarNode) and node.style in {"|", ">"}:
        return node.end_mark.index - 1
    return max(node.end_mark.index if node.end_mark.index > node.start_mark.index else 0, key.end_mark.index)


DECIDE = Status.NEEDS_DECISION
ACCELERATE, COMPOSER, LIGHTNING, TRANSFORMERS = "SW181", "SW182", "SW183", "SW184"
NAMES = {
    ACCELERATE: "accelerate-fsdp1",
    COMPOSER: "composer-fsdp1",
    LIGHTNING: "lightning-fsdp1",
    TRANSFORMERS: "transformers-fsdp1",
}
LIGHTNING_FIX = (
    "use ModelParallelStrategy with data_parallel_size = all ranks and tensor_parallel_size = 1, and call fully_shard "
    "on the blocks and then on the model in configure_model (Trainer) or parallelize_fn (Fabric)"
)
TRANSFORMERS_FIX = "set fsdp_version: 2 and reshard_after_forward in fsdp_config, and drop the strategy from fsdp"
_LIGHTNING_STRATEGIES = ("fsdp", "fsdp_native", "fsdp_cpu_offload", "fsdp_native_full_shard_offload")


def may_hold_config(text: str) -> bool:
    """Whether a YAML file is worth parsing."""
    return "fsdp" in text.lower()


def convert_yaml(text: str, path: str) -> tuple[str, list[SourceFinding]]:
    """Move the FSDP1 settings of a YAML file to FSDP2, all of a config or none of it.

    Returns:
        The new text, with every line that did not have to change as it was, and what was found; nothing is found
        in files that hold no FSDP1 settings of a known framework.
    """
    if not may_hold_config(text):
        return text, []
    found: list[SourceFinding] = []
    seen: set[int] = set()  # an anchored config is edited once, where it is written
    for root in documents(text):
        for node in mappings(root):
            found += _findings_in(text, path, root, node, seen)
    edits = [edit for finding in found for edit in finding.edits]
    return apply(text, edits), found


def _findings_in(
    text: str, path: str, root: yaml.Node, node: yaml.MappingNode, seen: set[int]
) -> Iterator[SourceFinding]:
    config = entry(node, "fsdp_config")
    if config is not None and isinstance(config[1], yaml.MappingNode) and config[1].value and id(config[1]) not in seen:
        seen.add(id(config[1]))
        yield from _config(text, path, root, node, config[1])
    yield from _lightning(path, node)


def _config(
    text: str, path: str, root: yaml.Node, node: yaml.MappingNode, config: yaml.MappingNode
) -> list[SourceFinding]:
    settings, around = plain(config), plain(node)
    bare = {key.removeprefix("fsdp_"): value for key, value in settings.items()}
    has_prefix = any(key.startswith("fsdp_") for key in settings)
    if str(around.get("distributed_type")).upper() == "FSDP":
        if str(bare.get("version", 1)) == "2":
            return []
        conversion = convert_accelerate(bare, launched=True, around=around)
        if "parallelism_config" in around and conversion.beside:
            conversion.beside.clear()
            conversion.notes.append("parallelism_config is there already; check its sizes")
        return _converted(text, path, ACCELERATE, node, config, conversion, "fsdp_" if has_prefix else "")
    if "distributed_type" in around:  # accelerate's, for something other than FSDP
        return []
    if has_prefix and "fsdp" in around and bare.keys() <= ACCELERATE_KEYS:
        return [] if str(bare.get("version", 1)) == "2" else [_transformers(path, config)]
    if "sharding_strategy" in settings and settings.keys() & COMPOSER_KEYS - {"sharding_strategy"}:
        if settings.keys() & COMPOSER_FSDP2_KEYS:
            return []
        conversion = convert_composer(settings, around=plain(root))
        return _converted(text, path, COMPOSER, node, config, conversion, "")
    return []


def _converted(
    text: str,
    path: str,
    code: str,
    node: yaml.MappingNode,
    config: yaml.MappingNode,
    conversion: ConfigConversion,
    prefix: str,
) -> list[SourceFinding]:
    """Findings for one config: its edits if every setting converts, otherwise what a person must decide."""
    lines = {str(key.value).removeprefix(prefix) if prefix else str(key.value): key for key, _ in config.value}
    if _cannot_edit(text, node, config):
        message = "this config is written inline or with merge keys, which is not edited"
        fix = "write one setting a line and run again"
        return [_yaml_finding(path, code, config, message, DECIDE, fix)]
    if conversion.blocked:
        return [
            _yaml_finding(
                path, code, lines.get(key, config), _reason(prefix + key if key else "", block), DECIDE, block.fix
            )
            for key, block in conversion.blocked
        ]
    edits = conversion_edits(text, config, conversion, prefix)
    edits += [mapping_insertion(text, node, name, values) for name, values in conversion.beside.items()]
    found = [_yaml_finding(path, code, config, _summary(conversion, prefix), Status.REWRITTEN, edits=edits)]
    for key, step in conversion.steps.items():
        if not isinstance(step, Undecided) and step.note:
            message = f"{prefix}{key}: {step.note}"
            found.append(_yaml_finding(path, code, lines.get(key, config), message, Status.REPORTED))
    return found + [_yaml_finding(path, code, config, note, Status.REPORTED) for note in conversion.notes]


def _reason(key: str, block: Undecided) -> str:
    return f"{key}: {block.why}" if key else block.why


def _cannot_edit(text: str, node: yaml.MappingNode, config: yaml.MappingNode) -> bool:
    keys = [key for key, _ in config.value]
    has_merge = any(str(key.value) == "<<" for key in keys)
    starts = {text.rfind("\n", 0, key.start_mark.index) for key in keys}
    return bool(config.flow_style or node.flow_style or has_merge or len(starts) < len(keys))


def _summary(conversion: ConfigConversion, prefix: str) -> str:
    dropped = [prefix + key for key, step in conversion.steps.items() if isinstance(step, Drop)]
    became = [
        f"{prefix}{key} -> {prefix}{step.key}"
        for key, step in conversion.steps.items()
        if isinstance(step, Become) and step.key != key
    ]
    added = [prefix + key for key in conversion.added] + list(conversion.beside)
    parts = [
        ", ".join(became),
        f"dropped {', '.join(dropped)}" if dropped else "",
        f"added {', '.join(added)}" if added else "",
    ]
    return "FSDP1 config moved to FSDP2: " + ("; ".join(part for part in parts if part) or "no setting had to change")


def _transformers(path: str, config: yaml.MappingNode) -> SourceFinding:
    message = "fsdp_config of a trainer that hands it to accelerate: FSDP1 unless it says fsdp_version: 2"
    return _yaml_finding(path, TRANSFORMERS, config, message, DECIDE, fix=TRANSFORMERS_FIX)


def _lightning(path: str, node: yaml.MappingNode) -> Iterator[SourceFinding]:
    class_path, strategy = entry(node, "class_path"), entry(node, "strategy")
    if class_path is not None and str(class_path[1].value).endswith("FSDPStrategy"):
        arguments = entry(node, "init_args")
        given = plain(arguments[1]) if arguments is not None and isinstance(arguments[1], yaml.MappingNode) else {}
        yield lightning_finding(path, class_path[0].start_mark.line + 1, str(given.get("sharding_strategy", "")))
    elif strategy is not None and isinstance(strategy[1], yaml.ScalarNode):
        siblings = {str(key.value) for key, _ in node.value}
        if strategy[1].value in _LIGHTNING_STRATEGIES and siblings & {"accelerator", "devices", "num_nodes"}:
            yield lightning_finding(path, strategy[0].start_mark.line + 1, "")


def lightning_finding(path: str, line: int, strategy: str) -> SourceFinding:
    """Lightning's FSDPStrategy has no drop-in successor: what a person has to write."""
    strategy = strategy_name(strategy) or "FULL_SHARD"
    more = {
        "SHARD_GRAD_OP": "; pass reshard_after_forward=False for SHARD_GRAD_OP",
        "NO_SHARD": "; for NO_SHARD use strategy='ddp' instead",
        "HYBRID_SHARD": "; for HYBRID_SHARD build a (replicate, shard) mesh yourself: its own has no replicate axis",
    }.get(strategy, "")
    message = "Lightning's FSDPStrategy is FSDP1; for FSDP2 the model shards itself"
    return _finding(path, line, 1, LIGHTNING, message, DECIDE, LIGHTNING_FIX + more)


def _yaml_finding(
    path: str, code: str, node: yaml.Node, message: str, status: Status, fix: str = "", edits: Sequence[Edit] = ()
) -> SourceFinding:
    mark = node.start_mark
    return _finding(path, mark.line + 1, mark.column + 1, code, message, status, fix, tuple(edits))


def _finding(
    path: str,
    line: int,
    column: int,
    code: str,
    message: str,
    status: Status,
    fix: str,
    edits: tuple[Edit, ...] = (),
    end_line: int = 0,
) -> SourceFinding:
    return SourceFinding(
        code=code,
        name=NAMES[code],
        message=message,
        where=f"{path}:{line}:{column}",
        severity=Severity.NOTE if status is Status.REPORTED else Severity.WARNING,
        fix=fix,
        path=path,
        line=line,
        column=column,
        end_line=end_line,
        status=status,
        edits=edits,
    )


_WORDS = ("accelerate", "composer", "lightning", "transformers", "trl")
_NAMED = re.compile(r"fsdp|FullySharded", re.IGNORECASE)
_ENUMS = ("ShardingStrategy", "BackwardPrefetch", "StateDictType")
_LIGHTNING_CLASSES = ("FSDPStrategy", "DDPFullyShardedNativeStrategy")


def framework_findings(file: FileContext) -> list[SourceFinding]:
    """What a file hands to a framework for FSDP1, with edits where every setting converts."""
    if not any(word in file.text for word in _WORDS) or not _NAMED.search(file.text):
        return []
    found: list[SourceFinding] = []
    for call in file.calls:
        for origin in sorted(file.callee(call).origins):
            found += _of_call(file, call, origin.split(".")[0], origin.rsplit(".", 1)[-1])
    return found


def _of_call(file: FileContext, call: ast.Call, package: str, name: str) -> Iterator[SourceFinding]:
    match package, name:
        case "accelerate", "FullyShardedDataParallelPlugin":
            yield from _plugin(file, call)
        case "composer", "Trainer":
            yield from _composer(file, call)
        case (("lightning" | "pytorch_lightning" | "lightning_fabric"), _) if name in _LIGHTNING_CLASSES:
            strategy = _keyword(call, "sharding_strategy")
            yield lightning_finding(file.path, call.lineno, str(_value(file, strategy.value)) if strategy else "")
        case (("lightning" | "pytorch_lightning" | "lightning_fabric"), ("Trainer" | "Fabric")):
            strategy = _keyword(call, "strategy")
            if strategy is not None and str(_value(file, strategy.value)).startswith("fsdp"):
                yield lightning_finding(file.path, strategy.value.lineno, "")
        case (("transformers" | "trl"), _) if name.endswith(("TrainingArguments", "Config")):
            yield from _training_arguments(file, call)


def _plugin(file: FileContext, call: ast.Call) -> Iterator[SourceFinding]:
    """`FullyShardedDataParallelPlugin(...)`: rewritten when it names its strategy and every keyword converts."""
    version = _keyword(call, "fsdp_version")
    if version is not None and _value(file, version.value) != 1:
        return
    if call.args or any(keyword.arg is None for keyword in call.keywords):
        message = "the plugin's settings are not all written as keywords here"
        yield _keyword_finding(file, call, ACCELERATE, message, DECIDE, "pass fsdp_version=2 and FSDP2's settings")
        return
    settings = {str(keyword.arg).removeprefix("fsdp_"): _value(file, keyword.value) for keyword in call.keywords}
    if "sharding_strategy" not in settings:
        message = "which FSDP this plugin uses is the launcher's choice, as no sharding_strategy is given"
        fix = "set fsdp_version: 2 in the launcher's config (`shardwise migrate` converts it), or pass fsdp_version=2"
        yield _keyword_finding(file, call, ACCELERATE, message, Status.REPORTED, fix=fix)
        return
    conversion = convert_accelerate(settings, launched=False, around={})
    if conversion.blocked:
        for key, block in conversion.blocked:
            at = _keyword(call, key) or _keyword(call, f"fsdp_{key}")
            node = at.value if at else call
            yield _keyword_finding(file, node, ACCELERATE, _reason(key, block), DECIDE, block.fix)
        return
    edits = _keyword_edits(file, call, conversion)
    message = "FullyShardedDataParallelPlugin moved to fsdp_version=2"
    yield _keyword_finding(file, call, ACCELERATE, message, Status.REWRITTEN, edits=edits)


def _keyword_edits(file: FileContext, call: ast.Call, conversion: ConfigConversion) -> Iterator[Edit]:
    """Drop and rename keywords; `fsdp_version=2` goes where the strategy was."""
    spans = [file.positions.span(keyword) for keyword in call.keywords]
    steps = [conversion.steps.get(str(keyword.arg).removeprefix("fsdp_")) for keyword in call.keywords]
    kept = [index for index, step in enumerate(steps) if not isinstance(step, Drop)]
    for index, (keyword, step, (start, end)) in enumerate(zip(call.keywords, steps, spans, strict=True)):
        if isinstance(step, Drop):
            if index < kept[-1]:
                yield Edit(start=start, end=spans[index + 1][0], text="")
            else:
                yield Edit(start=spans[index - 1][1], end=end, text="")
        elif isinstance(step, Become):
            text = f"fsdp_version={step.value}" if step.key == "version" else f"{step.key}={step.value}"
            if keyword.arg == "sharding_strategy" and "version" in conversion.added:
                text = f"fsdp_version=2,{_gap(file, call, start)}{text}"
            yield Edit(start=start, end=end, text=text)


def _gap(file: FileContext, call: ast.Call, start: int) -> str:
    """What separates keywords: a new line with the same indentation where each has its own line."""
    before = file.text[file.text.rfind("\n", 0, start) + 1 : start]
    newline = "\r\n" if "\r\n" in file.text else "\n"
    has_own_lines = len({keyword.lineno for keyword in call.keywords}) == len(call.keywords)
    return newline + before if before.isspace() and has_own_lines else " "


def _composer(file: FileContext, call: ast.Call) -> Iterator[SourceFinding]:
    """`Trainer(parallelism_config={"fsdp": {...}})` and the older `fsdp_config={...}`."""
    given = _keyword(call, "parallelism_config") or _keyword(call, "fsdp_config")
    if given is None:
        return
    config = _dict(file, given.value)
    if given.arg == "parallelism_config" and config is not None:
        config = next((_dict(file, value) for key, value in _items(config) if key == "fsdp"), None)
        if config is None:
            return
    fix = 'pass parallelism_config={"fsdp": FSDP2Config(...)} with FSDP2\'s settings'
    if config is None:
        message = "Composer's FSDP settings are not written out here"
        status = DECIDE if given.arg == "fsdp_config" else Status.REPORTED
        yield _keyword_finding(file, given.value, COMPOSER, message, status, fix=fix)
        return
    settings = {key: _value(file, value) for key, value in _items(config)}
    if settings.keys() & COMPOSER_FSDP2_KEYS:
        return
    conversion = convert_composer(settings, around={})
    for key, block in conversion.blocked:
        yield _keyword_finding(file, config, COMPOSER, _reason(key, block), DECIDE, block.fix)
    if not conversion.blocked:
        shown = f'parallelism_config={{"fsdp": {_as_config(file, config, conversion)}}}'
        message = "Composer's FSDP1 settings; each has a place in FSDP2Config"
        yield _keyword_finding(file, given.value, COMPOSER, message, DECIDE, fix=f"pass {shown}")


def _as_config(file: FileContext, config: ast.Dict, conversion: ConfigConversion) -> str:
    """The call of FSDP2Config that a dict of FSDP1 settings becomes."""
    parts = []
    for key, value in _items(config):
        match conversion.steps.get(key):
            case Become(new_key, new_value):
                parts.append(f"{new_key}={new_value!r}")
            case Drop() | Undecided():
                pass
            case _:
                parts.append(f"{key}={file.source(value)}")
    parts += [f"{key}={value!r}" for key, value in conversion.added.items()]
    return f"FSDP2Config({', '.join(parts)})"


def _training_arguments(file: FileContext, call: ast.Call) -> Iterator[SourceFinding]:
    """`TrainingArguments(fsdp="full_shard auto_wrap", fsdp_config={...})`: FSDP1 unless fsdp_config says otherwise."""
    switch, config = _keyword(call, "fsdp"), _keyword(call, "fsdp_config")
    if switch is None or _value(file, switch.value) in ("", None, False, []):
        return
    written = _dict(file, config.value) if config else None
    settings = dict(_items(written)) if written else {}
    version = next((settings[key] for key in ("fsdp_version", "version") if key in settings), None)
    if version is not None and str(_value(file, version)) == "2":
        return
    message = "fsdp= of the trainer's arguments is FSDP1 unless fsdp_config says fsdp_version: 2"
    yield _keyword_finding(file, switch.value, TRANSFORMERS, message, DECIDE, fix=TRANSFORMERS_FIX)


def _keyword(call: ast.Call, name: str) -> ast.keyword | None:
    return next((keyword for keyword in call.keywords if keyword.arg == name), None)


def _value(file: FileContext, node: ast.expr) -> Any:
    """A literal's value, an enum member as `Class.NAME`, a name assigned one literal; everything else is COMPUTED."""
    if isinstance(node, ast.Name):
        bindings = file.bindings(node)
        if len(bindings) == 1 and isinstance(bindings[0].value, ast.Constant | ast.Attribute):
            node = bindings[0].value
    if isinstance(node, ast.Attribute):
        enum = next((one for one in _ENUMS if any(f".{one}." in origin for origin in file.origins(node))), None)
        return f"{enum}.{node.attr}" if enum else COMPUTED
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return COMPUTED


def _dict(file: FileContext, node: ast.expr) -> ast.Dict | None:
    """A dict with constant keys, written here or assigned once to the name used here."""
    if isinstance(node, ast.Name):
        bindings = file.bindings(node)
        if len(bindings) == 1 and bindings[0].value is not None:
            node = bindings[0].value
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
        return node
    return None


def _items(node: ast.Dict) -> list[tuple[str, ast.expr]]:
    return [
        (str(key.value), value)
        for key, value in zip(node.keys, node.values, strict=True)
        if isinstance(key, ast.Constant)
    ]


def _keyword_finding(
    file: FileContext,
    node: ast.expr,
    code: str,
    message: str,
    status: Status,
    fix: str = "",
    edits: Iterable[Edit] = (),
) -> SourceFinding:
    column = file.positions.column(node.lineno, file.positions.span(node)[0])
    end_line = node.end_lineno or node.lineno
    return _finding(file.path, node.lineno, column, code, message, status, fix, tuple(edits), end_line)
