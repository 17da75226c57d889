"""Optimizers by name, their parameter groups, and Muon on sharded parameters."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from shardwise import compat
from shardwise.config.load import check_ranges
from shardwise.config.run import OptimizerConfig
from shardwise.errors import ConfigError
from shardwise.sharding.full_params import reshard
from shardwise.sharding.inventory import ShardLayout, full_tensor, layout_of, local_part, local_tensor, sharded_axes

BUCKET_BYTES = 256 * 1024**2
"""Maximum bytes that a rank sends and receives in one exchange; a larger matrix is exchanged alone."""

Work = Callable[[Tensor], Tensor]


def map_unsharded_matrices(
    parameters: Sequence[Tensor],
    parts: Sequence[Tensor],
    work: Work,
    *,
    dtype: torch.dtype,
    bucket_bytes: int = BUCKET_BYTES,
) -> Iterator[tuple[int, Tensor]]:
    """Apply `work` to unsharded matrices, or stacks of them, gathered from the parts of the ranks; collective, lazily.

    Each matrix is processed by one of the ranks that share it, replicas included; only a matrix sharded over two mesh
    axes is processed by every rank. Yields the index and this rank's part of each result, in no particular order.
    Every rank must pass the same parameters and consume the whole iterator. Matrices are sent in `dtype`.
    """
    shared: dict[tuple[ShardLayout, torch.Size], list[int]] = {}
    for index, (parameter, part) in enumerate(zip(parameters, parts, strict=True)):
        layout = layout_of(parameter) if isinstance(parameter, DTensor) else None
        if _is_whole(parameter, layout):
            yield index, work(part.to(dtype)) if part.numel() else part
        elif layout is not None:
            shared.setdefault((layout, parameter.shape), []).append(index)
        else:
            assert isinstance(parameter, DTensor)
            whole = full_tensor(compat.dtensor_like(part.to(dtype), parameter))
            yield index, local_part(work(whole), parameter)
    num_shared = 0
    for (layout, shape), indices in shared.items():
        count = max(1, bucket_bytes * layout.mesh.size() // (shape.numel() * dtype.itemsize))
        for first in range(0, len(indices), count):
            chosen = indices[first : first + count]
            # Offloaded parts are moved to the mesh's device: not every process group can send from CPU memory.
            stack = torch.stack([parts[index].to(layout.mesh.device_type, dtype) for index in chosen])
            yield from zip(chosen, _map_stack(stack, shape, layout, work, num_shared), strict=True)
            num_shared += len(chosen)


def _is_whole(parameter: Tensor, layout: ShardLayout | None) -> bool:
    """Whether this rank's part of the parameter consists of unsharded matrices."""
    if not isinstance(parameter, DTensor) or not sharded_axes(parameter) or parameter.device_mesh.size() == 1:
        return True
    return layout is not None and parameter.ndim == 3 and layout.dim == 0


