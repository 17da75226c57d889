"""Edits of YAML text that leave every other character alone: comments, order and quoting stay as they are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from shardwise.findings import Edit
from shardwise.rules.moving.frameworks.settings import COMPUTED, Become, Conversion, Drop

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


def conversion_edits(text: str, node: yaml.MappingNode, conversion: Conversion, prefix: str) -> list[Edit]:
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
