"""FSDP1's optimizer state dicts, saved and loaded."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import OptimStateKeyType, StateDictType
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.distributed.agreement import on_rank_zero
from shardwise.fsdp1.state_dicts import BUCKET_BYTES, StateDicts, copy_sharded, laid_out
from shardwise.fsdp1.units import WrongArgument, clean_name, first_unit
from shardwise.sharding.full_params import gather_in_buckets, in_first_rank_order, reshard
from shardwise.sharding.inventory import broadcast_from_first, local_tensor
from shardwise.sharding.repointing import adopt, refuse_foreign

StateDict = dict[str, Any]


def named_state(
    model: nn.Module,
    optimizer: Optimizer,
    state_dict: StateDict | None,
    *,
    is_full: bool,
    keep: bool,
    to_cpu: bool,
) -> StateDict:
    """The optimizer's state dict with the wrapped model's names for numbers or for a named optimizer's own keys.

    Groups and their parameters stand in the optimizer's order, as FSDP1 has them; where ranks have different orders, in
    the first rank's: `torch.distributed.checkpoint` takes a group's options and names from any rank. A rank that does
    not `keep` it takes part and gets an empty dict.
    """
    adopt(optimizer)
    reshard(model)
    given = optimizer.state_dict() if state_dict is None else state_dict
    names = _numbered_names(model, optimizer.param_groups)
    place = {clean_name(name): index for index, (name, _) in enumerate(model.named_parameters())}

    def name_of(key: int | str) -> str:
        return names[key] if isinstance(key, int) else clean_name(key)

    state = {name_of(key): value for key, value in given["state"].items()}
    state = {name: state[name] for name in sorted(state, key=lambda name: place.get(name, len(place)))}
    mesh = first_unit(model, "optim_state_dict").mesh
    copied: StateDict = {"state": _copied(state, mesh, is_full=is_full, keep=keep, to_cpu=to_cpu)}
    if "param_groups" in given:
        groups = [group | {"params": [name_of(key) for key in group["params"]]} for group in given["param_groups"]]
        listed = [group["params"] for group in groups]
        first = on_rank_zero(lambda: listed, group=mesh)
        by_names = {frozenset(group["params"]): group for group in groups}
        if first != listed and by_names.keys() == {frozenset(names) for names in first} and len(first) == len(groups):
            groups = [by_names[frozenset(names)] | {"params": names} for names in first]
        copied["param_groups"] = groups
    return copied if keep else {}


def _numbered_names(model: nn.Module, groups: Iterable[StateDict]) -> list[str]:
    """Names of the optimizer's parameters, in the order in which its state dict numbers them."""
    name_of = {id(parameter): clean_name(name) for name, parameter in model.named_parameters()}
    held = [parameter for group in groups for parameter in group["params"]]
    refuse_foreign(held, name_of, type(model).__name__, where="optim_state_dict")
    return [name_of[id(parameter)] for parameter in held]


def _copied(
    state: dict[str, StateDict], mesh: DeviceMesh, *, is_full: bool, keep: bool, to_cpu: bool
) -> dict[str, StateDict]:
    """The state in memory of its own; whole on the ranks that keep it, where `is_full`."""
    sharded = {
        f"{name}.{key}": (name, key)
        for name, values in state.items()
        for key, value in values.items()
        if is_full and isinstance(value, DTensor)
    }
    copied = {
        name: {
            key: copy_sharded(value, to_cpu=to_cpu) if keep and f"{name}.{key}" not in sharded else None
            for key, value in values.items()
        }
        for name, values in state.items()
    }
    if not is_full:
        return copied
    tensors = in_first_rank_order([(full, state[name][key]) for full, (name, key) in sharded.items()], mesh)
    for full, value in gather_in_buckets(tensors, bucket_bytes=BUCKET_BYTES, keep=keep):
        name, key = sharded[full]
        if value is not None:
            copied[name][key] = value.cpu() if to_cpu else value
    return copied


def rekeyed(
    state_dict: StateDict, kind: OptimStateKeyType, model: nn.Module, groups: list[list[nn.Parameter]]
) -> StateDict:
    """The same optimizer state under names instead of numbers, or numbers instead of names, as `kind` says.

    `groups` holds the parameters in the optimizer's order; keys of both kinds are refused.
    """
    kinds = {type(key) for key in state_dict["state"]}
    if len(kinds) > 1:
        raise WrongArgument(
            f"the keys of the state are of several kinds: {sorted(kind.__name__ for kind in kinds)}",
            where="rekey_optim_state_dict",
            why="each is either a parameter's name or its number",
            fix="pass the dictionary as it was saved",
        )
    wanted = str if kind is OptimStateKeyType.PARAM_NAME else int
    if kinds == {wanted}:
        return state_dict
    names = _numbered_names(model, [{"params": group} for group in groups])
    new: dict[Any, Any] = dict(enumerate(names)) if wanted is str else {name: n for n, name in enumerate(names)}
    return {
        "state": {new[key]: value for key, value in state_dict["state"].items()},
        "param_groups": [
            group | {"params": sorted(new[key] for key in group["params"])} for group in state_dict["param_groups"]
        ],
    }


