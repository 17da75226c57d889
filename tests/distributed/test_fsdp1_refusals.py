"""What FSDP1 refuses or warns about, `shardwise.fsdp1` does too, by the same types of error (docs/fsdp1.md)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import always_wrap_policy

from shardwise.errors import ShardwiseError
from shardwise.fsdp1 import FullyShardedDataParallel as FSDP
from shardwise.fsdp1 import initialising
from shardwise.fsdp1.sharded_grad_scaler import ShardedGradScaler
from tests.ranks import ranks

HYBRID = ShardingStrategy.HYBRID_SHARD
X = torch.ones(2, 4)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4))


def nested() -> Any:
    model = net()
    model[1] = FSDP(model[1])
    return FSDP(model)


def run() -> Any:
    unit = nested()
    unit(X).sum().backward()
    return unit


class Calling(nn.Module):
    """A model whose forward does something with the unit around it."""

    def __init__(self, call: Callable[[Any], Any]) -> None:
        super().__init__()
        self.linear, self.call, self.around = nn.Linear(4, 4), call, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.call(self.around[0])
        return self.linear(x)


def in_forward(call: Callable[[Any], Any]) -> None:
    model = Calling(call)
    model.around.append(FSDP(model))
    model.around[0](X)


def summon(unit: Any, **arguments: Any) -> None:
    with FSDP.summon_full_params(unit, **arguments):
        pass


def no_sync(unit: Any) -> None:
    with unit.no_sync():
        pass


def summon_in_backward() -> None:
    unit = FSDP(net())
    output = unit(X)
    output.register_hook(lambda gradient: summon(unit))
    output.sum().backward()


def sharded_state_in_summon() -> None:
    unit = FSDP(net())
    with FSDP.summon_full_params(unit), FSDP.state_dict_type(unit, StateDictType.SHARDED_STATE_DICT):
        unit.state_dict()


def hook_twice() -> None:
    unit = FSDP(net())
    for _ in range(2):
        unit.register_comm_hook(None, lambda *args: None)


def ignore(choose: Callable[[Any], dict[str, Any]]) -> None:
    model = net()
    model[1] = FSDP(model[1])
    FSDP(model, **choose(model))


def kinds_differ() -> None:
    unit = nested()
    FSDP.set_state_dict_type(unit.module[1], StateDictType.SHARDED_STATE_DICT)
    FSDP.get_state_dict_type(unit)


def on_meta(**arguments: Any) -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    FSDP(model, **arguments)


def rekey_mixed() -> None:
    FSDP.rekey_optim_state_dict(
        {"state": {0: {}, "0.weight": {}}, "param_groups": []}, OptimStateKeyType.PARAM_ID, net()
    )


def no_optimizer_state() -> None:
    unit = FSDP(net())
    FSDP.optim_state_dict_to_load(unit, torch.optim.SGD(unit.parameters(), lr=0.1), {"param_groups": []})


def replace(change: Callable[[Any], None]) -> None:
    unit = FSDP(net(), use_orig_params=True)
    change(unit)
    unit(X)


def set_type(*configs: Any) -> None:
    FSDP.set_state_dict_type(FSDP(net()), StateDictType.FULL_STATE_DICT, *configs)


def twice(model: nn.Module) -> None:
    FSDP(model)
    FSDP(model)


def mesh(*sizes: int) -> Any:
    return init_device_mesh("cpu", sizes)


REFUSED: dict[str, tuple[type[Exception], str, Callable[[], Any]]] = {
    "summon in forward": (AssertionError, "during forward", lambda: in_forward(summon)),
    "summon in backward": (AssertionError, "during backward", summon_in_backward),
    "apply in forward": (ValueError, "during forward", lambda: in_forward(lambda unit: unit.apply(lambda m: None))),
    "state_dict in forward": (AssertionError, "during forward", lambda: in_forward(lambda unit: unit.state_dict())),
    "no_sync in forward": (ValueError, "during forward", lambda: in_forward(no_sync)),
    "sharded state in summon": (ShardwiseError, "inside summon_full_params", sharded_state_in_summon),
    "writeback, rank0_only": (NotImplementedError, "rank0_only", lambda: summon(FSDP(net()), rank0_only=True)),
    "with_grads, offload_to_cpu": (
        NotImplementedError, "with_grads", lambda: summon(run(), with_grads=True, offload_to_cpu=True)
    ),
    "clip_grad_norm_ of a part": (RuntimeError, "inner unit", lambda: run().module[1].clip_grad_norm_(1.0)),
    "no_sync of a part": (RuntimeError, "inner unit", lambda: no_sync(run().module[1])),
    "comm hook of a part": (AssertionError, "inner unit", lambda: run().module[1].register_comm_hook(None, print)),
    "two comm hooks": (AssertionError, "registered already", hook_twice),
    "comm hook": (ValueError, "the hook is 3", lambda: FSDP(net()).register_comm_hook(None, 3)),
    "ignored unit": (ValueError, "wrapped already", lambda: ignore(lambda m: {"ignored_modules": [m[1]]})),
    "ignored parameter": (ValueError, "ignored_states=", lambda: ignore(lambda m: {"ignored_modules": [m[0].weight]})),
    "ignored tensor": (ValueError, "a Tensor", lambda: ignore(lambda m: {"ignored_states": [torch.ones(1)]})),
    "ignored number": (TypeError, "iterable", lambda: ignore(lambda m: {"ignored_modules": 3})),
    "both ignored": (
        ValueError, "both", lambda: ignore(lambda m: {"ignored_modules": [m[0]], "ignored_states": [m[2].weight]})
    ),
    "policy on a wrapped part": (
        ValueError, "1 is wrapped already", lambda: ignore(lambda m: {"auto_wrap_policy": always_wrap_policy})
    ),
    "wrapped after forward": (AssertionError, "has already been run", lambda: FSDP(nn.Sequential(run()))),
    "wrapped twice": (ShardwiseError, "sharded already", lambda: twice(net())),
    "group and mesh": (ValueError, "both", lambda: FSDP(net(), process_group=dist.group.WORLD, device_mesh=mesh(2))),
    "hybrid, one group": (
        ValueError, "one process group", lambda: FSDP(net(), process_group=dist.group.WORLD, sharding_strategy=HYBRID)
    ),
    "hybrid, one axis": (ValueError, "1 axis", lambda: FSDP(net(), device_mesh=mesh(2), sharding_strategy=HYBRID)),
    "two axes": (ShardwiseError, "2 axes without names", lambda: FSDP(net(), device_mesh=mesh(2, 1))),
    "strategy": (ShardwiseError, "'FULL'", lambda: FSDP(net(), sharding_strategy="FULL")),
    "param_init_fn": (ValueError, "param_init_fn is 42", lambda: on_meta(param_init_fn=42)),
    "scalar": (ValueError, "scalar", lambda: FSDP(nn.ParameterList([nn.Parameter(torch.tensor(1.0))]))),
    "state dict config": (RuntimeError, "FullStateDictConfig", lambda: set_type(ShardedStateDictConfig())),
    "optimizer config": (
        RuntimeError, "FullOptim", lambda: set_type(FullStateDictConfig(), ShardedOptimStateDictConfig())
    ),
    "kinds of state dict": (AssertionError, "different kinds", kinds_differ),
    "rekeyed mixture": (ValueError, "several kinds", rekey_mixed),
    "no optimizer state": (ValueError, "no optimizer state", no_optimizer_state),
    "scaled number": (ValueError, "iterable", lambda: ShardedGradScaler(device="cpu").scale(3)),
    "second derivative": (
        ShardwiseError, "create_graph", lambda: FSDP(net())(X).square().sum().backward(create_graph=True)
    ),
    "parameter of another shape": (
        ShardwiseError, "'weight' of a sharded Linear is not",
        lambda: replace(lambda unit: setattr(unit.module[0], "weight", nn.Parameter(torch.ones(3, 3)))),
    ),
    "data of another shape": (
        ShardwiseError, r"\[4, 4\].*\[3, 3\]",
        lambda: replace(lambda unit: setattr(unit.module[0].weight, "data", torch.ones(3, 3))),
    ),
}  # fmt: skip

WARNED: dict[str, tuple[str, Callable[[], Any]]] = {
    "container": ("has no forward", lambda: FSDP(nn.ModuleList([nn.Linear(4, 4)]))),
    "everything ignored": ("nothing in it is sharded", lambda: FSDP(model := net(), ignored_modules=[model])),
    "no gradients": ("has no gradients", lambda: nested().clip_grad_norm_(1.0)),
    "offloaded everywhere": ("rank0_only", lambda: summon(FSDP(net()), offload_to_cpu=True)),
}


@ranks(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", REFUSED)
def test_what_fsdp1_refuses_is_refused(rank: int, case: str):
    kind, message, call = REFUSED[case]
    with pytest.raises(kind, match=message):
        call()


@ranks(2)
@pytest.mark.parametrize("case", WARNED)
def test_what_fsdp1_warns_about_is_warned_about(rank: int, case: str):
    message, call = WARNED[case]
    initialising._SAID.clear()
    with pytest.warns(UserWarning, match=message):
        call()
