"""The methods of FullyShardedDataParallel that save and load an optimizer's state, the older ones included."""

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import OptimStateKeyType, StateDictType
from torch.optim import Optimizer

from shardwise.fsdp1.optim_loading import loadable, parameter_groups
from shardwise.fsdp1.optim_states import named_state, rekeyed
from shardwise.fsdp1.state_dict_methods import StateDicts
from shardwise.fsdp1.units import first_unit

StateDict = dict[str, Any]
OptimInput = Iterable[Any] | None


class OptimizerStates(StateDicts):
    """Optimizer state under parameter names, and back."""

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: StateDict | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> StateDict:
        """The optimizer's state by parameter names, whole or sharded as `state_dict_type` says.

        Ranks:
            Collective.
        """
        settings = StateDicts.get_state_dict_type(model)
        config = settings.optim_state_dict_config
        rank0_only = getattr(config, "rank0_only", False)
        return named_state(
            model,
            optim,
            optim_state_dict,
            is_full=settings.state_dict_type is StateDictType.FULL_STATE_DICT,
            keep=not rank0_only or _rank(model, group) == 0,
            to_cpu=config.offload_to_cpu,
        )

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: StateDict,
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> StateDict:
        """What `optim.load_state_dict` takes, from what `optim_state_dict` returned.

        Older torch had the state dict first; both orders are understood.

        Ranks:
            Collective when the config says `rank0_only`: rank 0 sends. Else local.
        """
        given: Any = (model, optim, optim_state_dict)
        if isinstance(model, dict):
            given = (optim, optim_state_dict, model)
        model, optim, optim_state_dict = given
        config = StateDicts.get_state_dict_type(model).optim_state_dict_config
        mesh = first_unit(model, "optim_state_dict_to_load").mesh if getattr(config, "rank0_only", False) else None
        result = loadable(optim_state_dict, model, parameter_groups(model, optim, None), mesh)
        if load_directly:
            optim.load_state_dict(result)
        return result

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: Optimizer,
        optim_input: OptimInput = None,
        rank0_only: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> StateDict:
        """The whole optimizer state by names, in CPU memory; on rank 0 only unless told otherwise.

        Ranks:
            Collective.
        """
        keep = not rank0_only or _rank(model, group) == 0
        return named_state(model, optim, None, is_full=True, keep=keep, to_cpu=True)

    @staticmethod
    def sharded_optim_state_dict(
        model: nn.Module, optim: Optimizer, group: dist.ProcessGroup | None = None
    ) -> StateDict:
        """The optimizer state by names, sharded.

        Ranks:
            Collective.
        """
        return named_state(model, optim, None, is_full=False, keep=True, to_cpu=True)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: StateDict,
        model: nn.Module,
        optim_input: OptimInput = None,
        optim: Optimizer | None = None,
    ) -> StateDict:
        """What `load_state_dict` takes, from a whole state that every rank holds.

        Ranks:
            Local.
        """
        return loadable(full_optim_state_dict, model, parameter_groups(model, optim, optim_input), None)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: StateDict, model: nn.Module, optim: Optimizer
    ) -> StateDict:
        """What `load_state_dict` takes, from a sharded state.

        Ranks:
            Local, unless the state is sharded over another mesh.
        """
        return loadable(sharded_optim_state_dict, model, parameter_groups(model, optim, None), None)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: StateDict | None,
        model: nn.Module,
        optim_input: OptimInput = None,
        optim: Optimizer | None = None,
        group: Any = None,
    ) -> StateDict:
        """What `load_state_dict` takes, from a whole state that only rank 0 holds.

        Ranks:
            Collective.
        """
        mesh = first_unit(model, "scatter_full_optim_state_dict").mesh
        return loadable(full_optim_state_dict, model, parameter_groups(model, optim, optim_input), mesh)

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: StateDict,
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: OptimInput = None,
        optim: Optimizer | None = None,
    ) -> StateDict:
        """Optimizer state by names turned into one by numbers, for a model that is not wrapped, or the reverse.

        Ranks:
            Local.
        """
        groups = parameter_groups(model, optim, optim_input)
        return rekeyed(optim_state_dict, optim_state_key_type, model, groups)


def _rank(model: nn.Module, group: dist.ProcessGroup | None) -> int:
    return dist.get_rank(group) if group is not None else first_unit(model, "optim_state_dict").rank
