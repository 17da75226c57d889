"""Tested torch versions, and private APIs that shardwise needs. Names only: nothing is called."""

import functools
import inspect
import re
import warnings
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch
from packaging.specifiers import SpecifierSet

from shardwise.errors import EnvironmentProblem

TESTED = ">=2.11,<2.16"
"""The same range as in pyproject.toml."""

_FSDP2 = "torch.distributed.fsdp._fully_shard"
NEEDED: dict[str, str] = {
    f"{_FSDP2}._fsdp_param:FSDPParam": "sharded_param _unsharded_param reset_sharded_param "
    "padded_sharded_param_size mp_policy= unsharded_accumulated_grad? to_accumulated_grad_if_needed? "
    "reduce_dtype? param_dtype _sharded_param_data _sharded_local_tensor sharded_size "
    "init_all_gather_outputs all_gather_inputs to_sharded_dtensor "
    "offload_to_cpu device mesh_info _module_info _orig_size all_gather_outputs= _unsharded_inner_tensors= "
    "_post_load_hook_handle _setattr_on_modules to_unsharded",
    f"{_FSDP2}._fsdp_param:ParamModuleInfo": "module param_name shared_modules shared_param_names",
    f"{_FSDP2}._fsdp_param_group:FSDPParamGroup": "fsdp_params mesh_info device device_handle "
    "comm_ctx reduce_grads all_reduce_grads reshard "
    "is_sharded is_sharded_post_forward unshard wait_for_unshard post_backward _to_sharded= "
    "_to_unsharded= "
    "_to_sharded_post_forward= _init_mp_dtypes _record_post_forward "
    "_training_state= _register_post_backward_hook _partial_reduce_output= _all_gather_result _all_gather_comm "
    "_reduce_scatter_comm _partial_reduce_output_layout? reduce_scatter_unused_params? finalize_backward? "
    "_reshard_after_forward_event? gradient_divide_factor _all_reduce_hook",
    f"{_FSDP2}._fsdp_param_group:FSDPCommContext": "reduce_scatter_stream all_gather_copy_in_stream "
    "all_gather_state? reduce_scatter_state? "
    "post_forward_order?",
    f"{_FSDP2}._fsdp_param_group": "foreach_reduce",
    f"{_FSDP2}._fsdp_state": "FSDPState",
    f"{_FSDP2}._fsdp_state:FSDPState": "_fsdp_param_groups|_fsdp_param_group _is_root _state_ctx _device _lazy_init "
    "_training_state _pre_forward _post_forward _pre_backward _pre_forward_hook_handle _post_forward_hook_handle "
    "_register_pre_backward_hook _root_post_backward_final_callback _device_handle? _comm_ctx? "
    "_modules_to_run_forward?",
    f"{_FSDP2}._fsdp_state:FSDPStateContext": "all_states? is_last_backward post_backward_final_callback_queued "
    "iter_forward_root?",
    f"{_FSDP2}._fsdp_common:TrainingState": "IDLE PRE_BACKWARD POST_BACKWARD",
    f"{_FSDP2}._fsdp_common:FSDPMeshInfo": "mesh shard_mesh_size shard_process_group",
    "torch.distributed.fsdp:FSDPModule": "_get_fsdp_state",
    "torch.distributed.fsdp:FullyShardedDataParallel": "_handle",
    "torch.distributed.fsdp._flat_param:FlatParameter": "_fqns _shapes _numels_with_padding _is_padding_mask "
    "_shared_param_infos _unpadded_unsharded_size",
    "torch.distributed.fsdp.wrap": "_or_policy _module_wrap_policy _Policy",
    "torch.distributed.algorithms._comm_hooks": "default_hooks",
    "torch.distributed.device_mesh:DeviceMesh": "_concatenate _flatten",
    "torch.distributed.distributed_c10d": "_get_default_store",
    "torch._C._distributed_c10d:Store": "clone",
    "torch.distributed.tensor:DTensor": "_spec _local_tensor _op_dispatcher",
    "torch.distributed.tensor._dispatch:OpDispatcher": "_custom_op_handlers _allow_implicit_replication",
    "torch.distributed.tensor:Shard": "_split_tensor",
    "torch.distributed.tensor._dtensor_spec": "DTensorSpec TensorMeta",
    "torch.amp:GradScaler": "_unscale_grads_",
    "torch._ops:OpOverload": "_schema",
    "torch.optim:AdamW": "_step_supports_amp_scaling",
    "torch.optim:SGD": "_step_supports_amp_scaling",
    "torch.autograd": "_get_sequence_nr _engine_run_backward _unsafe_preserve_version_counter",
    "torch.autograd.graph": "_engine_run_backward",
    "torch.autograd.graph:Node": "_sequence_nr",
    "torch:Tensor": "_base _backward_hooks _post_accumulate_grad_hooks _in_backward_optimizers?",
    "torch:UntypedStorage": "_cdata",
    "torch._C": "_current_graph_task_id _will_engine_execute_node _storage_Use_Count _distributed_c10d "
    "DisableTorchFunctionSubclass _dispatch_get_all_op_names _dispatch_has_kernel_for_dispatch_key",
    "torch._C._distributed_c10d": "_dump_fr_trace? _dump_nccl_trace?",
    "torch._C:TensorBase": "data",
    "torch": "_C _amp_foreach_non_finite_check_and_unscale_",
    "torch.nn:Module": "_non_persistent_buffers_set",
    "torch._functorch.config": "activation_memory_budget patch",
    "torch._subclasses.fake_tensor": "FakeTensorMode log",
    "torch.utils._foreach_utils": "_get_fused_kernels_supported_devices",
    "torch.utils._python_dispatch": "TorchDispatchMode _get_current_dispatch_mode _pop_mode_temporarily",
    "torch.utils._pytree": "tree_leaves",
    "torch.utils.checkpoint": "_CachedTorchDispatchMode _CachingTorchDispatchMode",
}
"""Private attributes of torch that the package uses, by `module` or `module:class`.

`a|b`: one of them; `a=`: also assigned, so a property needs a setter; `a?`: optional.
"""


