"""Every setting of a training run, as frozen dataclasses: what `shardwise train RUN.yaml` reads. No torch, no I/O."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from shardwise.config.schema import STRICT, MeshConfig, ShardConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """What is learnt from, and how it becomes sequences of tokens."""

    __pydantic_config__: ClassVar = STRICT

    source: str | tuple[str, ...] = "python"
    """`python` (this Python's own standard library), files, globs or folders, or `module:callable`."""
    format: Literal["auto", "text", "jsonl", "tokens", "dataset", "callable"] = "auto"
    """`auto` goes by the name: .jsonl, .bin (tokens), a folder written by `datasets`, else text."""
    evaluation: str | tuple[str, ...] | None = None
    """Held-out data, read like `source`. None: see `evaluation_fraction`."""
    evaluation_fraction: float = 0.0
    """How much of `source` is held out for evaluation when `evaluation` names nothing."""
    tokenizer: str = "bytes"
    """`bytes` (256 of them and an end of document), or a `tokenizer.json` of the tokenizers library, or its folder."""
    sequence_length: int = 128
    """Tokens in a sequence."""
    pack: bool = True
    """Fill sequences with several documents. False: one document a sequence, cut or padded."""
    keep_apart: bool = True
    """Documents of one sequence do not see each other. False: they do, as in much pretraining, and attention needs
    no mask, which is faster on GPUs."""
    text_field: str = "text"
    """Where a line of JSON or a row of a dataset holds plain text."""
    prompt_field: str = "prompt"
    """Where it holds a prompt, which is read but not learnt."""
    response_field: str = "response"
    """Where it holds the answer to the prompt, which is learnt."""
    token_dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] = "uint16"
    """How .bin files hold tokens."""
    shuffle: bool = True
    """Another order of samples in every epoch. False: as they lie."""
    workers: int = 1
    """Threads that make batches ahead of the step; 0 makes them when asked."""
    prefetch: int = 2
    """Batches held ready for each worker."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """How weights are changed."""

    __pydantic_config__: ClassVar = STRICT

    name: Literal["adamw", "sgd", "muon"] = "adamw"
    """`muon` changes the matrices of the blocks with Muon, everything else with AdamW."""
    learning_rate: float = 6e-3
    """The peak; the schedule scales it."""
    weight_decay: float = 0.1
    """Of matrices; vectors (norms, biases) and embeddings are not decayed."""
    decay_everything: bool = False
    """Decay vectors and embeddings too."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's averages."""
    eps: float = 1e-8
    """AdamW's smallest denominator."""
    momentum: float = 0.95
    """Of SGD and Muon."""
    nesterov: bool = True
    """Of SGD and Muon."""
    muon_learning_rate: float = 0.02
    """Muon's own peak, for the matrices it changes."""
    fused: Literal["auto"] | bool = "auto"
    """One kernel for all parameters, where the device has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """How the learning rate moves."""

    __pydantic_config__: ClassVar = STRICT

    name: Literal["constant", "cosine", "linear", "wsd"] = "cosine"
    """After the warm-up; `wsd` stays at the peak and falls at the end (warm-up, stable, decay)."""
    warmup_steps: int = 20
    """Steps in which it rises from 0."""
    decay_steps: int | None = None
    """Of `wsd`: steps in which it falls at the end; None: a fifth of all."""
    final_ratio: float = 0.1
    """The last learning rate, as a part of the peak."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """The loop."""

    __pydantic_config__: ClassVar = STRICT

    steps: int = 700
    """Optimizer steps in all, those before a resume among them."""
    batch_size: int = 16
    """Sequences of one optimizer step, over all ranks: the same on any number of ranks."""
    micro_batch_size: int | None = None
    """Sequences that one rank runs at once; None: all its part, halved on all ranks when one runs out of memory."""
    accumulation: Literal["comm", "memory", "hsdp"] = "comm"
    """When gradients of micro-steps are communicated; see `accumulate`."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this norm; 0 leaves them."""
    objective: str = "auto"
    """`auto`: next token where batches have labels, else the loss that the model returns; or `module:callable`,
    called with model and batch, which returns the loss summed over the tokens and their number."""
    ema_decay: float | None = None
    """Keep a moving average of the weights, and evaluate it."""
    evaluate_every: int | None = None
    """Steps between evaluations; None: only at the end, if there is held-out data."""
    evaluation_batches: int | None = None
    """At most so many batches of held-out data; None: all."""
    on_bad_loss: Literal["stop", "skip", "rewind"] = "stop"
    """What to do when a loss or a gradient is NaN or infinite: stop, leave the step out, or go back to the last
    checkpoint and leave the batch out."""
    max_bad_steps: int = 10
    """Stop after so many of them in one run, whatever `on_bad_loss` says."""
    max_restarts: int = 3
    """How often local ranks are started again from the last checkpoint after one of them died."""
    stop_signals: tuple[str, ...] = ("SIGTERM", "SIGINT", "SIGUSR1")
    """Signals that make the run save and end with status 4; a second SIGINT ends it at once."""
    sample: str | None = "def "
    """Continue this text after training, to see what was learnt; null: do not."""
    sample_tokens: int = 200
    """How far."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """What is kept of the run."""

    __pydantic_config__: ClassVar = STRICT

    every: int | None = 100
    """Steps between checkpoints; None: only at the end."""
    format: Literal["sharded", "full", "dcp"] = "sharded"
    """`sharded`: ours, in the background, each rank its part. `full`: one file of whole tensors, written by rank 0
    (DTensor API). `dcp`: the same as `sharded`, which torch's Distributed Checkpoint reads; older folders resume."""
    resume: Literal["auto", "never"] | str = "auto"
    """`auto`: from the newest checkpoint in the run's folder, if there is one; `never`; or the path of another's."""
    keep_last: int | None = 2
    """The newest so many are kept; None keeps all."""
    keep_every: int | None = None
    """Those whose step is a multiple of this are kept too."""
    keep_best: int | None = None
    """And so many with the lowest evaluation loss."""
    asynchronous: bool = True
    """Write in the background. `full` cannot: it keeps training waiting."""
    export: bool = False
    """At the end, write the weights as safetensors too, in a folder that transformers can open."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsConfig:
    """What is told about the run; metrics.jsonl in its folder is always written."""

    __pydantic_config__: ClassVar = STRICT

    every: int = 1
    """Steps between records."""
    tensorboard: bool = False
    """Write TensorBoard events too."""
    wandb: str | None = None
    """Send records to this project of Weights & Biases too."""
    peak_flops: float | None = None
    """What one device can do in a second, for MFU; None: known GPUs by name, no MFU elsewhere."""
    profile_step: int | None = None
    """Record a torch profile from this step on."""
    profile_steps: int = 3
    """For so many steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """One training run: `shardwise train RUN.yaml`."""

    __pydantic_config__: ClassVar = STRICT

    model: str = "llama3-bytes"
    """A reference model, a local Hugging Face folder or config, or `module:callable`."""
    model_options: dict[str, Any] = field(default_factory=dict)
    """Changes to a reference model's shape, as in `{num_layers: 8}`; arguments of a `module:callable`."""
    weights: str = "auto"
    """Weights to start from: a file or folder; `auto`: those in the model's own folder; `none`: new ones."""
    data: DataConfig = field(default_factory=DataConfig)
    """What is learnt from."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """How ranks are laid out."""
    shard: ShardConfig = field(default_factory=ShardConfig)
    """How the model is sharded."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """How weights are changed."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """How the learning rate moves."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """The loop."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """What is kept."""
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    """What is told."""
    folder: str | None = None
    """Where checkpoints, metrics and a copy of this config go; None: a new folder in `runs`."""
    seed: int = 0
    """Of weights, order of samples, dropout."""
    deterministic: bool = False
    """Only kernels that give the same bits every time."""
