"""Settings of a training run, `shardwise train RUN.yaml`, as frozen dataclasses. No torch, no I/O."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge

from shardwise.config.schema import (
    Fraction,
    LoraConfig,
    MeshConfig,
    NonNegativeInt,
    PositiveInt,
    ShardConfig,
    Strict,
    UnitFloat,
)

NonNegativeFloat = Annotated[float, Ge(0)]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig(Strict):
    """Training data and tokenization."""

    source: str | tuple[str, ...] = "python"
    """`python` (the standard library of this Python), files, globs or folders, or `module:callable`."""
    format: Literal["auto", "text", "jsonl", "tokens", "dataset", "callable"] = "auto"
    """`auto`: by the name: .jsonl, .bin (tokens), a folder written by `datasets`, else text."""
    evaluation: str | tuple[str, ...] | None = None
    """Held-out data, read like `source`. None: see `evaluation_fraction`."""
    evaluation_fraction: Fraction = 0.0
    """Fraction of `source` held out for evaluation when `evaluation` is None."""
    tokenizer: str = "bytes"
    """`bytes` (256 bytes and an end-of-document token), a `tokenizer.json` of the tokenizers library, or its folder."""
    sequence_length: PositiveInt = 128
    """Number of tokens in a sequence."""
    pack: bool = True
    """Pack several documents into a sequence. False: one document per sequence, truncated or padded."""
    keep_apart: bool = True
    """Mask attention between documents of one sequence. False: no mask, as in much pretraining, which is faster on
    GPUs."""
    text_field: str = "text"
    """Field of a JSON line or dataset row with plain text."""
    prompt_field: str = "prompt"
    """Field with a prompt, which is excluded from the loss."""
    response_field: str = "response"
    """Field with the response to the prompt."""
    token_dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] = "uint16"
    """Dtype of the tokens in .bin files."""
    shuffle: bool = True
    """Shuffle the samples in every epoch. False: in the order of the source."""
    workers: NonNegativeInt = 1
    """Number of threads that prepare batches ahead of the step; 0 prepares them on demand."""
    prefetch: PositiveInt = 2
    """Number of batches prefetched by each worker."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig(Strict):
    """The optimizer."""

    name: Literal["adamw", "sgd", "muon"] = "adamw"
    """`muon` updates the matrices of the blocks with Muon, everything else with AdamW."""
    learning_rate: NonNegativeFloat = 6e-3
    """Peak learning rate; the schedule scales it."""
    weight_decay: NonNegativeFloat = 0.1
    """Weight decay of matrices; vectors (norms, biases) and embeddings are not decayed."""
    decay_everything: bool = False
    """Also apply weight decay to vectors and embeddings."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """Coefficients of AdamW's running averages."""
    eps: NonNegativeFloat = 1e-8
    """Term added to AdamW's denominator."""
    momentum: Fraction = 0.95
    """Momentum of SGD and Muon."""
    nesterov: bool = True
    """Use Nesterov momentum in SGD and Muon."""
    muon_learning_rate: NonNegativeFloat = 0.02
    """Peak learning rate of the matrices that Muon updates."""
    fused: Literal["auto"] | bool = "auto"
    """Use the fused optimizer kernel; `auto`: if the device supports it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig(Strict):
    """The learning-rate schedule."""

    name: Literal["constant", "cosine", "linear", "wsd"] = "cosine"
    """Schedule after the warm-up; `wsd` (warm-up, stable, decay) stays at the peak and decays at the end."""
    warmup_steps: NonNegativeInt = 20
    """Number of steps in which the learning rate rises from 0 to the peak."""
    decay_steps: int | None = None
    """Number of decay steps at the end of `wsd`; None: a fifth of all steps."""
    final_ratio: UnitFloat = 0.1
    """Final learning rate as a fraction of the peak."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig(Strict):
    """The training loop."""

    steps: PositiveInt = 700
    """Total number of optimizer steps, including those before a resume."""
    batch_size: PositiveInt = 16
    """Number of sequences per optimizer step over all ranks; independent of the number of ranks."""
    micro_batch_size: PositiveInt | None = None
    """Number of sequences per micro-batch of a rank; None: its whole part of the batch, halved on all ranks until the
    first steps fit in memory. For that the first three steps are tried without communication."""
    accumulation: Literal["comm", "memory", "hsdp"] = "comm"
    """Gradient accumulation mode; see `accumulate`."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Clip gradients to this norm; 0: no clipping."""
    objective: str = "auto"
    """`auto`: next-token loss if batches have labels, else the loss returned by the model; or `module:callable`,
    called with model and batch, which returns the loss summed over the tokens and the number of tokens."""
    ema_decay: UnitFloat | None = None
    """Decay of a moving average of the weights, which is used for evaluation; None: no average."""
    evaluate_every: PositiveInt | None = None
    """Number of steps between evaluations; None: only at the end, if there is held-out data."""
    evaluation_batches: PositiveInt | None = None
    """Maximum number of held-out batches per evaluation; None: all."""
    on_bad_loss: Literal["stop", "skip", "rewind"] = "stop"
    """Action for a NaN or infinite loss or gradient: stop, skip the step, or return to the last checkpoint and skip
    the batch."""
    max_bad_steps: NonNegativeInt = 10
    """Maximum number of such steps in a run; one more stops it, for any `on_bad_loss`."""
    max_restarts: NonNegativeInt = 3
    """Maximum number of restarts from the last checkpoint after a local rank died."""
    stop_signals: tuple[str, ...] = ("SIGTERM", "SIGINT", "SIGUSR1")
    """Signals on which the run saves a checkpoint and exits with status 4; a second SIGINT ends it immediately."""
    sample: str | None = "def "
    """Prompt to generate a sample from after training; null: no sample."""
    sample_tokens: NonNegativeInt = 200
    """Number of tokens to generate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig(Strict):
    """Checkpoints of the run."""

    every: PositiveInt | None = 100
    """Number of steps between checkpoints; None: only at the end."""
    format: Literal["sharded", "full", "dcp"] = "sharded"
    """`sharded`: each rank writes its shards, in the background. `full`: one file of unsharded tensors, written by
    rank 0. `dcp`: the same as `sharded`, which torch's Distributed Checkpoint reads; older folders resume."""
    resume: Literal["auto", "never"] | str = "auto"
    """`auto`: the latest checkpoint in the run's folder, if any; `never`; or the path of a checkpoint."""
    keep_last: PositiveInt | None = 2
    """Number of most recent checkpoints to keep; None: all."""
    keep_every: PositiveInt | None = None
    """Also keep checkpoints whose step is a multiple of this."""
    keep_best: PositiveInt | None = None
    """Also keep this number of checkpoints with the lowest evaluation loss."""
    asynchronous: bool = True
    """Write in the background; `full` blocks training."""
    export: bool = False
    """At the end, also write the weights as safetensors, in a folder that transformers can load."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsConfig(Strict):
    """Metrics and trackers; metrics.jsonl in the run's folder is always written."""

    every: PositiveInt = 1
    """Number of steps between records."""
    tensorboard: bool = False
    """Also write TensorBoard events."""
    wandb: str | None = None
    """Also send records to this project of Weights & Biases."""
    peak_flops: float | None = None
    """Peak FLOP/s of one device, for MFU; None: known GPUs by name, no MFU elsewhere."""
    profile_step: int | None = None
    """First step of a torch profile; None: no profile."""
    profile_steps: int = 3
    """Number of steps to profile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig(Strict):
    """One training run: `shardwise train RUN.yaml`."""

    model: str = "llama3-bytes"
    """A reference model, a local Hugging Face folder or config, or `module:callable`."""
    model_options: dict[str, Any] = field(default_factory=dict)
    """Overrides of a reference model's shape, as in `{num_layers: 8}`; arguments of a `module:callable`."""
    weights: str = "auto"
    """Initial weights: a file or folder; `auto`: those in the model's folder; `none`: random initialization."""
    lora: LoraConfig | None = None
    """Train low-rank adapters and freeze the model's weights (`add_lora`); None: train all weights."""
    data: DataConfig = field(default_factory=DataConfig)
    """The training data."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """The device mesh."""
    shard: ShardConfig = field(default_factory=ShardConfig)
    """Settings of sharding."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The optimizer."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """The learning-rate schedule."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """The training loop."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoints."""
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    """Metrics and trackers."""
    folder: str | None = None
    """Folder of checkpoints, metrics and a copy of this config; None: a new folder in `runs`."""
    seed: int = 0
    """Seed of weights, sample order and dropout."""
    deterministic: bool = False
    """Use only deterministic kernels."""
