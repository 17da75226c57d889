"""Every tensor of a model once, with all the places it stands in, and whether it has values yet."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardwise import compat
from shardwise.sharding.layout import local_part
from shardwise.sharding.poison import poison


@dataclass(frozen=True, slots=True)
class Place:
    """A module and the name it has for a tensor."""

    module: nn.Module
    name: str
    is_parameter: bool

    def get(self) -> torch.Tensor | None:
        """What stands there now."""
        return (self.module._parameters if self.is_parameter else self.module._buffers).get(self.name)

    def put(self, tensor: torch.Tensor) -> None:
        """Let `tensor` stand there."""
        if type(self.module).__setattr__ is not nn.Module.__setattr__:
            setattr(self.module, self.name, tensor)  # recurrent layers keep a list of their weights in step
        elif self.is_parameter:
            self.module._parameters[self.name] = tensor  # pyrefly: ignore[unsupported-operation]
        else:
            self.module._buffers[self.name] = tensor


@dataclass(eq=False, slots=True)
class Entry:
    """One parameter or buffer; several places where it is tied."""

    fqn: str
    tensor: torch.Tensor
    """The registered object. Its identity survives materialisation, so ties and optimizers do too."""
    pending: bool
    """It stood on the meta device: values are owed to it."""
    fsdp_param: Any = None
    """FSDP2's record of it, where a group shards it."""
    places: list[Place] = field(default_factory=list)
    written: bool = False
    """An initialiser has written all of it. The same on every rank, which may hold no part of it."""
    fingerprint: torch.Tensor | None = None
    """Of a whole tensor of which this rank keeps a part, taken when it was last written."""

    @property
    def local(self) -> torch.Tensor:
        """What this rank stores of it."""
        return self.tensor.to_local() if isinstance(self.tensor, DTensor) else self.tensor

    def place_in(self, module: nn.Module) -> Place:
        """Where it stands in `module`."""
        return next(place for place in self.places if place.module is module)

    def allocate(self, device: torch.device, *, poisoned: bool = True) -> None:
        """Storage in place of meta, for this rank's part only; poisoned, unless the caller writes all of it."""
        if self.fsdp_param is not None:
            self.stand(compat.allocate_shard(self.fsdp_param))
        elif isinstance(self.tensor, DTensor):
            local = torch.empty_like(self.local, device=device)
            self.stand(compat.replace_in_place(self.tensor, compat.dtensor_like(local, self.tensor)))
        else:
            self.stand(compat.replace_in_place(self.tensor, _empty_like(self.tensor, device)))
        if poisoned:
            poison(self.local)

    def stand(self, tensor: torch.Tensor) -> None:
        """Let `tensor` be this entry's from now on, in all its places."""
        if tensor is not self.tensor:
            self.tensor = tensor
            for place in self.places:
                place.put(tensor)

    def store(self, full: torch.Tensor) -> None:
        """Keep this rank's part of `full`."""
        with torch.no_grad():
            self.local.copy_(local_part(full, self.tensor))

    def gather(self, device: torch.device) -> torch.Tensor:
        """The whole tensor, as a copy.

        Ranks:
            Collective where it is sharded.
        """
        with torch.no_grad():
            if isinstance(self.tensor, DTensor):
                # A copy: what a collective returns may share storage, with the shard or with its own buffers.
                return compat.dtensor_like(self.local.to(device), self.tensor).full_tensor().clone()
            return self.tensor.detach().to(device, copy=True)

    @contextmanager
    def standing_in_full(self, device: torch.device) -> Iterator[None]:
        """Let a poisoned whole tensor stand in all places of a sharded one, then give the places back."""
        full = _empty_like(self.tensor, device)
        poison(full)
        if isinstance(self.tensor, nn.Parameter):
            full = nn.Parameter(full, requires_grad=self.tensor.requires_grad)
        full.__dict__.update(self.tensor.__dict__)
        full.__dict__.pop("_is_hf_initialized", None)  # a loader's mark; nothing was loaded into this one
        for place in self.places:
            place.put(full)
        try:
            yield
        finally:
            for place in self.places:
                place.put(self.tensor)


def take_inventory(model: nn.Module) -> list[Entry]:
    """List the model's parameters and buffers, tied ones once.

    Ranks:
        Local.
    """
    shards = {
        id(fsdp_param.sharded_param): fsdp_param
        for group in compat.param_groups(model)
        for fsdp_param in group.fsdp_params
    }
    entries: dict[int, Entry] = {}
    for path, module in model.named_modules():
        for place, tensor in _places_of(module):
            if id(tensor) not in entries:
                fqn = f"{path}.{place.name}" if path else place.name
                entries[id(tensor)] = Entry(fqn, tensor, is_meta(tensor), shards.get(id(tensor)))
            entries[id(tensor)].places.append(place)
    return list(entries.values())


def class_name(module: nn.Module) -> str:
    """The name its author gave the class; `fully_shard` puts FSDP before it."""
    name = type(module).__name__
    return name.removeprefix("FSDP") if isinstance(module, FSDPModule) else name


def unwrapped_name(name: str) -> str:
    """A parameter's name without what wrappers put into it: torch.compile, activation checkpointing, FSDP1."""
    for wrapper in ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module."):
        name = name.replace(wrapper, "")
    return name


def is_meta(tensor: torch.Tensor) -> bool:
    """Whether a tensor, or the local part of a DTensor, has no storage."""
    return tensor.device.type == "meta"


def meta_left_in(model: nn.Module) -> Iterable[str]:
    """Names of tensors on meta: registered ones, and plain attributes that no one would ever fill."""
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for place, tensor in _places_of(module):
            if is_meta(tensor):
                yield prefix + place.name
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and is_meta(value):
                yield f"{prefix}{name} (a plain attribute, not a buffer)"


def _places_of(module: nn.Module) -> Iterator[tuple[Place, torch.Tensor]]:
    for name, parameter in list(module._parameters.items()):
        if parameter is not None:
            yield Place(module, name, True), parameter
    for name, buffer in list(module._buffers.items()):
        if buffer is not None:
            yield Place(module, name, False), buffer


def _empty_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if isinstance(tensor, DTensor) or not tensor.dtype.is_floating_point:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return torch.empty_like(tensor, device=device, requires_grad=False)
