"""PyTorch FSDP2 made right the first time, for any `nn.Module`.

Public names load on first use: importing shardwise does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.checkpointing.convert import convert_checkpoint as convert_checkpoint
    from shardwise.checkpointing.full_file import load_full as load_full
    from shardwise.checkpointing.full_file import save_full as save_full
    from shardwise.checkpointing.inspecting import Inspection as Inspection
    from shardwise.checkpointing.inspecting import diff_checkpoints as diff_checkpoints
    from shardwise.checkpointing.inspecting import inspect_checkpoint as inspect_checkpoint
    from shardwise.checkpointing.inspecting import verify_checkpoint as verify_checkpoint
    from shardwise.checkpointing.manager import Checkpointer as Checkpointer
    from shardwise.checkpointing.matching import KeyReport as KeyReport
    from shardwise.checkpointing.weights import load_weights as load_weights
    from shardwise.checkpointing.weights import save_weights as save_weights
    from shardwise.config.run import RunConfig as RunConfig
    from shardwise.config.schema import ContextConfig as ContextConfig
    from shardwise.config.schema import ExpertConfig as ExpertConfig
    from shardwise.config.schema import Float8Config as Float8Config
    from shardwise.config.schema import GroupOverride as GroupOverride
    from shardwise.config.schema import LoraConfig as LoraConfig
    from shardwise.config.schema import MeshConfig as MeshConfig
    from shardwise.config.schema import PipelineConfig as PipelineConfig
    from shardwise.config.schema import PrecisionConfig as PrecisionConfig
    from shardwise.config.schema import PrefetchConfig as PrefetchConfig
    from shardwise.config.schema import ShardConfig as ShardConfig
    from shardwise.config.schema import TensorConfig as TensorConfig
    from shardwise.diagnosing.check import check as check
    from shardwise.diagnosing.guard import Guard as Guard
    from shardwise.diagnosing.guard import explained as explained
    from shardwise.diagnosing.guard import guard as guard
    from shardwise.diagnosing.parity import parity as parity
    from shardwise.diagnosing.parity_criteria import Parity as Parity
    from shardwise.distributed.mesh import draw_mesh as draw_mesh
    from shardwise.distributed.mesh import init_distributed as init_distributed
    from shardwise.errors import CheckpointError as CheckpointError
    from shardwise.errors import ConfigError as ConfigError
    from shardwise.errors import EnvironmentProblem as EnvironmentProblem
    from shardwise.errors import PlanError as PlanError
    from shardwise.errors import ShardError as ShardError
    from shardwise.errors import ShardwiseError as ShardwiseError
    from shardwise.errors import SourceError as SourceError
    from shardwise.explaining import Explanation as Explanation
    from shardwise.explaining import explain as explain
    from shardwise.fsdp1.codemod.migrate import Migration as Migration
    from shardwise.fsdp1.codemod.migrate import migrate as migrate
    from shardwise.linting.lint import lint as lint
    from shardwise.models.nested_tensors import cast_inputs as cast_inputs
    from shardwise.planning.plan import Plan as Plan
    from shardwise.planning.planner import plan as plan
    from shardwise.sharding.adapters import add_lora as add_lora
    from shardwise.sharding.adapters import merge_lora as merge_lora
    from shardwise.sharding.apply import shard as shard
    from shardwise.sharding.blocks import checkpoint_activations as checkpoint_activations
    from shardwise.sharding.blocks import compile_blocks as compile_blocks
    from shardwise.sharding.context_attention import split_sequences as split_sequences
    from shardwise.sharding.context_parallel import whole_sequences as whole_sequences
    from shardwise.sharding.full_params import full_params as full_params
    from shardwise.sharding.full_params import iter_full_tensors as iter_full_tensors
    from shardwise.sharding.materialize import materialize as materialize
    from shardwise.sharding.pipeline import Pipeline as Pipeline
    from shardwise.sharding.pipeline import pipeline as pipeline
    from shardwise.sharding.prepare import prepare_fully_shard as prepare_fully_shard
    from shardwise.sharding.registry import recover as recover
    from shardwise.training.ema import EMA as EMA
    from shardwise.training.generating import generate as generate
    from shardwise.training.loop import fit as fit
    from shardwise.training.step import accumulate as accumulate
    from shardwise.training.step import clip_grad_norm_ as clip_grad_norm_
    from shardwise.training.step import lockstep as lockstep
    from shardwise.training.step import mean_over_ranks as mean_over_ranks
    from shardwise.training.step import token_mean as token_mean

__version__ = "0.2.0"

_HOMES = {
    "shardwise.checkpointing.convert": ("convert_checkpoint",),
    "shardwise.checkpointing.full_file": ("load_full", "save_full"),
    "shardwise.checkpointing.inspecting": ("Inspection", "diff_checkpoints", "inspect_checkpoint", "verify_checkpoint"),
    "shardwise.checkpointing.manager": ("Checkpointer",),
    "shardwise.checkpointing.matching": ("KeyReport",),
    "shardwise.checkpointing.weights": ("load_weights", "save_weights"),
    "shardwise.config.run": ("RunConfig",),
    "shardwise.config.schema": (
        "ContextConfig", "ExpertConfig", "Float8Config", "GroupOverride", "LoraConfig", "MeshConfig", "PipelineConfig",
        "PrecisionConfig", "PrefetchConfig", "ShardConfig", "TensorConfig",
    ),
    "shardwise.diagnosing.check": ("check",),
    "shardwise.diagnosing.guard": ("Guard", "explained", "guard"),
    "shardwise.diagnosing.parity": ("parity",),
    "shardwise.diagnosing.parity_criteria": ("Parity",),
    "shardwise.distributed.mesh": ("draw_mesh", "init_distributed"),
    "shardwise.errors": (
        "CheckpointError", "ConfigError", "EnvironmentProblem", "PlanError", "ShardError", "ShardwiseError",
        "SourceError",
    ),
    "shardwise.explaining": ("Explanation", "explain"),
    "shardwise.fsdp1.codemod.migrate": ("Migration", "migrate"),
    "shardwise.linting.lint": ("lint",),
    "shardwise.planning.plan": ("Plan",),
    "shardwise.planning.planner": ("plan",),
    "shardwise.sharding.adapters": ("add_lora", "merge_lora"),
    "shardwise.sharding.apply": ("shard",),
    "shardwise.sharding.blocks": ("checkpoint_activations", "compile_blocks"),
    "shardwise.sharding.context_attention": ("split_sequences",),
    "shardwise.sharding.context_parallel": ("whole_sequences",),
    "shardwise.sharding.full_params": ("full_params", "iter_full_tensors"),
    "shardwise.models.nested_tensors": ("cast_inputs",),
    "shardwise.sharding.materialize": ("materialize",),
    "shardwise.sharding.pipeline": ("Pipeline", "pipeline"),
    "shardwise.sharding.prepare": ("prepare_fully_shard",),
    "shardwise.sharding.registry": ("recover",),
    "shardwise.training.ema": ("EMA",),
    "shardwise.training.generating": ("generate",),
    "shardwise.training.loop": ("fit",),
    "shardwise.training.step": ("accumulate", "clip_grad_norm_", "lockstep", "mean_over_ranks", "token_mean"),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", *sorted(_HOME_OF)]  # pyright: ignore


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