@functools.cache
def check_torch() -> None:
    """Check once for all private APIs that shardwise needs; warn about an untested torch.

    Raises:
        EnvironmentProblem: A private API is missing.

    Ranks:
        Local. All ranks of a run have the same torch.
    """
    if missing := list(missing_attributes()):
        raise EnvironmentProblem(
            f"shardwise does not work with torch {torch.__version__}, which lacks {len(missing)} private attributes",
            where="\n".join(missing),
            why=f"shardwise is tested with torch{TESTED}, and FSDP2's private parts change between releases",
            fix=f'pip install "torch{TESTED}", or a newer shardwise',
        )
    if not SpecifierSet(TESTED).contains(torch.__version__, prereleases=True):
        text = f"shardwise is tested with torch{TESTED}, and this is {torch.__version__}; nothing it needs is missing"
        warnings.warn(text, UserWarning, stacklevel=3)


def missing_attributes() -> Iterator[str]:
    """Return the entries of `NEEDED` that the installed torch lacks."""
    for place, names in NEEDED.items():
        module, _, owner_name = place.partition(":")
        try:
            found = import_module(module)
            owner = getattr(found, owner_name) if owner_name else found
        except (ImportError, AttributeError):
            yield place.replace(":", ".")
            continue
        for name in names.split():
            if name.endswith("?"):
                continue
            if not any(_has(owner, either.removesuffix("=")) for either in name.split("|")):
                yield f"{place.replace(':', '.')}.{name.removesuffix('=')}"
            elif name.endswith("=") and getattr(getattr(owner, name[:-1], None), "fset", owner) is None:
                yield f"{place.replace(':', '.')}.{name[:-1]} (read-only)"


def _has(owner: Any, name: str) -> bool:
    if hasattr(owner, name):
        return True
    return inspect.isclass(owner) and any(name in _names_in_source(base) for base in owner.__mro__)


@functools.cache
def _names_in_source(owner: type) -> frozenset[str]:
    """Names of instance attributes: those that a class's source annotates, or reads or sets on `self`."""
    try:
        source = inspect.getsource(owner)
    except (OSError, TypeError):  # a class of the C extension
        return frozenset()
    annotated = re.findall(r"^    (\w+):", source, re.MULTILINE)
    return frozenset(annotated + re.findall(r"\bself\.(\w+)", source))