def parameter_groups(
    model: nn.Module, optimizer: Optimizer | None, optim_input: Iterable[Any] | None
) -> list[list[nn.Parameter]]:
    """Parameters in the optimizer's order: its own, those it was given, or else all of the model's."""
    if optimizer is not None:
        adopt(optimizer)
        return [list(group["params"]) for group in optimizer.param_groups]
    reshard(model)
    given: list[Any] = list(model.parameters() if optim_input is None else optim_input)
    if given and isinstance(given[0], dict):
        return [list(group["params"]) for group in given]
    return [given]


def loadable(
    state_dict: StateDict | None,
    model: nn.Module,
    groups: list[list[nn.Parameter]],
    mesh: DeviceMesh | None,
    *,
    by_name: bool = False,
) -> StateDict:
    """State by parameter number, each tensor placed like its parameter, from state by name.

    Where a `mesh` is given, only its first rank's `state_dict` counts, and is sent to the others. `by_name`: keys are
    the names that `model.named_parameters()` gives, as a named optimizer has them.
    """
    reshard(model)
    name_of = {parameter: clean_name(name) for name, parameter in model.named_parameters()}
    parameters = [parameter for group in groups for parameter in group]
    names = [name_of[parameter] for parameter in parameters]
    source = _sent(state_dict, dict(zip(names, parameters, strict=True)), mesh) if mesh is not None else state_dict
    if source is None or "state" not in source:
        raise WrongArgument(
            "there is no optimizer state",
            where="optim_state_dict_to_load",
            why="it is a dictionary with the key state",
            fix="pass what optim_state_dict returned; with rank0_only=True rank 0 must have it",
        )
    key_of: dict[str, int | str] = {name: number for number, name in enumerate(names)}
    if by_name:
        key_of = {clean_name(name): name for name, _ in model.named_parameters() if clean_name(name) in key_of}
    state = {}
    # In the model's order, the same on every rank: placing a tensor that is sharded over another mesh communicates.
    for parameter, name in name_of.items():
        if name in key_of and (values := source["state"].get(name)) is not None:
            state[key_of[name]] = {key: _placed(value, parameter) for key, value in values.items()}
    if "param_groups" not in source:
        return {"state": state}
    # The optimizer's own groups, with the saved options of the group that held the same parameters.
    saved, loaded = source["param_groups"], []
    home = {name: group for group in saved for name in group["params"]}
    for index, group in enumerate(groups):
        found = [home[name_of[parameter]] for parameter in group if name_of[parameter] in home]
        options = found[0] if found else saved[min(index, len(saved) - 1)]
        loaded.append(options | {"params": [key_of[name_of[parameter]] for parameter in group]})
    return {"state": state, "param_groups": loaded}


def _placed(value: Any, parameter: nn.Parameter) -> Any:
    if not isinstance(parameter, DTensor):
        return value.clone() if isinstance(value, torch.Tensor) else value
    if hasattr(value, "local_shards"):  # torch's older ShardedTensor, which cuts along dim 0 as FSDP2 does
        own, shards = local_tensor(parameter), value.local_shards()
        part = shards[0].tensor if shards else own.new_empty(own.shape)
        return laid_out(part.view(own.shape), parameter, is_local=True)
    if not isinstance(value, torch.Tensor):
        return value
    if value.ndim == 0 and parameter.ndim > 0:
        return value.clone()  # a counter; the optimizer must not change the caller's
    return laid_out(value, parameter)


def _sent(state_dict: StateDict | None, parameters: dict[str, nn.Parameter], mesh: DeviceMesh) -> StateDict:
    """The first rank's state dict, each tensor cut to this rank's part as it arrives."""

    def outline() -> StateDict:
        """The state dict with tensors on meta, which hold no values."""
        given = state_dict or {"state": {}}
        state = {
            name: {key: value.to("meta") if isinstance(value, torch.Tensor) else value for key, value in values.items()}
            for name, values in given["state"].items()
        }
        return given | {"state": state} if state_dict else {}

    sent = on_rank_zero(outline, group=mesh)
    is_first = not any(mesh.get_coordinate() or ())
    for name, values in sent.get("state", {}).items():
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                whole = state_dict["state"][name][key] if is_first and state_dict else value
                whole = (
                    torch.empty_like(value, device=mesh.device_type) if whole.is_meta else whole.to(mesh.device_type)
                )
                broadcast_from_first(whole, mesh, range(mesh.ndim))
                values[key] = _placed(whole, parameters[name]) if name in parameters else whole
    return sent


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
        groups = parameter_groups(model, optim, None)
        result = loadable(optim_state_dict, model, groups, mesh, by_name=is_named_optimizer)
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
