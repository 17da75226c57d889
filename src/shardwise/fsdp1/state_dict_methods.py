"""The methods of FullyShardedDataParallel that save and load a model's state."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.fsdp import (
    OptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

from shardwise import compat
from shardwise.errors import ShardError
from shardwise.fsdp1.names import PREFIX, WRAPPED
from shardwise.fsdp1.state_dicts import complete_configs, finish_state_dict, prepare_loading
from shardwise.fsdp1.units import Unit, first_unit, units_in
from shardwise.sharding.full_params import reshard


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
            raise ShardError(
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
        if self._is_collecting or self.is_summoned:
            return super().state_dict(**kwargs)
        prefix, before = kwargs.get("prefix", ""), set(kwargs.get("destination") or ())
        units = [unit for unit in units_in(self) if isinstance(unit, StateDicts)]
        for unit in units:
            unit._is_collecting = True
        try:
            collected: dict[str, Any] = super().state_dict(**kwargs | {"keep_vars": True})
        finally:
            for unit in units:
                unit._is_collecting = False
        kind, config = self._state_dict_type, self._state_dict_config
        if compat.is_called_by_dcp():  # its helpers ask FSDP1 for shards and gather them as their options say
            kind, config = StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig()
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
