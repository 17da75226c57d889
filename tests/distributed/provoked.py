"""Real failures, by the code of the page that explains them: each function makes torch raise, alike on every rank."""

import copy
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

PROVOKED: dict[str, Callable[[Path], object]] = {}


def provokes(code: str) -> Callable[[Callable[[Path], object]], Callable[[Path], object]]:
    def register(function: Callable[[Path], object]) -> Callable[[Path], object]:
        PROVOKED[code] = function
        return function

    return register


def mesh(*shape: int, names: tuple[str, ...] | None = None) -> Any:
    return init_device_mesh("cpu", shape or (2,), mesh_dim_names=names)


def sharded(module: nn.Module | None = None, **options: Any) -> Any:
    return fully_shard(module or nn.Linear(4, 4), mesh=mesh(), **options)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


@provokes("SW502")
def _forward_called_by_hand(_: Path) -> None:
    sharded().forward(torch.ones(2, 4))


@provokes("SW503")
def _full_state_into_shards(_: Path) -> None:
    model = nn.Linear(4, 4)
    state = copy.deepcopy(model.state_dict())
    sharded(model).load_state_dict(state)


@provokes("SW504")
def _plain_and_sharded_in_one_optimizer(_: Path) -> None:
    model = Two()
    fully_shard(model, mesh=mesh(), ignored_params=set(model.second.parameters()))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


class ReturnsView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).view(-1)


class ChangesInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.last = fully_shard(ReturnsView(), mesh=mesh()), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x)
        x += 1
        return self.last(x)


@provokes("SW505")
def _view_changed_in_place(_: Path) -> None:
    sharded(ChangesInPlace())(torch.ones(2, 4, requires_grad=True)).sum().backward()


@provokes("SW507")
def _child_before_root(_: Path) -> None:
    model = Two()
    fully_shard(model.first, mesh=mesh())
    sharded(model)
    model.first(torch.ones(2, 4))
    model(torch.ones(2, 4))


@provokes("SW508")
def _list_as_root(_: Path) -> None:
    model = Two()
    fully_shard([model.first, model.second], mesh=mesh())
    model(torch.ones(2, 4))


@provokes("SW511")
def _container(_: Path) -> None:
    sharded(nn.ModuleList([nn.Linear(2, 2)]))


@provokes("SW512")
def _scalar(_: Path) -> None:
    model = nn.Linear(2, 2)
    model.temperature = nn.Parameter(torch.tensor(1.0))
    sharded(model)


@provokes("SW513")
def _twice(_: Path) -> None:
    sharded(sharded())


@provokes("SW514")
def _parent_first(_: Path) -> None:
    model = sharded(Two())
    fully_shard(model.first, mesh=mesh())
    model(torch.ones(2, 4))


@provokes("SW515")
def _not_contiguous(_: Path) -> None:
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(torch.ones(4, 4).t()[:, :3])
    sharded(model)


@provokes("SW516")
def _uneven_dimension(_: Path) -> None:
    sharded(nn.Linear(7, 4, bias=False), shard_placement_fn=lambda _: Shard(1))


@provokes("SW517")
def _no_factor(_: Path) -> None:
    sharded(reshard_after_forward=3)


@provokes("SW518")
def _three_axes(_: Path) -> None:
    fully_shard(nn.Linear(4, 4), mesh=mesh(1, 1, 2, names=("a", "b", "c")))


@provokes("SW519")
def _unnamed_axes(_: Path) -> None:
    fully_shard(nn.Linear(4, 4), mesh=mesh(1, 2))


@provokes("SW520")
def _group_of_two_axes(_: Path) -> None:
    mesh(1, 2, names=("replicate", "shard")).get_group()


@provokes("SW522")
def _tied_in_two_groups(_: Path) -> None:
    model = Two()
    model.second.weight = model.first.weight
    fully_shard(model.first, mesh=mesh())
    fully_shard(model.second, mesh=mesh())
    sharded(model)(torch.ones(2, 4))


@provokes("SW523")
def _deepcopy(_: Path) -> None:
    copy.deepcopy(sharded())


