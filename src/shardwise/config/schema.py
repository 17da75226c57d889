"""Settings of sharding and of the device mesh, as frozen dataclasses. No torch, no I/O."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Interval

from shardwise.config.load import check_ranges
from shardwise.errors import ConfigError, PlanError


class Strict:
    """Base of settings; `config.load` rejects unknown names."""

    __slots__ = ()
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}


PositiveInt = Annotated[int, Ge(1)]
NonNegativeInt = Annotated[int, Ge(0)]
PositiveFloat = Annotated[float, Gt(0)]
Fraction = Annotated[float, Interval(ge=0, lt=1)]
UnitFloat = Annotated[float, Interval(ge=0, le=1)]
DtypeName = Literal["float64", "float32", "bfloat16", "float16"]

ROOT_PATTERN = "(root)"  # name of the root's group in plans

AXES = ("pipeline", "replicate", "shard", "expert", "context", "tensor")
"""Meanings of mesh axes, outermost first."""
BATCH_AXES = ("replicate", "shard", "expert")
"""Ranks along these axes have different batches; ranks along the others share a batch."""
GRADIENT_AXES = (*BATCH_AXES, "context")
"""Gradients of dense parameters are averaged over these axes."""
SHARD_AXES = ("shard", "expert", "context")
"""Dense parameters are sharded over these axes, flattened."""
EXPERT_SHARD_AXES = ("shard", "context")
"""Expert parameters, already split over the expert axis, are sharded over these axes, flattened."""
SYNONYMS = {
    "pp": "pipeline", "dp_replicate": "replicate", "replica": "replicate", "dp_shard": "shard", "fsdp": "shard",
    "dp_shard_cp": "shard", "dp_cp": "shard", "ep": "expert", "cp": "context", "tp": "tensor",
}  # fmt: skip
"""Other common names of mesh axes."""
KNOWN_AXES = frozenset([*AXES, *SYNONYMS, "dp", "ddp", "data"])


def axis_meanings(names: Sequence[str]) -> dict[str, str]:
    """Return the meaning of each mesh axis by its name.

    Names that are neither in `AXES` nor in `SYNONYMS` (`dp`, `data`) follow the convention of `fully_shard`: the last
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
            f"the mesh axes {' and '.join(map(repr, twice))} both mean {meanings[twice[0]]!r}",
            where=f"mesh axes {', '.join(names)}",
            why="each mesh axis needs a different meaning",
            fix=f"name the axes {', '.join(AXES)}, as init_distributed(MeshConfig(...)) does",
        )
    return meanings


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshConfig(Strict):
    """Sizes of the mesh axes. Their product is the number of ranks."""

    shard: PositiveInt | None = None
    """Number of ranks that share one copy of the parameters; None: all remaining ranks."""
    replicate: PositiveInt = 1
    """Number of copies of the parameters; more than one is hybrid sharding (HSDP)."""
    context: PositiveInt = 1
    """Number of ranks that share each sequence (context parallelism)."""
    tensor: PositiveInt = 1
    """Number of ranks that share each matrix product (tensor parallelism). They get the same batch."""
    expert: PositiveInt = 1
    """Number of ranks that share the experts of each layer (expert parallelism); dense parameters are also sharded
    over them."""
    pipeline: PositiveInt = 1
    """Number of pipeline stages of the layers (pipeline parallelism)."""
    device: Literal["auto", "cpu", "cuda", "xpu", "hpu", "mtia", "npu"] = "auto"
    """Device of the shards; `auto`: the accelerator if available, else the CPU."""

    @property
    def num_ranks(self) -> int:
        """Product of the axes' sizes; `shard` counts as 1 if it is None."""
        return math.prod(getattr(self, name) or 1 for name in AXES)

    def sizes(self, num_ranks: int) -> dict[str, int]:
        """Return axis sizes by name, outermost first, for `num_ranks` ranks; raise if the number does not match.

        Axes of size 1 are omitted, except `shard`.

        Raises:
            ConfigError: A size is not positive, or the product of the sizes is not `num_ranks`.

        Ranks:
            Local.
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
    """Dtype of unsharded parameters. `auto`: bfloat16 on GPUs that support it, float16 on older ones,
    storage on CPU. `storage`: the model's dtype."""
    reduce_dtype: Literal["auto", "storage"] | DtypeName = "auto"
    """Dtype of the gradient reduction. `auto` is float32 (float64 for float64 models). `storage`: the dtype
    of the gradients, which is 16 bits if parameters are stored or unsharded in 16 bits."""
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
    """Unshard the root's parameters at the end of `optimizer.step()` instead of the start of `model(...)`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupOverride(Strict):
    """Settings for the modules that a pattern matches; None keeps the setting."""

    pattern: str
    """Module FQN with `*`, or a class name: `*.router`, `model.norm`, `LlamaRMSNorm`. `(root)` is the root group."""
    param_dtype: Literal["storage"] | DtypeName | None = None
    """As in `precision.param_dtype`. A module inside a group becomes a separate group."""
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
    """Settings of tensor parallelism, over the `tensor` axis of the mesh."""

    plan: Mapping[str, str] = field(default_factory=dict)
    """Module FQN pattern to style, as in `"*.q_proj": "colwise"`; the last match wins. Other modules follow the
    automatic plan. Styles: `colwise`, `rowwise`, `colwise_gather_output`, `rowwise_split_input`, `embedding`,
    `replicate`, `sequence`, `experts`, `off`."""
    sequence: Literal["auto"] | bool = "auto"
    """Sequence parallelism: norms and residuals work on a part of each sequence. `auto`: if the model's plan has it."""
    loss_parallel: Literal["auto"] | bool = "auto"
    """Keep logits sharded over the vocabulary up to the loss. `auto`: if the model computes the loss."""
    verify: bool = True
    """Compare the first forward with one on full tensors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertConfig(Strict):
    """Settings of expert parallelism, over the `expert` axis of the mesh."""

    modules: tuple[str, ...] = ()
    """Patterns of modules of experts; empty: all that are recognized."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextConfig(Strict):
    """Settings of context parallelism, over the `context` axis of the mesh."""

    method: Literal["all_gather"] = "all_gather"
    """Exchange of keys and values between ranks."""
    balanced: bool = True
    """Give each rank an early and a late chunk of the sequence, to balance causal attention."""
    verify: bool = True
    """Compare a short prefix with and without context parallelism at the first forward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineConfig(Strict):
    """Settings of pipeline parallelism, over the `pipeline` axis of the mesh."""

    schedule: Literal["1f1b", "gpipe", "interleaved"] = "1f1b"
    """Pipeline schedule. `1f1b` saves the activations of one micro-batch per stage, `gpipe` of all micro-batches;
    `interleaved` is `1f1b` with several stages per rank and a smaller pipeline bubble."""
    microbatches: PositiveInt | None = None
    """Number of micro-batches per batch; None: twice the number of stages."""
    stages_per_rank: PositiveInt = 1
    """Number of stages on each rank; more than one needs `interleaved`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Float8Config(Strict):
    """Matrix products in float8 (torchao)."""

    recipe: Literal["off", "tensorwise", "rowwise"] = "off"
    """One scale per tensor, or one per row."""
    all_gather: Literal["auto"] | bool = "auto"
    """All-gather parameters in float8."""
    skip: tuple[str, ...] = ()
    """Patterns of modules to exclude."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig(Strict):
    """Low-rank adapters for the linear layers of a frozen model; see `add_lora`."""

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
    """`nf4` (QLoRA): store the weights of the blocks' linear layers in 4 bits per element."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardConfig(Strict):
    """Settings of sharding. By default everything is automatic; the plan gives the reasons."""

    group_by: Literal["auto", "children", "attribute", "root"] = "auto"
    """Grouping without a class, pattern, size or predicate: `auto` finds repeated blocks and large
    leaves, `children` uses the root's direct children, `attribute` modules marked with `_fsdp_wrap`,
    `root` a single group (rarely useful)."""
    block_classes: tuple[str, ...] = ()
    """Class names whose instances are groups."""
    block_patterns: tuple[str, ...] = ()
    """Module FQN patterns (`model.layers.*`) that are groups. `*` stays within one name, `**` spans dots."""
    min_group_params: int | None = None
    """Group the smallest modules with at least this number of parameters."""
    wrap_if: Callable[..., Any] | None = None
    """`wrap_if(module)` or `wrap_if(fqn, module)`: truthy makes it a group. Python only, not YAML."""
    ignored: tuple[str, ...] = ()
    """Patterns of parameters or modules left unsharded; their gradients are still averaged over ranks."""
    entry_points: tuple[str, ...] = ()
    """`module.fqn:method` (`:method` for the root): methods called from outside instead of `forward`."""
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    """Dtypes of every group unless overridden."""
    reshard_after_forward: bool | int | None = None
    """Reshard parameters after forward. None: yes, except in the root. An int: reshard to that number of ranks until
    backward; the size of the axis equals True, except in the root."""
    offload: bool = False
    """Keep shards, gradients and optimizer state in CPU memory."""
    pin_memory: bool | None = None
    """Pin offloaded shards; None: if there is an accelerator."""
    prefetch: PrefetchConfig = field(default_factory=PrefetchConfig)
    """Explicit prefetching."""
    overrides: tuple[GroupOverride, ...] = ()
    """Per-pattern settings; the last match wins."""
    activations: Literal["auto", "keep", "full", "selective", "offload", "every_n", "regions"] | UnitFloat = "auto"
    """Activation checkpointing, see `checkpoint_activations`; `keep` recomputes nothing. `auto` is `keep`; in
    `shardwise train` on GPUs it becomes `selective`, `offload` or `full` if a single sequence does not fit. A number is
    a memory budget: the fraction of activations that a compiled block saves."""
    compile: Literal["auto"] | bool = "auto"
    """Compile each repeated block, as `compile_blocks` does. `auto`: only in `shardwise train` on GPUs."""
    shard_dim: Literal["auto", "first"] = "auto"
    """`auto`: dim 0 unless another dimension needs less padding; `first`: always dim 0."""
    mixed_storage: Literal["split", "upcast"] = "split"
    """Trainable parameters of several dtypes in one group: split the group, or upcast to the widest dtype."""
    allow_16bit_storage: bool = False
    """Silence the warning about trainable parameters stored in 16 bits."""
    unused_parameters: Literal["auto", "reduce", "skip"] = "auto"
    """Parameters without a gradient on some rank: `reduce` reduces zeros, `skip` skips them (torch's default), `auto`
    reduces if the model's code may skip parameters."""
    tensor: TensorConfig = field(default_factory=TensorConfig)
    """Tensor and sequence parallelism, if the mesh has a `tensor` axis."""
    expert: ExpertConfig = field(default_factory=ExpertConfig)
    """Expert parallelism, if the mesh has an `expert` axis."""
    context: ContextConfig = field(default_factory=ContextConfig)
    """Context parallelism, if the mesh has a `context` axis."""
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    """Pipeline parallelism, if the mesh has a `pipeline` axis."""
    float8: Float8Config = field(default_factory=Float8Config)
    """Matrix products in float8."""
