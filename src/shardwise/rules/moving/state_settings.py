"""What `FSDP.state_dict_type(model, kind, config, optim_config)` asks for, read from the call."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from shardwise.rules.moving.values import called_fsdp_name, fsdp_name, is_none, single_value
from shardwise.rules.source import FileContext

FULL, SHARDED, LOCAL = "FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"
_PARAMETERS = ("module", "state_dict_type", "state_dict_config", "optim_state_dict_config")
_FIELDS = ("offload_to_cpu", "rank0_only")


@dataclass(frozen=True, slots=True)
class Gather:
    """How FSDP1 hands out one state dict, as far as reading tells."""

    kind: str | None
    """FULL_STATE_DICT and so on; None where only the run knows."""
    offload: bool | None = False
    rank0_only: bool | None = False
    kind_text: str = ""
    """The expressions themselves, for what only the run knows."""
    config_text: str = "None"

    @property
    def is_known(self) -> bool:
        """Whether nothing is left to the run."""
        return None not in (self.kind, self.offload, self.rank0_only)


@dataclass(frozen=True, slots=True)
class Settings:
    """FSDP1's settings in force at some place."""

    model: Gather
    optimizer: Gather


DEFAULT = Settings(Gather(FULL), Gather(FULL, offload=True))
"""Where nothing was said: whole tensors on every rank, an optimizer's on the CPU."""


def model_argument(call: ast.Call) -> ast.expr | None:
    """The model that a call of `state_dict_type` or `set_state_dict_type` is about."""
    if call.args:
        return call.args[0]
    return next((keyword.value for keyword in call.keywords if keyword.arg == "module"), None)


def read_settings(context: FileContext, call: ast.Call) -> Settings | None:
    """The settings that a call makes; None where its arguments cannot be told apart."""
    given: dict[str, ast.expr] = dict(zip(_PARAMETERS, call.args, strict=False))
    for keyword in call.keywords:
        if keyword.arg not in _PARAMETERS:
            return None
        given[keyword.arg] = keyword.value
    if "state_dict_type" not in given or any(isinstance(one, ast.Starred) for one in call.args):
        return None
    kind_node = given["state_dict_type"]
    kind = _kind(context, kind_node)
    gathers = []
    for name, offload in (("state_dict_config", False), ("optim_state_dict_config", True)):
        config = given.get(name)
        offload_to_cpu, rank0_only = _fields(context, config, default_offload=offload)
        text = "None" if config is None else context.source(config)
        gathers.append(Gather(kind, offload_to_cpu, rank0_only, context.source(kind_node), text))
    return Settings(*gathers)


def _kind(context: FileContext, node: ast.expr) -> str | None:
    name = fsdp_name(context, single_value(context, node)) or ""
    member = name.removeprefix("StateDictType.")
    return member if name.startswith("StateDictType.") and member in (FULL, SHARDED, LOCAL) else None


def _fields(context: FileContext, node: ast.expr | None, *, default_offload: bool) -> tuple[bool | None, bool | None]:
    """`offload_to_cpu` and `rank0_only` of a config; None where only the run knows."""
    if is_none(node):
        return default_offload, False
    assert node is not None
    call = single_value(context, node)
    name = called_fsdp_name(context, call)
    if name is None or not name.endswith("StateDictConfig") or not isinstance(call, ast.Call):
        return None, None
    found: dict[str, bool | None] = {"offload_to_cpu": "Optim" in name, "rank0_only": False}
    given = [*zip(_FIELDS, call.args, strict=False), *((keyword.arg, keyword.value) for keyword in call.keywords)]
    for field, value in given:
        if field is None:
            return None, None
        found[field] = value.value if isinstance(value, ast.Constant) and isinstance(value.value, bool) else None
    return found["offload_to_cpu"], found["rank0_only"]
