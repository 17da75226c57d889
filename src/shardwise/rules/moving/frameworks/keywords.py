"""FSDP1 settings passed to a framework from Python: plugin keywords, trainer arguments, strategies."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

from shardwise.findings import Edit, Severity, SourceFinding, Status
from shardwise.rules.moving.frameworks import accelerate, composer
from shardwise.rules.moving.frameworks.settings import COMPUTED, Become, Block, Conversion, Drop
from shardwise.rules.moving.frameworks.yaml_files import (
    ACCELERATE,
    COMPOSER,
    NAMES,
    TRANSFORMERS,
    TRANSFORMERS_FIX,
    lightning_finding,
)
from shardwise.rules.source import FileContext

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
        yield _finding(
            file, call, ACCELERATE, message, Status.NEEDS_DECISION, fix="pass fsdp_version=2 and FSDP2's settings"
        )
        return
    settings = {str(keyword.arg).removeprefix("fsdp_"): _value(file, keyword.value) for keyword in call.keywords}
    if "sharding_strategy" not in settings:
        message = "which FSDP this plugin uses is the launcher's choice, as no sharding_strategy is given"
        fix = "set fsdp_version: 2 in the launcher's config (`shardwise migrate` converts it), or pass fsdp_version=2"
        yield _finding(file, call, ACCELERATE, message, Status.REPORTED, fix=fix)
        return
    conversion = accelerate.convert_settings(settings, launched=False, around={})
    if conversion.blocked:
        for key, block in conversion.blocked:
            at = _keyword(call, key) or _keyword(call, f"fsdp_{key}")
            message = f"{key + ': ' if key else ''}{block.why}"
            yield _finding(file, at.value if at else call, ACCELERATE, message, Status.NEEDS_DECISION, fix=block.fix)
        return
    edits = tuple(_keyword_edits(file, call, conversion))
    message = "FullyShardedDataParallelPlugin moved to fsdp_version=2"
    yield _finding(file, call, ACCELERATE, message, Status.REWRITTEN, edits=edits)


def _keyword_edits(file: FileContext, call: ast.Call, conversion: Conversion) -> Iterator[Edit]:
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
        status = Status.NEEDS_DECISION if given.arg == "fsdp_config" else Status.REPORTED
        yield _finding(file, given.value, COMPOSER, message, status, fix=fix)
        return
    settings = {key: _value(file, value) for key, value in _items(config)}
    if settings.keys() & composer.FSDP2_KEYS:
        return
    conversion = composer.convert_settings(settings, around={})
    for key, block in conversion.blocked:
        message = f"{key + ': ' if key else ''}{block.why}"
        yield _finding(file, config, COMPOSER, message, Status.NEEDS_DECISION, fix=block.fix)
    if not conversion.blocked:
        shown = f'parallelism_config={{"fsdp": {_as_config(file, config, conversion)}}}'
        message = "Composer's FSDP1 settings; each has a place in FSDP2Config"
        yield _finding(file, given.value, COMPOSER, message, Status.NEEDS_DECISION, fix=f"pass {shown}")


def _as_config(file: FileContext, config: ast.Dict, conversion: Conversion) -> str:
    """The call of FSDP2Config that a dict of FSDP1 settings becomes."""
    parts = []
    for key, value in _items(config):
        match conversion.steps.get(key):
            case Become(new_key, new_value):
                parts.append(f"{new_key}={new_value!r}")
            case Drop() | Block():
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
    yield _finding(file, switch.value, TRANSFORMERS, message, Status.NEEDS_DECISION, fix=TRANSFORMERS_FIX)


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


def _finding(
    file: FileContext,
    node: ast.expr,
    code: str,
    message: str,
    status: Status,
    *,
    fix: str = "",
    edits: tuple[Edit, ...] = (),
) -> SourceFinding:
    start, _ = file.positions.span(node)
    column = file.positions.column(node.lineno, start)
    return SourceFinding(
        code=code,
        name=NAMES[code],
        message=message,
        where=f"{file.path}:{node.lineno}:{column}",
        severity=Severity.NOTE if status is Status.REPORTED else Severity.WARNING,
        fix=fix,
        path=file.path,
        line=node.lineno,
        column=column,
        end_line=node.end_lineno or node.lineno,
        status=status,
        edits=edits,
    )
