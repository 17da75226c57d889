"""How a model is sharded and ranks are laid out, as frozen dataclasses. No torch, no I/O."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Interval

from shardwise.config.load import check_ranges
from shardwise.errors import ConfigError, PlanError


class Strict:
    """Settings of which a mistyped name is an error, when `config.load` reads them."""

    __slots__ = ()
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}


PositiveInt = Annotated[int, Ge(1)]
NonNegativeInt = Annotated[int, Ge(0)]
PositiveFloat = Annotated[float, Gt(0)]
Fraction = Annotated[float, Interval(ge=0, lt=1)]
UnitFloat = Annotated[float, Interval(ge=0, le=1)]
DtypeName = Literal["float64", "float32", "bfloat16", "float16"]

ROOT_PATTERN = "(root)"  # what a plan calls the root's own group

AXES = ("pipeline", "replicate", "shard", "expert", "context", "tensor")
"""What a mesh axis can be for, outermost first."""
BATCH_AXES = ("replicate", "shard", "expert")
"""Ranks along these have batches of their own; along the others they share one."""
GRADIENT_AXES = (*BATCH_AXES, "context")
"""Gradients of dense parameters are averaged over these."""
SHARD_AXES = ("shard", "expert", "context")
"""Dense parameters are sharded over these, as one axis."""
EXPERT_SHARD_AXES = ("shard", "context")
"""Parameters of experts, which the expert axis has divided already, are sharded over these, as one axis."""
SYNONYMS = {
    "pp": "pipeline", "dp_replicate": "replicate", "replica": "replicate", "dp_shard": "shard", "fsdp": "shard",
    "dp_shard_cp": "shard", "dp_cp": "shard", "ep": "expert", "cp": "context", "tp": "tensor",
}  # fmt: skip
"""Names that other code gives to mesh axes."""
KNOWN_AXES = frozenset([*AXES, *SYNONYMS, "dp", "ddp", "data"])


def axis_meanings(names: Sequence[str]) -> dict[str, str]:
    """What each axis of a mesh is for, by its name.

    Names that are neither in `AXES` nor in `SYNONYMS` (`dp`, `data`) are read as `fully_shard` reads a mesh: the last
    one shards, one before it replicates.
    """
    known = {name: SYNONYMS.get(name, name) for name in names if name in AXES or name in SYNONYMS}
    unknown = [name for name in names if name not in known]
    free = [meaning for meaning in ("replicate", "shard") if meaning not in known.values()]
    if len(unknown) > len(free):
        data = [name for name in names if known.get(name, "shard") in ("replicate", "shard")]
        raise PlanError(
            f"the mesh has {len(data)} data-parallel axes: {', '.join(data)}",
            where=f"mesh axes {', '.join(names)}",
            why="FSDP2 shards over one axis and replicates over at most one more",
            fix=f"name the axes {', '.join(AXES)}, as init_distributed(MeshConfig(...)) does",
        )
    guessed = dict(zip(unknown, free[-len(unknown) :] if unknown else (), strict=True))
    meanings = {name: known.get(name) or guessed[name] for name in names}
    if twice := [name for name, meaning in meanings.items() if list(meanings.values()).count(meaning) > 1]:
        raise PlanError(
            f"the mesh axes {' and '.join(map(repr, twice))} are both for {meanings[twice[0]]!r}",
            where=f"mesh axes {', '.join(names)}",
            why="each axis of a mesh divides something else",
            fix=f"name the axes {', '.join(AXES)}, as init_distributed(MeshConfig(...)) does",
        )
    return meanings


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshConfig(Strict):
    """How ranks are laid out. Their number is the product of the axes."""

    shard: PositiveInt | None = None
    """Number of ranks that share one copy of the parameters; None: all remaining ranks."""
    replicate: PositiveInt = 1
    """Number of copies of the parameters; more than one is hybrid sharding (HSDP)."""
    context: PositiveInt = 1
    """Number of ranks that share each sequence (context parallelism)."""
    tensor: PositiveInt = 1
    """Number of ranks that share each matrix product (tensor parallelism). They get the same batch."""
    expert: PositiveInt = 1
    """Number of ranks that share the experts of each layer (expert parallelism); dense parameters are sharded over
    them too."""
    pipeline: PositiveInt = 1
    """Number of stages that the layers are divided into (pipeline parallelism)."""
    device: Literal["auto", "cpu", "cuda", "xpu", "hpu", "mtia", "npu"] = "auto"
    """Device of the shards; `auto` takes the accelerator when there is one."""

    @property
    def num_ranks(self) -> int:
        """Product of the axes; `shard` counts as 1 where it is None."""
        return math.prod(getattr(self, name) or 1 for name in AXES)

    def sizes(self, num_ranks: int) -> dict[str, int]:
        """Axis name to size, outermost first, for `num_ranks` ranks; raise unless they fit exactly.

        Axes of one rank are left out, except `shard`.

        Raises:
            ConfigError: A size is not positive, or they do not multiply to `num_ranks`.
        """
        check_ranges(self, "mesh")
        others = self.num_ranks // (self.shard or 1)
        shard = self.shard if self.shard is not None else max(num_ranks // others, 1)
        sizes = {name: size for name in AXES if (size := getattr(self, name) or 1) > 1} | {"shard": shard}
        sizes = {name: sizes[name] for name in AXES if name in sizes}
        if (needed := others * shard) != num_ranks:
            fixes = [f"start {needed} rank{'s' if needed > 1 else ''}"]
            if num_ranks >= others and num_ranks % others == 0:
                fixes.append(f"set mesh.shard = {num_ranks // others}")
            shown = sizes if len(sizes) > 2 or sizes.keys() - {"replicate", "shard"} else None
            names = " x ".join(f"{name} {size}" for name, size in shown.items()) if shown else ""
            raise ConfigError(
                f"a {names or f'{self.replicate} x {shard}'} mesh needs {needed} ranks, got {num_ranks}",
                where=", ".join(f"mesh.{name}" for name in (shown or ("replicate", "shard"))),
                why="every rank belongs to exactly one cell of the mesh",
                fix=", or ".join(fixes),
            )
        return sizes


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
class TensorConfig(Strict):
    """How modules are divided over the `tensor` axis of the mesh."""

    plan: Mapping[str, str] = field(default_factory=dict)
    """Module FQN pattern to style, as in `"*.q_proj": "colwise"`; the last match wins. Modules that no pattern matches
    are left to the automatic plan. Styles: `colwise`, `rowwise`, `colwise_gather_output`, `rowwise_split_input`,
    `embedding`, `replicate`, `sequence`, `experts`, `off`."""
    sequence: Literal["auto"] | bool = "auto"
    """Sequence parallelism: norms and residuals hold a part of each sequence. `auto`: where the plan of the model has
    it."""
    loss_parallel: Literal["auto"] | bool = "auto"
    """Keep logits divided over the vocabulary up to the loss. `auto`: where the loss is computed in the model."""
    verify: bool = True
    """Compare the first forward with one in which layers hand each other whole tensors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertConfig(Strict):
    """How experts are divided over the `expert` axis of the mesh."""

    modules: tuple[str, ...] = ()
    """Patterns of the modules that hold experts; empty: all that are recognised."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextConfig(Strict):
    """How sequences are divided over the `context` axis of the mesh."""

    method: Literal["all_gather"] = "all_gather"
    """How attention sees the keys and values of other ranks."""
    balanced: bool = True
    """Give each rank an early and a late part of the sequence, so that causal attention costs each the same."""
    verify: bool = True
    """Compare a short prefix with and without context parallelism at the first forward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineConfig(Strict):
    """How the stages of the `pipeline` axis of the mesh take turns."""

    schedule: Literal["1f1b", "gpipe", "interleaved"] = "1f1b"
    """Order of forwards and backwards. `1f1b` keeps the activations of as many micro-batches as there are stages,
    `gpipe` of all of them; `interleaved` is `1f1b` with several stages on each rank, which wait less for each other."""
    microbatches: PositiveInt | None = None
    """Number of parts that a batch is divided into; None: twice the number of stages."""
    stages_per_rank: PositiveInt = 1
    """Number of stages on each rank; more than one needs `interleaved`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Float8Config(Strict):
    """Matrix products in float8 (torchao)."""

    recipe: Literal["off", "tensorwise", "rowwise"] = "off"
    """One scale a tensor, or one a row."""
    all_gather: Literal["auto"] | bool = "auto"
    """All-gather parameters in float8."""
    skip: tuple[str, ...] = ()
    """Patterns of modules to leave as they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig(Strict):
    """Low-rank adapters beside the linear layers of a model, which is frozen: see `add_lora`."""

    rank: PositiveInt = 16
    """Rank of the adapters."""
    alpha: PositiveFloat = 32.0
    """The adapters' output is multiplied by `alpha / rank`."""
    targets: Literal["auto"] | tuple[str, ...] = "auto"
    """Patterns of the layers that get adapters: module FQN with `*`, or a class name. `auto`: all linear layers of the
    repeated blocks."""
    dropout: Fraction = 0.0
    """Probability of dropping an input of an adapter."""
    dtype: DtypeName = "float32"
    """Dtype in which the adapters are stored and trained."""
    quantize: Literal["none", "nf4"] = "none"
    """`nf4` (QLoRA): store the weights of the blocks' linear layers in 4 bits an element."""


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
    """Patterns of parameters or modules left unsharded; their gradients are still averaged over ranks."""
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
    activations: Literal["auto", "keep", "full", "selective", "offload", "every_n", "regions"] | UnitFloat = "auto"
    """What `checkpoint_activations` recomputes in backward instead of keeping; `keep` recomputes nothing. `auto` is
    `keep`; in `shardwise train` on GPUs it becomes `selective`, then `offload`, then `full`, while a single sequence
    does not fit. A number is a memory budget: the part of its activations that a compiled block keeps."""
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
    tensor: TensorConfig = field(default_factory=TensorConfig)
    """Tensor and sequence parallelism, where the mesh has a `tensor` axis."""
    expert: ExpertConfig = field(default_factory=ExpertConfig)
    """Expert parallelism, where the mesh has an `expert` axis."""
    context: ContextConfig = field(default_factory=ContextConfig)
    """Context parallelism, where the mesh has a `context` axis."""
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    """Pipeline parallelism, where the mesh has a `pipeline` axis."""
    float8: Float8Config = field(default_factory=Float8Config)
    """Matrix products in float8."""
