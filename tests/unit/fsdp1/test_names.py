"""Names of shardwise.fsdp1: every import path of an FSDP1 script exists, and settings are torch's own objects."""

import importlib
import inspect

import pytest
import torch.distributed.fsdp as real
from torch.distributed.fsdp import fully_sharded_data_parallel as real_class
from torch.distributed.fsdp import wrap as real_wrap

from shardwise import fsdp1
from shardwise.fsdp1.units import clean_name

# torch.distributed.fsdp's own list also holds names of FSDP2 that some versions of torch do not have.
NEWER = {"DataParallelMeshDims", "share_comm_ctx"}
OURS = {"FullyShardedDataParallel", "FlatParameter"}


@pytest.mark.parametrize("name", sorted({*real.__all__, "FlatParameter"} - NEWER))
def test_every_public_name_of_torchs_package_is_here(name: str):
    ours = getattr(fsdp1, name)
    assert name in fsdp1.__all__
    assert (ours is getattr(real, name)) == (name not in OURS)


@pytest.mark.parametrize(
    "statement",
    [
        "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP",
        "from torch.distributed.fsdp.fully_sharded_data_parallel import FullyShardedDataParallel, OptimStateKeyType",
        "from torch.distributed.fsdp.fully_sharded_data_parallel import CPUOffload, BackwardPrefetch, MixedPrecision",
        "from torch.distributed.fsdp.fully_sharded_data_parallel import StateDictType, FullStateDictConfig",
        "from torch.distributed.fsdp.api import ShardingStrategy, StateDictType, ShardedOptimStateDictConfig",
        "from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy, size_based_auto_wrap_policy",
        "from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy, _or_policy, ModuleWrapPolicy, CustomPolicy",
        "from torch.distributed.fsdp.wrap import enable_wrap, wrap, always_wrap_policy, _module_wrap_policy",
        "from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler",
        "import torch.distributed.fsdp as fsdp",
    ],
)
def test_an_import_works_with_the_package_swapped(statement: str):
    exec(statement.replace("torch.distributed.fsdp", "shardwise.fsdp1"), {})


def test_the_policies_are_torchs_own():
    ours = importlib.import_module("shardwise.fsdp1.wrap")
    assert all(getattr(ours, name) is getattr(real_wrap, name) for name in real_wrap.__all__)


def test_the_constructor_takes_fsdp1s_arguments_in_its_order():
    theirs = inspect.signature(real_class.FullyShardedDataParallel.__init__).parameters
    ours = inspect.signature(fsdp1.FullyShardedDataParallel.__init__).parameters
    assert list(ours) == list(theirs)
    assert {name: p.default for name, p in ours.items()} == {name: p.default for name, p in theirs.items()}


NN_MODULES = {"named_parameters", "named_buffers", "apply", "forward", "module"}
METHODS = [name for name in vars(real_class.FullyShardedDataParallel) if not name.startswith("_")]


@pytest.mark.parametrize("method", [name for name in METHODS if name not in NN_MODULES])
def test_every_public_method_takes_fsdp1s_arguments(method: str):
    theirs = inspect.signature(getattr(real_class.FullyShardedDataParallel, method))
    ours = inspect.signature(getattr(fsdp1.FullyShardedDataParallel, method))
    assert list(ours.parameters) == list(theirs.parameters)


def test_names_lose_what_wrapping_added():
    name = "_fsdp_wrapped_module.blocks.0._fsdp_wrapped_module._checkpoint_wrapped_module.up.weight"
    assert clean_name(name) == "blocks.0.up.weight"
    assert clean_name("my_fsdp_wrapped_module.weight") == "my_fsdp_wrapped_module.weight"
