"""FSDP1's state dicts, by state dict type."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp import OptimStateDictConfig, StateDictConfig, StateDictSettings, StateDictType
from torch.distributed.tensor import DTensor

from shardwise import compat
from shardwise.errors import ShardError
from shardwise.fsdp1 import units
from shardwise.fsdp1.settings import warn_once
from shardwise.fsdp1.units import PREFIX, WRAPPED, Unit, WrongArgument, WrongUse, clean_name, first_unit, units_in
from shardwise.sharding.full_params import gather_in_buckets, reshard
from shardwise.sharding.inventory import local_tensor
from shardwise.sharding.repointing import shard_like

BUCKET_BYTES = 256 * 1024**2
CONFIGS = {
    StateDictType.FULL_STATE_DICT: (fsdp.FullStateDictConfig, fsdp.FullOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (fsdp.ShardedStateDictConfig, fsdp.ShardedOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (fsdp.LocalStateDictConfig, fsdp.LocalOptimStateDictConfig),
}


def complete_configs(kind: StateDictType, config: Any, optim_config: Any) -> tuple[Any, Any]:
    """FSDP1's default configs where none is given; one of another kind of state dict is refused."""
    given = []
    for config_class, value in zip(CONFIGS[kind], (config, optim_config), strict=True):
        value = config_class() if value is None else value
        if type(value) is not config_class:
            raise WrongArgument(
                f"{kind.name} is given a {type(value).__name__}",
                where="state_dict_type",
                why="each kind of state dict has a config of its own",
                fix=f"pass {config_class.__name__}(...)",
            )
        given.append(value)
    return given[0], given[1]


def finish_state_dict(
    unit: Any, destination: dict[str, Any], prefix: str, names: set[str], kind: StateDictType, config: Any
) -> None:
    """Turn the `names` that `nn.Module.state_dict` collected below a unit into what FSDP1 returns.

    What `destination` holds from elsewhere is left alone. Collective for FULL_STATE_DICT.
    """
    entries = {name: destination.pop(name) for name in list(destination) if name in names}
    clean = {prefix + name[len(prefix) :].replace(PREFIX, ""): value for name, value in entries.items()}
    if kind is StateDictType.LOCAL_STATE_DICT:
        # DTensors, as FSDP1 returned ShardedTensors: of plain tensors torch.distributed.checkpoint keeps one rank's.
        warn_once(
            "LOCAL_STATE_DICT",
            "holds each parameter sharded, as SHARDED_STATE_DICT does; there are no flat parameters, and FSDP1's local "
            "files do not load",
        )
    if kind is StateDictType.FULL_STATE_DICT:
        converted = _full(unit, clean, config)
    else:
        converted = ((name, copy_sharded(value, to_cpu=config.offload_to_cpu)) for name, value in clean.items())
    dtypes = units.dtypes_before(unit)
    for name, value in converted:
        dtype = dtypes.get(name[len(prefix) :])
        destination[name] = value.to(dtype) if dtype is not None and isinstance(value, torch.Tensor) else value


def _full(unit: Any, entries: dict[str, Any], config: fsdp.FullStateDictConfig) -> Iterator[tuple[str, Any]]:
    keep = not config.rank0_only or unit.rank == 0
    tensors = ((name, value) for name, value in entries.items() if isinstance(value, torch.Tensor))
    for name, value in gather_in_buckets(tensors, bucket_bytes=BUCKET_BYTES, keep=keep):
        if value is None and entries[name] in unit._ignored_params:
            value = entries[name].detach()  # FSDP1 keeps out of the other ranks' dicts only what it manages
        if value is not None:
            owned = value if isinstance(entries[name], DTensor) else value.clone()
            yield name, owned.cpu() if config.offload_to_cpu else owned
    if keep:
        yield from ((name, value) for name, value in entries.items() if not isinstance(value, torch.Tensor))


def copy_sharded(value: Any, *, to_cpu: bool) -> Any:
    """A copy that later steps do not change, sharded as it was; on its device or in CPU memory."""
    if not isinstance(value, torch.Tensor):
        return value
    own = local_tensor(value)
    copied = own.to("cpu", copy=True) if to_cpu else own.clone()
    return compat.dtensor_like(copied, value) if isinstance(value, DTensor) else copied


def prepare_loading(unit: nn.Module, state_dict: dict[str, Any], prefix: str, kind: StateDictType) -> None:
    """Rename the entries below `prefix` for a unit, and lay them out like its parameters.

    Communicates where an entry is sharded over another mesh. FSDP1's flat parameters are refused.
    """
    parameters = {
        clean_name(name): parameter for name, parameter in nn.Module.named_parameters(unit, remove_duplicate=False)
    }
    for name in [name for name in state_dict if name.startswith(prefix)]:
        inner = name[len(prefix) :]
        if inner.rpartition(".")[2] in ("_flat_param", "flat_param"):
            raise ShardError(
                f"{name} is a flat parameter of FSDP1",
                where="load_state_dict",
                why="FSDP2 keeps every parameter by itself; a flat one says nothing about the parts it is made of",
                fix="save a FULL or SHARDED state dict with FSDP1, or convert the checkpoint: shardwise ckpt convert",
            )
        value = state_dict.pop(name)
        parameter = parameters.get(inner)
        if isinstance(parameter, DTensor) and isinstance(value, torch.Tensor):
            value = laid_out(value, parameter, is_local=kind is StateDictType.LOCAL_STATE_DICT)
        state_dict[prefix + PREFIX + inner] = value