def _map_stack(parts: Tensor, shape: torch.Size, layout: ShardLayout, work: Work, first: int) -> Tensor:
    """Apply `work` to matrices of one shape, sharded over all ranks; rank `first` gets the first one.

    Parts are sent to the owner of each matrix over the shard axis, and results back; then each replica broadcasts its
    results to the others.

    Ranks:
        Collective over the layout's mesh.
    """
    mesh, axis, dim = layout.mesh, layout.axis, layout.dim
    replicas = next((other for other in range(mesh.ndim) if other != axis and mesh.size(other) > 1), None)
    num_replicas, replica = (1, 0) if replicas is None else (mesh.size(replicas), mesh.get_local_rank(replicas))
    part, num_parts = mesh.get_local_rank(axis), mesh.size(axis)
    num_ranks = num_parts * num_replicas
    owned = [len(range((rank - first) % num_ranks, len(parts), num_ranks)) for rank in range(num_ranks)]
    of_replicas = [sum(owned[each * num_parts : (each + 1) * num_parts]) for each in range(num_replicas)]
    here, owned = parts.split(of_replicas)[replica], owned[replica * num_parts : (replica + 1) * num_parts]
    sizes = [layout.bounds(each)[1] for each in range(num_parts)]
    part_shapes = [torch.Size([*shape[:dim], size, *shape[dim + 1 :]]) for size in sizes]
    to_owners = [count * part_shapes[part].numel() for count in owned]
    from_parts = [owned[part] * each.numel() for each in part_shapes]

    def all_to_all(sent: Tensor, sent_sizes: list[int], received_sizes: list[int]) -> Tensor:
        received = sent.new_empty(sum(received_sizes))
        dist.all_to_all_single(received, sent, received_sizes, sent_sizes, group=mesh.get_group(axis))
        return received

    received = all_to_all(here.flatten(), to_owners, from_parts).split(from_parts)
    cut = [flat.view(owned[part], *each) for flat, each in zip(received, part_shapes, strict=True)]
    matrices = torch.cat(cut, dim + 1)
    results = torch.stack([work(matrix) for matrix in matrices]) if owned[part] else matrices
    by_part = [results.narrow(dim + 1, *layout.bounds(each)).flatten() for each in range(num_parts)]
    back = all_to_all(torch.cat(by_part), from_parts, to_owners).view(here.shape)
    if replicas is None:
        return back
    every = [back if each == replica else torch.empty_like(some) for each, some in enumerate(parts.split(of_replicas))]
    for source, values in enumerate(every):
        if values.numel():
            dist.broadcast(values, group=mesh.get_group(replicas), group_src=source)
    return torch.cat(every)


_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_EPS = 1e-7


