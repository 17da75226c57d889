"""FSDP1's state dicts of models and optimizers, by state dict type."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import OptimStateDictConfig, StateDictConfig, StateDictSettings, StateDictType
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise import compat
from shardwise.distributed.agreement import on_rank_zero
from shardwise.errors import ShardError
from shardwise.fsdp1 import units
from shardwise.fsdp1.initialising import warn_once
from shardwise.fsdp1.units import PREFIX, WRAPPED, Unit, WrongArgument, WrongUse, clean_name, first_unit, units_in
from shardwise.sharding.full_params import gather_in_buckets, in_first_rank_order, reshard
from shardwise.sharding.inventory import broadcast_from_first, local_tensor
from shardwise.sharding.repointing import adopt, refuse_foreign, shard_like

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
    """A whole tensor, or one sharded in another way, as a DTensor placed like `parameter`.

    Ranks:
        Collective if the tensor is sharded in another way.
    """
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

    Ranks:
        Collective.
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
    state_dict: StateDict, kind: fsdp.OptimStateKeyType, model: nn.Module, groups: list[list[nn.Parameter]]
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
    wanted = str if kind is fsdp.OptimStateKeyType.PARAM_NAME else int
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
    """The first rank's state dict, each tensor cut to this rank's part as it arrives.

    Ranks:
        Collective.
    """

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
        optim_state_key_type: fsdp.OptimStateKeyType,
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