def laid_out(value: torch.Tensor, parameter: DTensor, *, is_local: bool = False) -> torch.Tensor:
    """A whole tensor, or one sharded in another way, as a DTensor placed like `parameter`."""
    if isinstance(value, DTensor):
        same = value.device_mesh == parameter.device_mesh and value.placements == parameter.placements
        return value if same else shard_like(value.full_tensor(), parameter)
    if is_local:
        own = local_tensor(parameter)
        return compat.dtensor_like(value.to(own.device), parameter) if value.shape == own.shape else value
    return shard_like(value, parameter) if value.shape == parameter.shape else value


class StateDicts(Unit):
    """`state_dict`, `load_state_dict` and which kind of state dict they deal in."""

    _is_collecting = False

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Choose the kind of state dict of all units in `module`, until it is chosen again.

        Returns:
            What was chosen before.

        Raises:
            ConfigError: A config belongs to another kind.

        Ranks:
            Local. Choose the same on every rank.
        """
        config, optim_config = complete_configs(state_dict_type, state_dict_config, optim_state_dict_config)
        before = StateDicts.get_state_dict_type(module)
        for unit in units_in(module):
            unit._state_dict_type = state_dict_type
            unit._state_dict_config, unit._optim_state_dict_config = config, optim_config
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """The kind of state dict that the units in `module` deal in, and its configs.

        Raises:
            ConfigError: There is no unit.
            ShardError: The units do not agree.

        Ranks:
            Local.
        """
        first_unit(module, "get_state_dict_type")
        settings = [
            StateDictSettings(unit._state_dict_type, unit._state_dict_config, unit._optim_state_dict_config)
            for unit in units_in(module)
        ]
        if any(other != settings[0] for other in settings):
            raise WrongUse(
                "units of one model are set to different kinds of state dict",
                where="get_state_dict_type",
                why="a state dict is of one kind",
                fix="FullyShardedDataParallel.set_state_dict_type(model, ...) on the whole model",
            )
        return settings[0]

    @staticmethod
    @contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Iterator[None]:
        """Choose the kind of state dict inside a block.

        Ranks:
            Local. What is called inside may be collective.
        """
        before = StateDicts.set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
        try:
            yield
        finally:
            StateDicts.set_state_dict_type(
                module, before.state_dict_type, before.state_dict_config, before.optim_state_dict_config
            )

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's state under its own names, of the kind that was chosen; FULL unless told otherwise.

        Ranks:
            Collective for a FULL state dict: call it on every rank, also with `rank0_only`.
        """
        # The positional form is torch's deprecated one: destination, prefix, keep_vars.
        kwargs |= dict(zip(("destination", "prefix", "keep_vars"), args, strict=False))
        if self._is_collecting:
            return super().state_dict(**kwargs)
        units.refuse_while_running([self], "state_dict")
        prefix, before = kwargs.get("prefix", ""), set(kwargs.get("destination") or ())
        own_units = [unit for unit in units_in(self) if isinstance(unit, StateDicts)]
        for unit in own_units:
            unit._is_collecting = True
        try:
            collected: dict[str, Any] = super().state_dict(**kwargs | {"keep_vars": True})
        finally:
            for unit in own_units:
                unit._is_collecting = False
        kind, config = self._state_dict_type, self._state_dict_config
        # Helpers of torch.distributed.checkpoint ask FSDP1 for shards, and gather them as their options say.
        if compat.is_called_by_dcp() and not self.is_summoned:
            kind, config = StateDictType.SHARDED_STATE_DICT, fsdp.ShardedStateDictConfig()
        if self.is_summoned and kind is not StateDictType.FULL_STATE_DICT:
            raise WrongUse(
                f"a {kind.name} is asked for inside summon_full_params",
                where="state_dict",
                why="the parameters are whole there",
                fix="ask for it outside the block, or for a FULL_STATE_DICT",
            )
        finish_state_dict(self, collected, prefix, set(collected) - before, kind, config)
        return collected

    def named_modules(  # pyrefly: ignore[bad-override]  # nn.Module's has no return type
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """As in FSDP1; names that torch.distributed.checkpoint asks for are those of the wrapped model."""
        if not compat.is_called_by_dcp():
            yield from super().named_modules(memo, prefix, remove_duplicate)
            return
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self
            yield from self._fsdp_wrapped_module.named_modules(memo, prefix, remove_duplicate)

    def _fqn_modifiers(self) -> dict[str, str]:
        """What torch.distributed.checkpoint.state_dict leaves out of names."""
        return {"": WRAPPED}

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Called by `load_state_dict` of this module or of one around it."""
        reshard(self)
        prepare_loading(self, state_dict, prefix, self._state_dict_type)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    @staticmethod
    def _clean_missing(module: nn.Module, incompatible: Any) -> None:
        """Report what is missing or unexpected under the names that the state dict uses."""
        for keys in (incompatible.missing_keys, incompatible.unexpected_keys):
            keys[:] = [key.replace(PREFIX, "") for key in keys]