class Muon(Optimizer):
    """Muon for the groups of kind `blocks`, AdamW for all others, as one optimizer.

    The momentum is sharded like the parameters. Orthogonalizing needs the unsharded matrix, so each matrix has an owner
    among the ranks that share it, replicas included: the owner receives the parts of the other ranks, computes the
    update, and sends their parts back. Each matrix is thus processed once, and a rank holds few unsharded matrices at a
    time. Stacks of matrices (experts) that are sharded over the stack dimension need no exchange. Matrices are
    orthogonalized in `dtype`: by default bfloat16 on accelerators, as published; float32 on CPU, where it is as fast.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        lr: float = 3e-3,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        nesterov: bool = True,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        fused: bool | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.dtype, self.bucket_bytes = dtype, BUCKET_BYTES
        self.grad_scale: None = None
        self.found_inf: Tensor | None = None
        """1 if the next step must change nothing, set on the device; as in torch's fused optimizers."""
        groups = [{"kind": "matrices", **group} for group in params]
        muon = {"momentum": momentum, "nesterov": nesterov}
        adamw = {"betas": betas, "eps": eps, "fused": fused}
        groups = [{**(muon if group["kind"] == "blocks" else adamw), **group} for group in groups]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})
        compat.set_supports_found_inf(self, all(group.get("fused", True) for group in self.param_groups))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; collective, with two exchanges per bucket of matrices."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters and group["kind"] == "blocks":
                self._step_muon(parameters, group)
            elif parameters:
                step_adamw(self, parameters, group)
        return loss

    def _step_muon(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        directions = [self._direction(parameter, group) for parameter in parameters]
        first = parameters[0]  # the mesh's device: offloaded shards are on another
        device = torch.device(first.device_mesh.device_type) if isinstance(first, DTensor) else first.device
        dtype = self.dtype or orthogonalizing_dtype(device)
        for index, update in map_unsharded_matrices(
            parameters,
            directions,
            lambda matrix: orthogonalize(matrix, dtype),
            dtype=dtype,
            bucket_bytes=self.bucket_bytes,
        ):
            parameter = parameters[index]
            local = local_tensor(parameter)
            decay, update = 1 - group["lr"] * group["weight_decay"], update.to(local)
            if self.found_inf is not None:
                is_bad = self.found_inf.to(local.device) > 0
                decay, update = torch.where(is_bad, 1.0, decay), update.masked_fill(is_bad, 0.0)
            local.mul_(decay)
            # Tall matrices take longer steps, so that outputs change as much as those of wide ones.
            factor = math.sqrt(max(1.0, parameter.shape[-2] / parameter.shape[-1]))
            local.add_(update, alpha=-group["lr"] * factor)

    def _direction(self, parameter: nn.Parameter, group: dict[str, Any]) -> Tensor:
        """Return this rank's part of the gradient with momentum, to be orthogonalized."""
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
        gradient, buffer = local_tensor(parameter.grad), local_tensor(state["momentum_buffer"])
        if self.found_inf is not None:  # a skipped step leaves the momentum unchanged
            gradient = torch.where(self.found_inf.to(buffer.device) > 0, buffer, gradient)
        buffer.lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer


def adamw_state(optimizer: Optimizer, parameter: nn.Parameter, group: dict[str, Any]) -> dict[str, Any]:
    """Return AdamW's state of a parameter, initialized in the first step, in the layout of `torch.optim.AdamW`."""
    state = optimizer.state[parameter]
    if not state:
        device = local_tensor(parameter).device if group["fused"] else "cpu"
        state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        state["exp_avg"] = torch.zeros_like(parameter)
        state["exp_avg_sq"] = torch.zeros_like(parameter)
    return state


def step_adamw(optimizer: Any, parameters: Sequence[nn.Parameter], group: dict[str, Any], factor: Any = None) -> None:
    """Run torch's AdamW on this rank's parts of some parameters of a group, with gradients times `factor`."""
    states = [adamw_state(optimizer, parameter, group) for parameter in parameters]
    gradients = [local_tensor(p.grad).to(p.dtype) for p in parameters if p.grad is not None]
    adamw(
        [local_tensor(parameter) for parameter in parameters],
        gradients if factor is None else list(torch._foreach_mul(gradients, factor)),
        [local_tensor(state["exp_avg"]) for state in states],
        [local_tensor(state["exp_avg_sq"]) for state in states],
        [],
        [state["step"] for state in states],
        fused=group["fused"],
        found_inf=optimizer.found_inf,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


_LARGE = 2**18
"""Parameters with at least this number of elements get a separate kernel: it costs less than reading and writing the
gradient once more."""


class ClippingAdamW(torch.optim.AdamW):
    """torch's fused AdamW on CUDA, with the same state, that also scales gradients while it reads them.

    Separate clipping would read and write all gradients once more. Gradients may have fewer bits than their parameters:
    more bits add nothing to a gradient that was computed in bfloat16 and not accumulated.
    """

    def __init__(self, params: Iterable[dict[str, Any]], **options: Any) -> None:
        super().__init__(params, fused=True, **options)
        self.gradient_factor: Tensor | None = None
        """Factor of the gradients in the next step, a 0-d tensor; None: no scaling."""
        self.found_inf: Tensor | None = None
        """1 if the next step must change nothing, set on the device."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, and reset `gradient_factor`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            by_size: dict[bool, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_size.setdefault(local_tensor(parameter).numel() >= _LARGE, []).append(parameter)
            if True in by_size:
                self._step_large(by_size[True], group)
            if False in by_size:
                step_adamw(self, by_size[False], group, self.gradient_factor)
        self.gradient_factor = None
        return loss

    def _step_large(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        states = [adamw_state(self, parameter, group) for parameter in parameters]
        steps = [state["step"] for state in states]
        one = torch.ones((), device=steps[0].device)
        is_bad = torch.zeros_like(one) if self.found_inf is None else self.found_inf.to(one)
        factor = one if self.gradient_factor is None else self.gradient_factor.to(one)
        torch._foreach_add_(steps, [1 - is_bad] * len(steps))  # a single tensor would be copied to the host
        (beta1, beta2), lr = group["betas"], group["lr"]
        passed = torch.stack(steps).double()
        step_sizes = (lr / (1 - torch.full_like(passed, beta1).pow(passed))).float().unbind()
        corrections = (1 - torch.full_like(passed, beta2).pow(passed)).rsqrt().float().unbind()
        # In tensors: a changed number would recompile the kernel. Filled on the device: a copy would synchronize.
        settings = (1 - lr * group["weight_decay"], 1 - beta1, beta2, 1 - beta2, group["eps"])
        constants = [torch.full_like(one, value) for value in settings]
        for parameter, state, step_size, correction in zip(parameters, states, step_sizes, corrections, strict=True):
            assert parameter.grad is not None
            tensors = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
            flat = [local_tensor(tensor).view(-1) for tensor in tensors]
            _compiled_update()(*flat, factor, is_bad, step_size, correction, *constants)


def _update(
    parameter: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    factor: Tensor,
    is_bad: Tensor,
    step_size: Tensor,
    correction: Tensor,
    decay: Tensor,
    one_minus_beta1: Tensor,
    beta2: Tensor,
    one_minus_beta2: Tensor,
    eps: Tensor,
) -> None:
    """AdamW step of one parameter; no change if `is_bad`."""
    gradient, is_good = gradient.to(parameter.dtype) * factor, is_bad == 0
    new_mean = mean + (gradient - mean) * one_minus_beta1
    new_square = square * beta2 + gradient * gradient * one_minus_beta2
    new = parameter * decay - step_size * new_mean / (new_square.sqrt() * correction + eps)
    parameter.copy_(torch.where(is_good, new, parameter))
    mean.copy_(torch.where(is_good, new_mean, mean))
    square.copy_(torch.where(is_good, new_square, square))


@functools.cache
def _compiled_update() -> Callable[..., None]:
    return torch.compile(_update, dynamic=True)


def orthogonalizing_dtype(device: torch.device) -> torch.dtype:
    """Return the default dtype for orthogonalization on a device."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def orthogonalize(matrix: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Bring the singular values of a matrix, or of each in a stack, near 1 by five Newton-Schulz iterations.

    In bfloat16 the result equals that of `torch.optim.Muon`.
    """
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.to(dtype or orthogonalizing_dtype(matrix.device), copy=True)
    x = x.mT if is_tall else x
    x.div_(x.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPS))
    multiply_add = torch.addmm if x.ndim == 2 else torch.baddbmm
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = multiply_add(x, multiply_add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


Kind = Literal["matrices", "vectors", "embeddings", "blocks"]
"""`blocks`: matrices inside the model's repeated blocks; only Muon distinguishes them from `matrices`."""

_DECAYED = ("matrices", "blocks")
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)  # batch and instance norms have only vectors
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def parameter_kinds(model: nn.Module) -> dict[nn.Parameter, Kind]:
    """The kind of every parameter, in the model's order.

    - `embeddings`: parameters of an `nn.Embedding` or `nn.EmbeddingBag`, also if tied to the output matrix.
    - `vectors`: parameters of a norm, or with fewer than two dims longer than 1 (biases, gains, class tokens).
    - `blocks`: matrices, or stacks of them as in experts, in a block. A block is a module with children that is an item
      of a `ModuleList`, `ModuleDict` or `Sequential`; convolutions are excluded.
    - `matrices`: all other parameters, such as output matrices and convolutions.

    Ranks:
        Local. The same before and after sharding: a sharded parameter has its unsharded shape.
    """
    embeddings = {id(p) for module in model.modules() if isinstance(module, _EMBEDDINGS) for p in module.parameters()}
    kinds: dict[nn.Parameter, Kind] = {}
    for module, in_block in _walk(model, in_block=False):
        for parameter in module.parameters(recurse=False):
            if parameter not in kinds:
                kind = _kind(module, parameter, in_block)
                kinds[parameter] = "embeddings" if id(parameter) in embeddings else kind
    return kinds


def _walk(module: nn.Module, *, in_block: bool) -> Iterator[tuple[nn.Module, bool]]:
    """Yield every module, and whether it is (in) a block; a module with several parents is repeated."""
    yield module, in_block
    for child in module.children():
        starts_block = isinstance(module, _CONTAINERS) and next(child.children(), None) is not None
        yield from _walk(child, in_block=in_block or starts_block)


def _kind(module: nn.Module, parameter: nn.Parameter, in_block: bool) -> Kind:
    is_matrix = isinstance(module, nn.Linear) and parameter.ndim == 2
    num_dims = sum(size > 1 for size in parameter.shape)
    if isinstance(module, _NORMS) or (num_dims < 2 and not is_matrix):
        return "vectors"
    is_stack = parameter.ndim == 3 and parameter.shape[0] > 1
    if in_block and not isinstance(module, _CONVOLUTIONS) and (parameter.ndim == 2 or is_stack):
        return "blocks"
    return "matrices"


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """Build the optimizer of `config`, with one parameter group per kind of parameter.

    Each group has a `kind`: `matrices` (decayed), `vectors` and `embeddings` (not decayed, unless
    `decay_everything`) and, with Muon, `blocks`: the matrices that Muon updates. All state is kept per parameter and
    sharded like it, so that a `Checkpointer` restores it on any number of ranks.

    Args:
        model: Sharded and materialized. Frozen parameters are left out.
        config: The optimizer and its settings.

    Raises:
        ConfigError: A setting is out of range, the model has no trainable parameters, or none for Muon.

    Ranks:
        Local. The optimizer's `step` is collective for Muon, otherwise local.
    """
    check_ranges(config, "optimizer")
    reshard(model)
    groups = _groups(model, config)
    if config.name == "muon":
        return Muon(groups, momentum=config.momentum, nesterov=config.nesterov, **_adamw_options(groups, config))
    if config.name == "sgd":
        return torch.optim.SGD(
            groups,
            lr=config.learning_rate,
            momentum=config.momentum,
            nesterov=config.nesterov and config.momentum > 0,
            fused=_fused(torch.optim.SGD, groups, config),
        )
    options = _adamw_options(groups, config)
    parameters = [parameter for group in groups for parameter in group["params"]]
    if options["fused"] and all(compat.can_compile(p.device) and p.dtype == torch.float32 for p in parameters):
        del options["fused"]
        return ClippingAdamW(groups, lr=config.learning_rate, **options)
    return torch.optim.AdamW(groups, lr=config.learning_rate, **options)


def num_states(kind: Kind, config: OptimizerConfig) -> int:
    """Number of state tensors of the parameter's size that the optimizer keeps for a parameter of this kind."""
    if config.name == "sgd":
        return int(config.momentum > 0)
    return 1 if config.name == "muon" and kind == "blocks" else 2


def _adamw_options(groups: list[dict[str, Any]], config: OptimizerConfig) -> dict[str, Any]:
    return {"betas": config.betas, "eps": config.eps, "fused": _fused(torch.optim.AdamW, groups, config)}


def _groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    by_kind: dict[Kind, list[nn.Parameter]] = {}
    for parameter, kind in parameter_kinds(model).items():
        if parameter.requires_grad:
            kind = "matrices" if kind == "blocks" and config.name != "muon" else kind
            by_kind.setdefault(kind, []).append(parameter)
    if not by_kind:
        raise ConfigError(
            "the model has no trainable parameters",
            where=f"optimizer ({type(model).__name__})",
            why="all of them are frozen: requires_grad is False",
            fix="set requires_grad of trainable parameters before sharding",
        )
    if config.name == "muon" and "blocks" not in by_kind:
        raise ConfigError(
            f"{type(model).__name__} has no matrices for Muon",
            where="optimizer.name",
            why="Muon updates matrices in repeated blocks: modules with children in a ModuleList, ModuleDict "
            "or Sequential",
            fix="set optimizer.name = adamw, or store the model's blocks in an nn.ModuleList",
        )
    return [
        {
            "params": parameters,
            "kind": kind,
            "lr": config.muon_learning_rate if kind == "blocks" else config.learning_rate,
            "weight_decay": config.weight_decay if config.decay_everything or kind in _DECAYED else 0.0,
        }
        for kind, parameters in by_kind.items()
    ]


def _fused(optimizer: type[Optimizer], groups: list[dict[str, Any]], config: OptimizerConfig) -> bool | None:
    """Return torch's `fused` argument; None: torch's default."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    is_possible = compat.has_fused_kernels(parameters)
    if optimizer is torch.optim.SGD:  # its fused kernel does not support DTensors
        is_possible = is_possible and not any(isinstance(parameter, DTensor) for parameter in parameters)
    if config.fused is True and not is_possible:
        where = sorted({f"{parameter.dtype} on {parameter.device.type}" for parameter in parameters})
        raise ConfigError(
            f"{optimizer.__name__} cannot be fused here: {', '.join(where)}",
            where="optimizer.fused",
            why="not every device and dtype has that kernel, and that of SGD does not know sharded parameters",
            fix="set optimizer.fused = auto",
        )
    return True if is_possible and config.fused is not False else None
