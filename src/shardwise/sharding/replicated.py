"""Parameters held whole on every rank: scalars and the few others that FSDP2 cannot split.

Outside forward they are DTensors like all others, so optimizers, clipping and checkpoints need no special case.
During forward each module sees a plain tensor instead.
"""

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate


class Replicated:
    """The replicated parameters of one model, and the modules that use them."""

    def __init__(self) -> None:
        self._places: list[tuple[nn.Module, str, nn.Parameter]] = []

    def __bool__(self) -> bool:
        return bool(self._places)

    def add(self, places: Iterable[tuple[nn.Module, str]], mesh: DeviceMesh, device: torch.device) -> nn.Parameter:
        """Turn the parameter registered at `places` into a replicated DTensor, under all its names."""
        places = list(places)
        module, name = places[0]
        old = module._parameters[name]
        assert old is not None
        local = old.detach() if old.is_meta else old.detach().to(device)
        spread = DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)
        new = nn.Parameter(spread, requires_grad=old.requires_grad)
        for module, name in places:
            module._parameters[name] = new
            self._places.append((module, name, new))
        return new

    def show(self) -> None:
        """Let every module see a plain tensor; gradients flow through it to the DTensor."""
        locals_: dict[int, torch.Tensor] = {}
        for module, name, parameter in self._places:
            registered = module._parameters.get(name, parameter)
            if id(registered) not in locals_:
                assert registered is not None
                is_spread = isinstance(registered, DTensor)  # inside full_params a plain one stands here
                locals_[id(registered)] = registered.to_local() if is_spread else registered
            # Attributes of the instance come before nn.Module's look-up of parameters.
            module.__dict__[name] = locals_[id(registered)]

    def show_again(self) -> None:
        """Show for code that backward runs again; it must see tensors that want a gradient, as the first time."""
        with torch.enable_grad():
            self.show()

    def hide(self) -> None:
        """Show the DTensors again."""
        for module, name, _ in self._places:
            module.__dict__.pop(name, None)
