"""The Plan: one immutable, printable value that says everything sharding will do, and why. No torch calls."""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from shardwise.config.schema import ROOT_PATTERN

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "complex64": 8, "complex128": 16, "int64": 8,
    "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedParameter:
    """One parameter: where it lives in the model and how its storage is spread over ranks."""

    fqn: str
    aliases: tuple[str, ...] = ()
    """Other names of the same tensor (ties)."""
    shape: tuple[int, ...]
    dtype: str
    """Storage dtype."""
    trainable: bool = True
    placement: Literal["shard", "replicate", "ignore"] = "shard"
    shard_dim: int = 0
    make_contiguous: bool = False
    """Storage is rewritten row-major first: FSDP2 shards nothing else."""
    upcast_from: str | None = None
    """The dtype before sharding, where the plan changes storage."""
    reason: str = ""
    """Why, where it is not the default."""

    @property
    def numel(self) -> int:
        """Elements, over all ranks."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Storage, over all ranks."""
        return self.numel * DTYPE_BYTES.get(self.dtype, 4)

    def bytes_per_rank(self, num_shards: int) -> int:
        """Storage on the fullest rank; dim 0 is padded up to a multiple of the ranks."""
        if self.placement != "shard" or not self.shape:
            return self.num_bytes
        rows = self.shape[self.shard_dim]
        return -(-rows // num_shards) * (self.num_bytes // rows if rows else 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Parameters gathered together: the modules of one `fully_shard` call and its settings."""

    modules: tuple[str, ...]
    """FQNs; the root is the empty name."""
    kind: Literal["block", "leaf", "tie", "island", "storage", "part", "root"]
    """What made it a group; see `reason`."""
    parameters: tuple[PlannedParameter, ...]
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    output_dtype: str | None = None
    cast_inputs: bool = True
    reshard_after_forward: bool | int | None = None
    offload: bool = False
    pin_memory: bool = False
    forward_prefetch: tuple[str, ...] = ()
    """First module of each group gathered ahead in forward."""
    backward_prefetch: tuple[str, ...] = ()
    entry_points: tuple[str, ...] = ()
    """`module:method` names besides `forward` that enter the group (`:method` for the root)."""
    held: bool = False
    """Gathered when the root is entered and kept to the end of backward: code outside reads its parameters."""
    reduce_unused: bool = False
    """Send zeros for parameters that got no gradient on this rank."""
    reason: str = ""

    @property
    def name(self) -> str:
        """How the group is called in messages."""
        return "+".join(module or ROOT_PATTERN for module in self.modules)

    @property
    def numel(self) -> int:
        """Elements, over all ranks."""
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def num_bytes(self) -> int:
        """Storage, over all ranks."""
        return sum(parameter.num_bytes for parameter in self.parameters)

    @property
    def storage_dtypes(self) -> tuple[str, ...]:
        """Dtypes its parameters are stored in."""
        return tuple(sorted({parameter.dtype for parameter in self.parameters}))

    def bytes_per_rank(self, num_shards: int) -> int:
        """Storage on the fullest rank."""
        return sum(parameter.bytes_per_rank(num_shards) for parameter in self.parameters)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What `shard()` will do to a model. Equal on every rank; `print(plan)` is a tree with reasons."""

    model: str
    """Class of the root module."""
    device: str
    """Device type the groups live on."""
    axes: tuple[tuple[str, int], ...]
    """Data-parallel mesh axes, outermost first: `(("replicate", 2), ("shard", 4))`."""
    groups: tuple[Group, ...]
    """Children first, root last."""
    replicated: tuple[PlannedParameter, ...] = ()
    """Held whole on every rank: too small or odd for FSDP2."""
    ignored: tuple[PlannedParameter, ...] = ()
    """Left as they are, by request; gradients are averaged."""
    grad_scaler: bool = False
    """float16 compute: the loop needs `torch.amp.GradScaler`."""
    early_root: bool = False
    """Gather the root right after `optimizer.step()`."""
    outer_modules: tuple[str, ...] = ()
    """Modules outside all groups but the root that a script may call by themselves; they enter through the root."""
    track_unused: bool = False
    """The model's code can leave parameters out: agree after each backward on which got no gradient anywhere."""
    reasons: tuple[str, ...] = ()
    """Decisions about the model as a whole."""
    warnings: tuple[str, ...] = ()

    @property
    def num_shards(self) -> int:
        """Ranks that hold one copy of the parameters between them."""
        return dict(self.axes).get("shard", 1)

    @property
    def root(self) -> Group:
        """The group of the model itself."""
        return self.groups[-1]

    @property
    def parameters(self) -> Iterator[PlannedParameter]:
        """Every parameter once, whatever becomes of it."""
        for group in self.groups:
            yield from group.parameters
        yield from self.replicated
        yield from self.ignored

    @property
    def num_bytes(self) -> int:
        """Storage, over all ranks."""
        return sum(parameter.num_bytes for parameter in self.parameters)

    @property
    def bytes_per_rank(self) -> int:
        """Parameter storage on the fullest rank."""
        return sum(parameter.bytes_per_rank(self.num_shards) for parameter in self.parameters)

    def group_of(self, parameter_fqn: str) -> Group | None:
        """The group that gathers a parameter, by any of its names."""
        for group in self.groups:
            for parameter in group.parameters:
                if parameter_fqn == parameter.fqn or parameter_fqn in parameter.aliases:
                    return group
        return None

    def to_json(self, indent: int | None = None) -> str:
        """The plan as JSON; `Plan.from_json` reads it back to an equal plan."""
        from shardwise.planning.plan_json import encode_plan  # it needs this module's classes

        return encode_plan(self, indent)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Read what `to_json` wrote; a plan of another format is refused."""
        from shardwise.planning.plan_json import decode_plan

        return decode_plan(text)

    def digest(self) -> str:
        """Short fingerprint; ranks compare it before they change anything."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def __str__(self) -> str:
        from shardwise.planning.plan_text import render_plan

        return render_plan(self)
