"""PyTorch FSDP2 made right the first time, for any `nn.Module`.

Public names load on first use: importing shardwise does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.checkpointing.convert import convert_checkpoint as convert_checkpoint
    from shardwise.checkpointing.differing import diff_checkpoints as diff_checkpoints
    from shardwise.checkpointing.exporting import save_weights as save_weights
    from shardwise.checkpointing.full_file import load_full as load_full
    from shardwise.checkpointing.full_file import save_full as save_full
    from shardwise.checkpointing.inspecting import Inspection as Inspection
    from shardwise.checkpointing.inspecting import inspect_checkpoint as inspect_checkpoint
    from shardwise.checkpointing.manager import Checkpointer as Checkpointer
    from shardwise.checkpointing.state.keys import KeyReport as KeyReport
    from shardwise.checkpointing.verifying import verify_checkpoint as verify_checkpoint
    from shardwise.checkpointing.weights import load_weights as load_weights
    from shardwise.comparing import Parity as Parity
    from shardwise.comparing import parity as parity
    from shardwise.config.run import RunConfig as RunConfig
    from shardwise.config.schema import GroupOverride as GroupOverride
    from shardwise.config.schema import MeshConfig as MeshConfig
    from shardwise.config.schema import PrecisionConfig as PrecisionConfig
    from shardwise.config.schema import PrefetchConfig as PrefetchConfig
    from shardwise.config.schema import ShardConfig as ShardConfig
    from shardwise.diagnosing.check import check as check
    from shardwise.diagnosing.explained import explained as explained
    from shardwise.diagnosing.guard import Guard as Guard
    from shardwise.diagnosing.guard import guard as guard
    from shardwise.errors import CheckpointError as CheckpointError
    from shardwise.errors import ConfigError as ConfigError
    from shardwise.errors import EnvironmentProblem as EnvironmentProblem
    from shardwise.errors import PlanError as PlanError
    from shardwise.errors import ShardError as ShardError
    from shardwise.errors import ShardwiseError as ShardwiseError
    from shardwise.errors import SourceError as SourceError
    from shardwise.explaining import Explanation as Explanation
    from shardwise.explaining import explain as explain
    from shardwise.linting import lint as lint
    from shardwise.migration import Migration as Migration
    from shardwise.migration import migrate as migrate
    from shardwise.planning.plan import Plan as Plan
    from shardwise.planning.planner import plan as plan
    from shardwise.sharding.activation import checkpoint_activations as checkpoint_activations
    from shardwise.sharding.apply import shard as shard
    from shardwise.sharding.compiling import compile_blocks as compile_blocks
    from shardwise.sharding.full_params import full_params as full_params
    from shardwise.sharding.full_params import iter_full_tensors as iter_full_tensors
    from shardwise.sharding.materialize import materialize as materialize
    from shardwise.sharding.mesh import init_distributed as init_distributed
    from shardwise.sharding.precision import cast_inputs as cast_inputs
    from shardwise.sharding.prepare import prepare_fully_shard as prepare_fully_shard
    from shardwise.sharding.recovery import recover as recover
    from shardwise.training.ema import EMA as EMA
    from shardwise.training.generating import generate as generate
    from shardwise.training.lockstep import lockstep as lockstep
    from shardwise.training.loop import fit as fit
    from shardwise.training.step import accumulate as accumulate
    from shardwise.training.step import clip_grad_norm_ as clip_grad_norm_
    from shardwise.training.step import mean_over_ranks as mean_over_ranks
    from shardwise.training.step import token_mean as token_mean

__version__ = "0.2.0"

_HOMES = {
    "shardwise.checkpointing.convert": ("convert_checkpoint",),
    "shardwise.checkpointing.differing": ("diff_checkpoints",),
    "shardwise.checkpointing.exporting": ("save_weights",),
    "shardwise.checkpointing.full_file": ("load_full", "save_full"),
    "shardwise.checkpointing.inspecting": ("Inspection", "inspect_checkpoint"),
    "shardwise.checkpointing.state.keys": ("KeyReport",),
    "shardwise.checkpointing.manager": ("Checkpointer",),
    "shardwise.checkpointing.verifying": ("verify_checkpoint",),
    "shardwise.checkpointing.weights": ("load_weights",),
    "shardwise.comparing": ("Parity", "parity"),
    "shardwise.config.run": ("RunConfig",),
    "shardwise.config.schema": (
        "GroupOverride", "MeshConfig", "PrecisionConfig", "PrefetchConfig", "ShardConfig",
    ),
    "shardwise.diagnosing.check": ("check",),
    "shardwise.diagnosing.explained": ("explained",),
    "shardwise.diagnosing.guard": ("Guard", "guard"),
    "shardwise.errors": (
        "CheckpointError", "ConfigError", "EnvironmentProblem", "PlanError", "ShardError", "ShardwiseError",
        "SourceError",
    ),
    "shardwise.explaining": ("Explanation", "explain"),
    "shardwise.linting": ("lint",),
    "shardwise.migration": ("Migration", "migrate"),
    "shardwise.planning.plan": ("Plan",),
    "shardwise.planning.planner": ("plan",),
    "shardwise.sharding.activation": ("checkpoint_activations",),
    "shardwise.sharding.apply": ("shard",),
    "shardwise.sharding.compiling": ("compile_blocks",),
    "shardwise.sharding.full_params": ("full_params", "iter_full_tensors"),
    "shardwise.sharding.materialize": ("materialize",),
    "shardwise.sharding.mesh": ("init_distributed",),
    "shardwise.sharding.precision": ("cast_inputs",),
    "shardwise.sharding.prepare": ("prepare_fully_shard",),
    "shardwise.sharding.recovery": ("recover",),
    "shardwise.training.ema": ("EMA",),
    "shardwise.training.generating": ("generate",),
    "shardwise.training.lockstep": ("lockstep",),
    "shardwise.training.loop": ("fit",),
    "shardwise.training.step": ("accumulate", "clip_grad_norm_", "mean_over_ranks", "token_mean"),
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
