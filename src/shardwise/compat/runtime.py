"""The process around FSDP2: fake tensors, dispatch modes, pinned memory, the elastic agent."""

import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn


def can_compile(device: torch.device) -> bool:
    """Whether torch.compile generates kernels for the device."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def memory_budget(budget: float) -> AbstractContextManager[None]:
    """Context manager in which compiled code saves this fraction of its activations for backward."""
    return importlib.import_module("torch._functorch.config").patch("activation_memory_budget", budget)


def sequence_number() -> int:
    """Return autograd's sequence number: later operations have this number or a higher one."""
    return torch.autograd._get_sequence_nr()


def sequence_number_of(node: Any) -> int:
    """Return the sequence number of an autograd node."""
    return node._sequence_nr()


def in_backward() -> bool:
    """Whether this thread is running a backward pass right now."""
    return torch._C._current_graph_task_id() != -1


@contextmanager
def fake_tensor_mode() -> Iterator[Any]:
    """Context manager in which tensors have shapes and devices but no memory; real ones are treated as fake."""
    from torch._subclasses import fake_tensor

    # Callers handle operators without fake support: torch must not log a traceback.
    logger = fake_tensor.log
    disabled, logger.disabled = logger.disabled, True
    try:
        with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True) as mode:
            yield mode
    finally:
        logger.disabled = disabled


def watch_operators(seen: Callable[[str, list[torch.Tensor]], None]) -> Any:
    """Context manager that reports the name and the tensor arguments of every operator before it runs."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class WatchedOperators(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            tensors = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, torch.Tensor)]
            seen(func.overloadpacket.__name__, tensors)
            return func(*args, **(kwargs or {}))

    return WatchedOperators()


def without_torch_functions() -> AbstractContextManager[Any]:
    """Disable `__torch_function__` of tensor subclasses inside the block."""
    return torch._C.DisableTorchFunctionSubclass()


def pin_host_memory(address: int, num_bytes: int) -> bool:
    """Pin existing memory for direct copies of the GPU; return False if the driver refuses."""
    runtime: Any = torch.cuda.cudart()
    return int(runtime.cudaHostRegister(address, num_bytes, 0)) == 0


def unpin_host_memory(address: int) -> None:
    """Undo `pin_host_memory` before freeing the memory."""
    runtime: Any = torch.cuda.cudart()
    runtime.cudaHostUnregister(address)


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Names of the module's own buffers that are not in its state dict."""
    return module._non_persistent_buffers_set


def is_called_by_dcp() -> bool:
    """Whether the caller, a replaced method of `nn.Module`, was called by torch.distributed.checkpoint."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name != "torch.nn.modules.module" and not name.startswith("shardwise."):
            return name == "torch.distributed.checkpoint.state_dict"
        frame = frame.f_back
    return False


def will_run(node: Any) -> bool:
    """Whether a node is part of the current backward of this thread, already executed or not."""
    return torch._C._will_engine_execute_node(node)


def watch_backward(before: Callable[[Any, Any, bool, bool, bool], bool], after: Callable[[], None]) -> None:
    """Call `before` ahead of each backward of this process, and if it returns True, `after` at the end.

    `before` receives the outputs where backward starts, the requested inputs (none: all leaves), `create_graph`,
    whether gradients accumulate into `.grad`, and `retain_graph`.
    """
    run = torch.autograd.graph._engine_run_backward

    @functools.wraps(run)
    def run_watched(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not before(outputs, args[3], bool(args[2]), kwargs.get("accumulate_grad", False), bool(args[1])):
            return run(outputs, *args, **kwargs)
        try:
            return run(outputs, *args, **kwargs)
        finally:
            after()

    torch.autograd.graph._engine_run_backward = torch.autograd._engine_run_backward = run_watched
