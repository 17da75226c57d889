"""What shardwise remembers about each model it sharded, for as long as the model lives."""

from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.planning.plan import Plan


@dataclass(slots=True)
class ShardedState:
    """The plan a model was sharded by, and the parameters FSDP2 does not manage."""

    plan: Plan
    mesh: DeviceMesh
    """The data-parallel mesh: one or two axes."""
    replicated: dict[str, nn.Parameter] = field(default_factory=dict)
    """FQN to DTensor parameter, whole on every rank."""
    ignored: dict[str, nn.Parameter] = field(default_factory=dict)
    """FQN to plain parameter, left as the user had it."""
    forget: list[Callable[[], None]] = field(default_factory=list)
    """What drops our own notes on a step that failed."""


_STATES: WeakKeyDictionary[nn.Module, ShardedState] = WeakKeyDictionary()


def remember(model: nn.Module, state: ShardedState) -> None:
    """Record that `model` is the root of a sharded model."""
    _STATES[model] = state


def sharded_state(model: nn.Module) -> ShardedState | None:
    """What was recorded for `model`, or None when it is not a root that shardwise sharded."""
    return _STATES.get(model)


def sharded_roots() -> list[nn.Module]:
    """Every living root that shardwise sharded."""
    return list(_STATES)