@provokes("SW531")
def _two_dtypes(_: Path) -> None:
    model = Two()
    model.second.bfloat16()
    sharded(model)(torch.ones(2, 4))


@provokes("SW534")
def _input_of_another_dtype(_: Path) -> None:
    sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False))(torch.ones(2, 4))


@provokes("SW541")
def _left_on_meta(_: Path) -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    sharded(model)(torch.ones(2, 4))


@provokes("SW542")
def _moved_from_meta(_: Path) -> None:
    nn.Linear(4, 4, device="meta").to("cpu")


@provokes("SW545")
def _pinned_without_an_accelerator(_: Path) -> None:
    model = sharded(offload_policy=CPUOffloadPolicy())
    model(torch.ones(2, 4)).sum().backward()


@provokes("SW559")
def _divide_factor_on_gloo(_: Path) -> None:
    model = sharded()
    model.set_gradient_divide_factor(3.0)
    model(torch.ones(2, 4)).sum().backward()


@provokes("SW560")
def _port_taken(_: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        dist.TCPStore("127.0.0.1", taken.getsockname()[1], 1, is_master=True)


@provokes("SW561")
def _two_meshes(_: Path) -> None:
    one = distribute_tensor(torch.ones(4), mesh(2, names=("a",)), [Shard(0)])
    other = distribute_tensor(torch.ones(4), mesh(1, 2, names=("x", "y"))["y"], [Shard(0)])
    torch.stack([one, other])


@provokes("SW562")
def _operator_without_strategy(_: Path) -> None:
    torch.bincount(distribute_tensor(torch.ones(4, dtype=torch.long), mesh(), [Shard(0)]))


@provokes("SW563")
def _norm_in_place(_: Path) -> None:
    torch.linalg.vector_norm(distribute_tensor(torch.ones(4, 4), mesh(), [Shard(0)]), dim=0).add_(1)


@provokes("SW571")
def _broadcast_as_keyword(_: Path) -> None:
    set_model_state_dict(sharded(), {}, broadcast_from_rank0=True)


@provokes("SW572")
def _broadcast_without_full(_: Path) -> None:
    set_model_state_dict(sharded(), {}, options=StateDictOptions(broadcast_from_rank0=True))


@provokes("SW573")
def _empty_state(_: Path) -> None:
    set_model_state_dict(sharded(), {}, options=StateDictOptions(full_state_dict=True))


@provokes("SW574")
def _missing_key(folder: Path) -> None:
    dcp.save({"model": sharded().state_dict()}, checkpoint_id=folder / "saved")
    dcp.load({"model": {"nope.weight": torch.ones(2)}}, checkpoint_id=folder / "saved")


@provokes("SW575")
def _other_size(folder: Path) -> None:
    dcp.save({"weight": torch.ones(4)}, checkpoint_id=folder / "saved")
    dcp.load({"weight": torch.ones(5)}, checkpoint_id=folder / "saved")


@provokes("SW580")
def _empty_parameter_group(_: Path) -> None:
    model = sharded()
    state = get_optimizer_state_dict(model, torch.optim.AdamW(model.parameters()))
    grouped = torch.optim.AdamW([{"params": list(model.parameters())}, {"params": []}])
    set_optimizer_state_dict(model, grouped, state)


class Strange:
    """A class that torch does not know."""


@provokes("SW581")
def _weights_only(folder: Path) -> None:
    path = folder / f"rank{dist.get_rank()}.pt"
    torch.save(Strange(), path)
    torch.load(path, weights_only=True)


@provokes("SW591")
def _fsdp1_two_dtypes(_: Path) -> None:
    model = Two()
    model.second.bfloat16()
    FullyShardedDataParallel(model, device_id=torch.device("cpu"))


@provokes("SW592")
def _fsdp1_frozen(_: Path) -> None:
    model = Two()
    model.first.requires_grad_(False)
    FullyShardedDataParallel(model, device_id=torch.device("cpu"))


@provokes("SW593")
def _fsdp1_integers(_: Path) -> None:
    model = nn.Module()
    model.codes = nn.Parameter(torch.ones(4, dtype=torch.int8), requires_grad=False)
    FullyShardedDataParallel(model, device_id=torch.device("cpu"))
