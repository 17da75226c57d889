"""FSDP1 settings in YAML files: accelerate's and Composer's are converted, Lightning's and transformers' reported."""

from __future__ import annotations

from collections.abc import Iterator

import yaml

from shardwise.findings import Edit, Severity, SourceFinding, Status
from shardwise.rules.moving.edits import apply_edits
from shardwise.rules.moving.frameworks import accelerate, composer
from shardwise.rules.moving.frameworks.settings import Become, Conversion, Drop, Keep
from shardwise.rules.moving.frameworks.yaml_edits import (
    conversion_edits,
    documents,
    entry,
    mapping_insertion,
    mappings,
    plain,
)

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
    return apply_edits(text, edits), found


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
        conversion = accelerate.convert_settings(bare, launched=True, around=around)
        if "parallelism_config" in around and conversion.beside:
            conversion.beside.clear()
            conversion.notes.append("parallelism_config is there already; check its sizes")
        return _converted(text, path, ACCELERATE, node, config, conversion, "fsdp_" if has_prefix else "")
    if "distributed_type" in around:  # accelerate's, for something other than FSDP
        return []
    if has_prefix and "fsdp" in around and bare.keys() <= accelerate.KEYS:
        return [] if str(bare.get("version", 1)) == "2" else [_transformers(path, node, config)]
    if "sharding_strategy" in settings and settings.keys() & composer.KEYS - {"sharding_strategy"}:
        if settings.keys() & composer.FSDP2_KEYS:
            return []
        conversion = composer.convert_settings(settings, around=plain(root))
        return _converted(text, path, COMPOSER, node, config, conversion, "")
    return []


def _converted(
    text: str,
    path: str,
    code: str,
    node: yaml.MappingNode,
    config: yaml.MappingNode,
    conversion: Conversion,
    prefix: str,
) -> list[SourceFinding]:
    """Findings for one config: its edits if every setting converts, otherwise what a person must decide."""
    lines = {str(key.value).removeprefix(prefix) if prefix else str(key.value): key for key, _ in config.value}
    if _cannot_edit(text, node, config):
        message = "this config is written inline or with merge keys, which is not edited"
        return [
            _finding(path, code, config, message, Status.NEEDS_DECISION, fix="write one setting a line and run again")
        ]
    if conversion.blocked:
        return [
            _finding(
                path,
                code,
                lines.get(key, config),
                f"{prefix + key + ': ' if key else ''}{block.why}",
                Status.NEEDS_DECISION,
                fix=block.fix,
            )
            for key, block in conversion.blocked
        ]
    edits = conversion_edits(text, config, conversion, prefix)
    edits += [mapping_insertion(text, node, name, values) for name, values in conversion.beside.items()]
    found = [_finding(path, code, config, _summary(conversion, prefix), Status.REWRITTEN, edits=tuple(edits))]
    for key, step in conversion.steps.items():
        if isinstance(step, Keep | Drop | Become) and step.note:
            found.append(_finding(path, code, lines.get(key, config), f"{prefix}{key}: {step.note}", Status.REPORTED))
    return found + [_finding(path, code, config, note, Status.REPORTED) for note in conversion.notes]


def _cannot_edit(text: str, node: yaml.MappingNode, config: yaml.MappingNode) -> bool:
    keys = [key for key, _ in config.value]
    has_merge = any(str(key.value) == "<<" for key in keys)
    starts = {text.rfind("\n", 0, key.start_mark.index) for key in keys}
    return bool(config.flow_style or node.flow_style or has_merge or len(starts) < len(keys))


def _summary(conversion: Conversion, prefix: str) -> str:
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


def _transformers(path: str, node: yaml.MappingNode, config: yaml.MappingNode) -> SourceFinding:
    message = "fsdp_config of a trainer that hands it to accelerate: FSDP1 unless it says fsdp_version: 2"
    return _finding(path, TRANSFORMERS, config, message, Status.NEEDS_DECISION, fix=TRANSFORMERS_FIX)


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
    strategy = accelerate.strategy_name(strategy) or "FULL_SHARD"
    more = {
        "SHARD_GRAD_OP": "; pass reshard_after_forward=False for SHARD_GRAD_OP",
        "NO_SHARD": "; for NO_SHARD use strategy='ddp' instead",
        "HYBRID_SHARD": "; for HYBRID_SHARD build a (replicate, shard) mesh yourself: its own has no replicate axis",
    }.get(strategy, "")
    return SourceFinding(
        code=LIGHTNING,
        name=NAMES[LIGHTNING],
        message="Lightning's FSDPStrategy is FSDP1; for FSDP2 the model shards itself",
        where=f"{path}:{line}:1",
        severity=Severity.WARNING,
        fix=LIGHTNING_FIX + more,
        path=path,
        line=line,
        status=Status.NEEDS_DECISION,
    )


def _finding(
    path: str,
    code: str,
    node: yaml.Node,
    message: str,
    status: Status,
    *,
    fix: str = "",
    edits: tuple[Edit, ...] = (),
) -> SourceFinding:
    line, column = node.start_mark.line + 1, node.start_mark.column + 1
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
        status=status,
        edits=edits,
    )
