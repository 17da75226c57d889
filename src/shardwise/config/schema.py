"""How a model is sharded and ranks are laid out, as frozen dataclasses. No torch, no I/O."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge

from shardwise.config.load import check_ranges
from shardwise.errors import ConfigError, PlanError


class Strict:
    """Settings of which a mistyped name is an error, when `config.load` reads them."""

    __slots__ = ()
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}


PositiveInt = Annotated[int, Ge(1)]
NonNegativeInt = Annotated[int, Ge(0)]
DtypeName = Literal["float64", "float32", "bfloat16", "float16"]

ROOT_PATTERN = "(root)"  # what a plan calls the root's own group
PIPELINE_AXES = frozenset({"pipeline", "pp"})
MODEL_PARALLEL_AXES = frozenset({"tensor", "tp", "context", "cp", "expert", "ep", "sequence", "sp"})


def refuse_model_parallel(axes: Mapping[str, int], *, where: str, fix: str) -> None:
    """Raise where an axis that divides a model's layers or its sequences has more than one rank.

    Pipeline axes pass: each stage is a model of its own.

    Args:
        axes: Sizes by name.
        where: The setting or the mesh that they come from.
        fix: What to write instead.

    Raises:
        PlanError: There is such an axis.
    """
    for name, size in axes.items():
        if name in MODEL_PARALLEL_AXES and size > 1:
            raise PlanError(
                f"the mesh axis {name!r} has {size} ranks, and shardwise only shards and replicates",
                where=where,
                why=f"gradients are reduced over the axes that shard and replicate: weights along {name!r} would "
                "diverge without an error",
                fix=fix,
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshConfig(Strict):
    """How ranks are laid out: `replicate` groups of `shard` ranks."""

    shard: PositiveInt | None = None
    """Number of ranks that share one copy of the parameters; None: all remaining ranks."""
    replicate: PositiveInt = 1
    """Number of copies of the parameters; more than one is hybrid sharding (HSDP)."""
    tensor: PositiveInt = 1
    """Number of tensor-parallel ranks; must be 1: tensor parallelism is not supported."""
    device: Literal["auto", "cpu", "cuda", "xpu", "hpu", "mtia", "npu"] = "auto"
    """Device of the shards; `auto` takes the accelerator when there is one."""

    def sizes(self, num_ranks: int) -> dict[str, int]:
        """Axis name to size, outermost first, for `num_ranks` ranks; raise unless they fit exactly.

        Raises:
            ConfigError: A size is not positive, or they do not multiply to `num_ranks`.
            PlanError: `tensor` is more than 1.
        """
        check_ranges(self, "mesh")
        wider = "" if self.shard is None else f" and mesh.shard = {self.shard * self.tensor}"
        refuse_model_parallel({"tensor": self.tensor}, where="mesh.tensor", fix=f"set mesh.tensor = 1{wider}")
        shard = self.shard if self.shard is not None else max(num_ranks // self.replicate, 1)
        needed = self.replicate * shard
        if needed != num_ranks:
            fitting = num_ranks // self.replicate
            fixes = [f"start {needed} rank{'s' if needed > 1 else ''}"]
            if fitting >= 1 and fitting * self.replicate == num_ranks:
                fixes.append(f"set mesh.shard = {fitting}")
            raise ConfigError(
                f"a {self.replicate} x {shard} mesh needs {needed} ranks, got {num_ranks}",
                where="mesh.replicate, mesh.shard",
                why="every rank belongs to exactly one cell of the mesh",
                fix=", or ".join(fixes),
            )
        return {"replicate": self.replicate, "shard": shard} if self.replicate > 1 else {"shard": shard}


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionConfig(Strict):
    """Dtypes in which a group is unsharded, computed and reduced. Storage is the model's own dtype."""

    param_dtype: Literal["auto", "storage"] | DtypeName = "auto"
    """Dtype of unsharded parameters. `auto`: bfloat16 on GPUs that have it, float16 on older ones,
    storage on CPU. `storage`: as the model holds them."""
    reduce_dtype: Literal["auto", "storage"] | DtypeName = "auto"
    """Dtype of the gradient reduction. `auto` is float32 (float64 for float64 models). `storage`: the dtype
    of the gradients, which is 16 bits where parameters are stored or unsharded in 16 bits."""
    output_dtype: DtypeName | None = None
    """Dtype that a group's floating-point outputs are cast to; None: no cast."""
    cast_inputs: bool = True
    """Cast a group's floating-point inputs to its `param_dtype`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefetchConfig(Strict):
    """Number of groups to prefetch explicitly; 0 uses FSDP2's implicit prefetch."""

    forward: NonNegativeInt = 0
    """Number of groups all-gathered ahead of the running one in forward."""
    backward: NonNegativeInt = 0
    """Number of groups all-gathered ahead of the running one in backward."""
    early_root: bool = False
    """Unshard the root's parameters when `optimizer.step()` ends instead of when `model(...)` starts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupOverride(Strict):
    """Settings for the modules that a pattern matches; None keeps the setting."""

    pattern: str
    """Module FQN with `*`, or a class name: `*.router`, `model.norm`, `LlamaRMSNorm`. `(root)` is the root's own group,
    without those inside it."""
    param_dtype: Literal["storage"] | DtypeName | None = None
    """As in `precision.param_dtype`. A module inside a group becomes a group of its own."""
    reduce_dtype: DtypeName | None = None
    """As in `precision.reduce_dtype`."""
    output_dtype: DtypeName | None = None
    """As in `precision.output_dtype`."""
    cast_inputs: bool | None = None
    """As in `precision.cast_inputs`."""
    reshard_after_forward: bool | int | None = None
    """As in `ShardConfig.reshard_after_forward`."""
    offload: bool | None = None
    """As in `ShardConfig.offload`."""
    forward_prefetch: NonNegativeInt | None = None
    """As in `prefetch.forward`."""
    backward_prefetch: NonNegativeInt | None = None
    """As in `prefetch.backward`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardConfig(Strict):
    """How a model is sharded. The default decides everything; the plan gives the reasons."""

    group_by: Literal["auto", "children", "attribute", "root"] = "auto"
    """Where groups come from when no class, pattern, size or predicate is given: `auto` finds repeated
    blocks and big leaves, `children` takes the root's direct children, `attribute` modules marked with
    `_fsdp_wrap`, `root` makes a single group (rarely useful)."""
    block_classes: tuple[str, ...] = ()
    """Class names whose instances are groups."""
    block_patterns: tuple[str, ...] = ()
    """Module FQN patterns (`model.layers.*`) that are groups. `*` stays within one name, `**` spans dots."""
    min_group_params: int | None = None
    """Make a group of each smallest module with at least this many parameters."""
    wrap_if: Callable[..., Any] | None = None
    """`wrap_if(module)` or `wrap_if(fqn, module)`: truthy makes it a group. Python only, not YAML."""
    ignored: tuple[str, ...] = ()
    """Patterns of parameters or modules left unsharded; gradients are averaged over ranks all the same."""
    entry_points: tuple[str, ...] = ()
    """`module.fqn:method` (`:method` for the root): methods called from outside instead of `forward`."""
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    """Dtypes of every group unless overridden."""
    reshard_after_forward: bool | int | None = None
    """Reshard parameters after forward. None: yes, except in the root. An int: keep them sharded over that many ranks
    until backward; all ranks of the axis are the same as True, except in the root."""
    offload: bool = False
    """Keep shards, gradients and optimizer state in CPU memory."""
    pin_memory: bool | None = None
    """Pin offloaded shards; None pins when there is an accelerator to copy to."""
    prefetch: PrefetchConfig = field(default_factory=PrefetchConfig)
    """Explicit prefetching."""
    overrides: tuple[GroupOverride, ...] = ()
    """Per-pattern settings; the last match wins."""
    activations: Literal["auto", "keep", "full", "selective", "every_n"] = "auto"
    """What `checkpoint_activations` recomputes in backward instead of keeping; `keep` recomputes nothing. `auto` is
    `keep`; in `shardwise train` on GPUs it becomes `selective`, then `full`, when a single sequence does not fit."""
    compile: Literal["auto"] | bool = "auto"
    """Compile each repeated block, as `compile_blocks` does. `auto`: in `shardwise train` on GPUs, nowhere else."""
    shard_dim: Literal["auto", "first"] = "auto"
    """`auto` takes dim 0 unless another dimension wastes less padding; `first` is always dim 0."""
    mixed_storage: Literal["split", "upcast"] = "split"
    """What to do with trainable parameters of several dtypes in one group: split it, or upcast to the widest."""
    allow_16bit_storage: bool = False
    """Silence the warning about trainable parameters stored in 16 bits."""
    unused_parameters: Literal["auto", "reduce", "skip"] = "auto"
    """Parameters without a gradient on some rank: `reduce` sends zeros so that ranks stay in lockstep, `skip` skips
    them (torch's behaviour), `auto` reduces where the model's code can leave one out."""
