"""plan(): analyze the model, reject unsupported ones, choose groups, settings and prefetch, with reasons."""

import inspect
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from shardwise.config.schema import (
    EXPERT_SHARD_AXES,
    ROOT_PATTERN,
    SHARD_AXES,
    GroupOverride,
    MeshConfig,
    PrefetchConfig,
    ShardConfig,
)
from shardwise.distributed.mesh import axis_sizes, mesh_axes, tensor_mesh
from shardwise.errors import PlanError
from shardwise.models.configs import tied_by_config
from shardwise.planning import groups as grouping
from shardwise.planning import settings
from shardwise.planning.assignment import Assignment, assign, find_tensors, split_by_override, storage_splits
from shardwise.planning.calls import Calls, is_within
from shardwise.planning.experts import find_experts, refuse_without_experts
from shardwise.planning.float8 import choose_float8
from shardwise.planning.groups import GroupCandidate, Node, Tree, by_node, find_candidates, ignored_keys, is_explicit
from shardwise.planning.plan import Group, ParallelModule, Plan, PlannedParameter
from shardwise.planning.settings import FLOATING, Compute, check_config, choose_compute, dtype_name, group_settings
from shardwise.planning.source.facts import read_calls
from shardwise.planning.tensor import DIVIDED, choose_tensor, tensor_splits
from shardwise.planning.tracing import trace_calls


def refuse_sharded(model: nn.Module, mesh: DeviceMesh | MeshConfig | None = None) -> None:
    """Raise if the model, a part of it, or an enclosing model is already sharded.

    Parameters that `parallelize_module` has split over the tensor axis are allowed if nothing was sharded before.

    Args:
        model: Any module.
        mesh: Mesh to shard over.

    Raises:
        PlanError: Names the module, and says whether the order was top-down.
    """
    sharded = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    late = "; tensor parallelism comes before it: shard() does both, over a mesh with a tensor axis"
    if "" in sharded:
        raise PlanError(
            f"the model ({type(model).__name__}) is already sharded",
            why="sharding replaces every parameter and works only once",
            fix="call shard() once, on the unsharded model" + late * ("tensor" in mesh_axes(mesh)[0]),
        )
    if sharded:
        raise PlanError(
            f"{sharded[0]!r} is already sharded" + (f", and {len(sharded) - 1} more modules" if sharded[1:] else ""),
            where=sharded[0],
            why="shard() decides all groups of a model at once, children first",
            fix="pass the unsharded model and name the groups with block_patterns or block_classes",
        )
    divided = {name: p.device_mesh for name, p in model.named_parameters() if isinstance(p, DTensor)}
    spread = next((name for name, axis in divided.items() if not _is_tensor_axis(axis, mesh)), None)
    if spread is not None:
        raise PlanError(
            f"{spread!r} is a DTensor already, though its module is not a group",
            where=spread,
            why="a model around this one was sharded first: groups are made children first, never top-down; or it was "
            "divided over other ranks than those of the mesh's tensor axis",
            fix="of nested models, shard the outermost only; after parallelize_module over the tensor axis of a mesh, "
            "pass that mesh",
        )


def _is_tensor_axis(axis: DeviceMesh, mesh: DeviceMesh | MeshConfig | None) -> bool:
    """Whether parameters distributed over `axis` can be sharded over the other axes of `mesh`."""
    if not isinstance(mesh, DeviceMesh):
        return axis.ndim == 1 and axis.size() == mesh_axes(mesh)[0].get("tensor", axis.size())
    tensors = tensor_mesh(mesh)
    if tensors is not None:
        return axis == tensors
    return axis.ndim == 1 and len(set(axis.mesh.flatten().tolist()) & set(mesh.mesh.flatten().tolist())) == 1


def refuse_unsupported(model: nn.Module) -> None:
    """Raise for parameters that cannot be sharded.

    Raises:
        PlanError: A lazy module without shapes yet, a scripted module, a layer with sparse gradients or one that
            renormalizes the rows of a batch, or an empty container.
    """
    if isinstance(model, nn.ModuleList | nn.ModuleDict) and next(model.parameters(), None) is None:
        raise PlanError(
            f"the model is a {type(model).__name__} without parameters",
            where=type(model).__name__,
            why="each network in a container is sharded by itself, and there is none with parameters",
            fix="shard the module that has the parameters",
        )
    for name, module in model.named_modules():
        own = [parameter for parameter in module._parameters.values() if parameter is not None]
        is_table = isinstance(module, nn.Embedding | nn.EmbeddingBag) and any(p.requires_grad for p in own)
        what = why = fix = ""
        if any(is_lazy(parameter) for parameter in own):
            what = "has parameters without a shape yet"
            why = "a lazy module learns its shapes in its first forward, and a plan needs them"
            fix = "run one batch through the model before sharding, or give the sizes to the constructor"
        elif own and isinstance(module, torch.jit.ScriptModule):
            what = "is a scripted module with parameters"
            why = "FSDP2 puts hooks on modules and exchanges their parameters, which TorchScript does not allow"
            fix = "leave out torch.jit.script, or script functions and modules without parameters"
        elif is_table and module.max_norm is not None:
            what = "renormalizes the rows that its batch looks up"
            why = "each rank has other rows in its batch, and would change other rows of the weight"
            fix = "build it with max_norm=None, and after each step, under torch.no_grad(): "
            fix += f"{name}.weight.renorm_({module.norm_type}, 0, {module.max_norm})"
        elif is_table and module.sparse:
            what, why = "makes sparse gradients", "FSDP2 reduces gradients in one dense buffer"
            fix = f"build it with sparse=False, or freeze it: {name}.requires_grad_(False)"
        if what:
            what = f"{name or 'the model'} ({type(module).__name__}) {what}"
            raise PlanError(what, where=name, why=why, fix=fix)


def find_calls(model: nn.Module, example_inputs: Any = None) -> Calls:
    """Find the calls between modules of `model`, without running its code on real data.

    Args:
        model: Any module, on any device; the meta device is enough.
        example_inputs: A tuple of positional arguments, a dict of keyword arguments, or the only argument.
            With it the forward is traced on fake tensors, and the traced calls take precedence.

    Ranks:
        Local. The result is the same on every rank with the same model and code.
    """
    if example_inputs is None:
        return read_calls(model)
    traced = trace_calls(model, example_inputs)
    calls = read_calls(model, traced if traced.complete else None)
    return replace(calls, notes=(*calls.notes, *traced.notes))


def plan(
    model: nn.Module,
    config: ShardConfig | None = None,
    *,
    mesh: DeviceMesh | MeshConfig | None = None,
    example_inputs: Any = None,
) -> Plan:
    """Compute the sharding plan of `model`, with reasons.

    Args:
        model: On the meta device or real; it is not changed.
        config: Sharding settings; by default all decisions are automatic.
        mesh: The mesh of the run, or a `MeshConfig` with its sizes to plan without ranks.
        example_inputs: A tuple of positional or a dict of keyword arguments of `forward`; when given, real calls are
            observed on fake tensors instead of read from source.

    Returns:
        The plan, equal on every rank for the same model, config and mesh.

    Raises:
        PlanError: The model cannot be sharded as asked.

    Ranks:
        Local. No communication.
    """
    made = make_plan(model, config or ShardConfig(), mesh, example_inputs, capability=device_capability())
    refuse_without_experts(made)
    sizes = {} if mesh is None else mesh.sizes(mesh.num_ranks) if isinstance(mesh, MeshConfig) else axis_sizes(mesh)
    if (num_stages := sizes.get("pipeline", 1)) > 1:
        note = f"{num_stages} pipeline stages: a rank holds the groups of its stages, about 1/{num_stages} of these"
        made = replace(made, reasons=(*made.reasons, note))
    return made


def device_capability() -> tuple[int, int] | None:
    """CUDA compute capability of this machine, None without a GPU."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def make_plan(
    model: nn.Module,
    config: ShardConfig,
    mesh: DeviceMesh | MeshConfig | None,
    example_inputs: Any,
    *,
    capability: tuple[int, int] | None,
) -> Plan:
    """Compute a plan for hardware of this capability, also for a pipeline stage, which may have no experts."""
    refuse_sharded(model, mesh)
    refuse_unsupported(model)
    axes, device = mesh_axes(mesh)
    check_config(config, axes)
    return Draft(model, config, axes, device, find_calls(model, example_inputs)).plan(capability)


def refuse_context(model: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
    """Raise if a model cannot process parts of sequences.

    Raises:
        PlanError: It would number the tokens of every rank from 0, has no blocks, or does not use
            scaled_dot_product_attention.
    """
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    name = type(model).__name__
    what = fix = ""
    if not blocks:
        what, fix = f"{name} has no blocks", 'name them: ShardConfig(block_patterns=("name.of.blocks.*",))'
    elif "position_ids" not in parameters and not takes_any:
        what, fix = f"{name}.forward takes no position_ids", "let forward take position_ids (rows, length)"
    kind = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if isinstance(kind, str) and kind != "sdpa":
        what, fix = f"{name} computes attention by {kind!r}", 'model.set_attn_implementation("sdpa")'
    if what:
        raise PlanError(
            what,
            where="mesh.context",
            why="with context parallelism a rank has a part of each sequence: its tokens get their positions in the "
            "whole, and scaled_dot_product_attention in its blocks the keys of all ranks",
            fix=f"{fix}, or set mesh.context = 1",
        )


WORTHWHILE_PADDING = 1 / 8
"""Maximum share of padding on dim 0, which is preferred because its shards are contiguous in checkpoints."""


def choose_shard_dim(shape: tuple[int, ...], num_shards: int) -> tuple[int, str]:
    """Return the sharding dimension, and the reason if it is not the first.

    FSDP2 pads dim 0 to a multiple of the ranks but splits other dimensions only evenly. A stack of 8 experts on 64
    ranks would be padded eightfold on dim 0.
    """
    if not shape or num_shards <= 1 or shape[0] == 0:
        return 0, ""
    rows = shape[0]
    padded = -(-rows // num_shards) * num_shards
    if (padded - rows) / rows <= WORTHWHILE_PADDING:
        return 0, ""
    even = [dim for dim in range(1, len(shape)) if shape[dim] and shape[dim] % num_shards == 0]
    if not even:
        return 0, ""
    dim = even[0]
    return dim, (
        f"split on dim {dim} ({shape[dim]} / {num_shards}): dim 0 has {rows} rows, "
        f"padding would cost {padded / rows:.1f}x the memory"
    )


def packed_bytes(parameter: torch.Tensor) -> int | None:
    """Return the storage of a tensor subclass that packs elements into fewer bits than its dtype, else None."""
    if not hasattr(parameter, "fsdp_pre_all_gather") or not hasattr(parameter, "__tensor_flatten__"):
        return None
    names, _ = parameter.__tensor_flatten__()  # pyrefly: ignore[not-callable]
    stored = sum(getattr(parameter, name).nbytes for name in names)
    return stored if stored < parameter.numel() * parameter.dtype.itemsize else None


def add_prefetch(groups: list[Group], prefetch: PrefetchConfig, overrides: tuple[GroupOverride, ...]) -> list[Group]:
    """Return the groups with the names of the next and previous groups of their run, up to each group's depth.

    Only within a run of blocks (`layers.0`, `layers.1`, …): these are certain to be called in order, and
    a group prefetched for a call that never happens would stay unsharded.
    """
    depths = [prefetch.forward, prefetch.backward]
    depths += [depth for o in overrides for depth in (o.forward_prefetch, o.backward_prefetch) if depth]
    if not any(depths):
        return groups
    runs: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        if group.kind in ("block", "part"):
            runs.setdefault(_run_of(group.modules[0]), []).append(index)
    result = [replace(group, forward_prefetch=(), backward_prefetch=()) for group in groups]
    for run in runs.values():
        for position, index in enumerate(run):
            ahead = run[position + 1 : position + 1 + len(groups[index].forward_prefetch)]
            start = max(position - len(groups[index].backward_prefetch), 0)
            behind = reversed(run[start:position])
            result[index] = replace(
                groups[index],
                forward_prefetch=tuple(groups[i].modules[0] for i in ahead),
                backward_prefetch=tuple(groups[i].modules[0] for i in behind),
            )
    return result


def _run_of(fqn: str) -> str:
    """`model.layers.3` → `model.layers`, `model.layers.3.mlp` → `model.layers..mlp`: the same place in each block."""
    return ".".join("" if name.isdigit() else name for name in fqn.split("."))


class Draft:
    """Facts about one model, from which the plan is built."""

    def __init__(self, model: nn.Module, config: ShardConfig, axes: dict[str, int], device: str, calls: Calls) -> None:
        self.model, self.config, self.axes, self.device, self.calls = model, config, axes, device, calls
        self.tensors = find_tensors(model)
        names = {name: key for key, tensor in enumerate(self.tensors) for name in tensor.names}
        every = {id(parameter): key for key, tensor in enumerate(self.tensors) for parameter in tensor.parameters}
        asked = ignored_keys(Tree(model, every), names, config.ignored)
        self.ignored = dict.fromkeys(sorted(asked), "named in ignored")
        self._check_roots()
        self.replicated: dict[int, str] = {}
        for key, tensor in enumerate(self.tensors):
            if key not in self.ignored:
                self._set_aside(key, tensor.parameter)
        aside = self.ignored.keys() | self.replicated.keys()
        numel = {key: tensor.parameter.numel() for key, tensor in enumerate(self.tensors)}
        in_groups = {identity: key for identity, key in every.items() if key not in aside}
        self.tree = Tree(model, in_groups, numel, calls.roots)
        self.dtype_of = {key: dtype_name(tensor.parameter.dtype) for key, tensor in enumerate(self.tensors)}
        self.trainable = {key for key, tensor in enumerate(self.tensors) if tensor.parameter.requires_grad}
        self.upcast: dict[int, str] = {}
        self.splits: dict[int, tuple[tuple[str, int, int], ...]] = {}
        self.experts, self.expert_parallel = self._find_experts() if axes.get("expert", 1) > 1 else ([], [])
        self.tensor_parallel: tuple[ParallelModule, ...] = ()
        self.covered: list[tuple[GroupOverride, set[int]]] = []
        for override in config.overrides:
            matching = self.tree.matching(override.pattern)
            below = (
                matching if override.pattern == ROOT_PATTERN else [each for node in matching for each in node.walk()]
            )
            self.covered.append((override, set(map(id, below))))

    def _find_experts(self) -> tuple[list[GroupCandidate], list[ParallelModule]]:
        num_ranks = self.axes["expert"]
        if self.axes.get("tensor", 1) > 1:
            raise PlanError(
                f"the mesh has both an expert axis ({num_ranks} ranks) and a tensor axis ({self.axes['tensor']} ranks)",
                where="mesh.expert, mesh.tensor",
                why="splitting experts over both is not supported",
                fix="set mesh.tensor = 1 and give its ranks to expert or shard",
            )
        candidates, entries = find_experts(self.tree, self.calls, self.config.expert.modules, num_ranks)
        for candidate in candidates:
            if candidate.kind == "experts":
                self.splits |= dict.fromkeys(candidate.nodes[0].own, (("expert", 0, num_ranks),))
        return candidates, entries

    def _check_roots(self) -> None:
        """Raise if a trainable parameter is outside the modules that scripts call; ignore frozen ones."""
        for key, tensor in enumerate(self.tensors):
            roots = {root for root in self.calls.roots for name in tensor.names if is_within(name, root)}
            if len(roots) == 1 or key in self.ignored:
                continue
            if not roots and not tensor.parameter.requires_grad:
                self.ignored[key] = "frozen, and of no module that can be called"
                continue
            first = tensor.names[0]
            shared = f"{' and '.join(map(repr, tensor.names))} are one parameter of two networks"
            raise PlanError(
                shared if roots else f"{first!r} belongs to no module that can be called",
                where=first,
                why=f"{type(self.model).__name__} has no forward: each network in it is unsharded by its own call",
                fix="define forward, or a method that computes, on a module around all that belongs together",
            )

    def _set_aside(self, key: int, parameter: nn.Parameter) -> None:
        """Replicate parameters that FSDP2 cannot shard."""
        if packed_bytes(parameter) is not None:
            self._set_packed_aside(key, parameter)
        elif not (parameter.is_floating_point() or parameter.is_complex()):
            self.ignored[key] = f"{dtype_name(parameter.dtype)} storage is left as it is"
        elif parameter.ndim == 0 and parameter.is_complex():
            # torch's optimizers use view_as_real for complex parameters, which DTensor does not support for scalars.
            self.ignored[key] = "a complex scalar is not split; its gradients are averaged"
        elif parameter.ndim == 0:
            self.replicated[key] = "a scalar has no dimension to split"
        elif parameter.numel() == 0:
            self.replicated[key] = "an empty parameter has nothing to split"
        elif parameter.is_complex() and not self._splits_evenly(parameter):
            # DTensor's view_as_real copies uneven shards, so that updates of torch's optimizers would be lost.
            self.replicated[key] = "complex numbers are split only where each rank gets as many"

    def _set_packed_aside(self, key: int, parameter: nn.Parameter) -> None:
        name, kind = self.tensors[key].names[0], type(parameter).__name__
        if parameter.requires_grad:
            raise PlanError(
                f"{name!r}, a {kind}, requires gradients",
                where=name,
                why="it is stored in fewer bits than its dtype has: an optimizer's updates would be rounded away",
                fix="freeze it (requires_grad = False) and train adapters, or leave it unquantized",
            )
        if parameter.shape[0] % self._shard_axes()[1]:
            # FSDP2 pads uneven shards with rows of the parameter's shape, but packed elements have another shape.
            self.ignored[key] = f"a {kind} of {parameter.shape[0]} rows, which the ranks do not divide evenly"

    def _splits_evenly(self, parameter: nn.Parameter) -> bool:
        shape, (_, num_shards) = tuple(parameter.shape), self._shard_axes()
        dim = choose_shard_dim(shape, num_shards)[0] if self.config.shard_dim == "auto" else 0
        return shape[dim] % num_shards == 0

    def _shard_axes(self, *, of_experts: bool = False) -> tuple[tuple[str, ...], int]:
        """Return the mesh axes that parameters are sharded over, and their number of ranks."""
        axes = tuple(axis for axis in (EXPERT_SHARD_AXES if of_experts else SHARD_AXES) if axis in self.axes)
        return axes, math.prod(self.axes[axis] for axis in axes)

    def plan(self, capability: tuple[int, int] | None) -> Plan:
        """Compute the plan, for hardware of this CUDA compute capability."""
        assignment = self._assignment()
        self._divide_tensors(assignment)
        floating = [key for key in self.tree.root.keys if self.dtype_of[key] in FLOATING]
        compute = choose_compute(self.config.precision, self.device, capability, self._dtypes(floating))
        self._group_modules = frozenset(node.fqn for node in by_node(assignment.candidates))
        groups = [
            self._group(candidate, keys, compute)
            for candidate, keys in zip(assignment.candidates, assignment.keys, strict=True)
            if keys or candidate.is_root
        ]
        groups = add_prefetch(groups, self.config.prefetch, self.config.overrides)
        hardware = (self.device, capability, self._shard_axes()[1])
        return Plan(
            model=type(self.model).__name__,
            device=self.device,
            axes=tuple(self.axes.items()),
            groups=tuple(groups),
            replicated=tuple(self._parameter(key, "replicate", why) for key, why in sorted(self.replicated.items())),
            ignored=tuple(self._parameter(key, "ignore", why) for key, why in sorted(self.ignored.items())),
            grad_scaler=compute.grad_scaler,
            early_root=self.config.prefetch.early_root,
            outer_modules=self._outer_modules(groups),
            track_unused=any(group.reduce_unused for group in groups),
            float8=choose_float8(self.model, self.config.float8, self.tree, groups, *hardware),
            tensor_parallel=self.tensor_parallel,
            expert_parallel=tuple(self.expert_parallel),
            context_parallel=self._context_parallel(groups),
            activations=self.config.activations,
            compile=self.config.compile,
            reasons=(compute.reason, *self.calls.notes),
            warnings=tuple(self._warnings(groups)),
        )

    def _divide_tensors(self, assignment: Assignment) -> None:
        """Choose splits over the tensor axis; splits made by the user are kept."""
        num_ranks, modules = self.axes.get("tensor", 1), dict(self.model.named_modules())
        divided = {name for name, parameter in self.model.named_parameters() if isinstance(parameter, DTensor)}
        if divided:
            names = {name.rpartition(".")[0] for name in divided}
            why = "parallelize_module was called on it before"
            chosen = [ParallelModule(fqn=name, how=DIVIDED, reason=why) for name in modules if name in names]
            self.tensor_parallel = tuple(chosen)
        elif num_ranks > 1:
            blocks = grouping.blocks_around(assignment.candidates)
            self.tensor_parallel = choose_tensor(
                self.model, self.config.tensor, self.tree, self.calls, blocks, num_ranks
            )
        splits = tensor_splits(self.tensor_parallel, modules, num_ranks)
        for key, tensor in enumerate(self.tensors):
            if name := next((name for name in tensor.names if name in splits), None):
                self.splits[key] = splits[name]

    def _context_parallel(self, groups: list[Group]) -> tuple[ParallelModule, ...]:
        """Return an entry per block for attention over full sequences."""
        if "context" not in self.axes:
            return ()
        blocks = grouping.outermost_blocks(self.model, groups)
        refuse_context(self.model, blocks)
        config, num_ranks = self.config.context, self.axes["context"]
        how = [config.method, *(["balanced"] if config.balanced else []), *(["verify"] if config.verify else [])]
        reason = f"sequences are divided over {num_ranks} ranks; keys and values are all-gathered in each block"
        return tuple(ParallelModule(fqn=name, how=", ".join(how), reason=reason) for name in blocks)

    def _dtypes(self, keys: list[int]) -> list[str]:
        """Return the dtypes of trainable parameters, or of all if none is trainable."""
        trained = {self.dtype_of[key] for key in keys if key in self.trainable}
        return sorted(trained or {self.dtype_of[key] for key in keys})

    def _assignment(self) -> Assignment:
        """Assign every parameter to one candidate, so that none mixes trainable dtypes."""
        if self.config.group_by == "root":
            candidates: list[GroupCandidate] = []
        elif is_explicit(self.config):
            candidates = [
                grouping.around_calls(candidate, self.calls)
                for candidate in grouping.named_candidates(self.tree, self.config)
            ]
        else:
            candidates = find_candidates(self.tree, self.calls)
        divided = by_node(self.experts)
        candidates = [each for each in candidates if not any(node in divided for node in each.nodes)] + self.experts
        candidates += split_by_override(self.tree, candidates, self.config.overrides, self.calls)
        names = {key: tensor.names for key, tensor in enumerate(self.tensors)}
        assignment = assign(self.tree, candidates, self.calls, names)
        if self.config.mixed_storage == "upcast":
            for keys in assignment.keys:
                self._upcast([key for key in keys if key in self.trainable])
        splits, odd = storage_splits(assignment, self.tree, self.dtype_of, self.trainable, self.calls)
        if splits:
            assignment = assign(self.tree, assignment.candidates + splits, self.calls, names)
        self.replicated |= {**odd, **assignment.replicated}
        for key in self.splits.keys() & self.replicated.keys():
            raise PlanError(
                f"{self.tensors[key].names[0]!r} is {self.replicated[key]}",
                where=self.tensors[key].names[0],
                why="experts are split over the expert axis and then sharded",
                fix='store the experts of a layer in one dtype, or set mixed_storage="upcast"',
            )
        for keys in assignment.keys:
            keys[:] = [key for key in keys if key not in self.replicated]
        return assignment

    def _upcast(self, keys: list[int]) -> None:
        dtypes = sorted({self.dtype_of[key] for key in keys})
        if len(dtypes) > 1 and all(dtype in FLOATING for dtype in dtypes):
            target = settings.widest(dtypes)
            for key in keys:
                if self.dtype_of[key] != target:
                    self.upcast[key], self.dtype_of[key] = self.dtype_of[key], target

    def _group(self, candidate: GroupCandidate, keys: list[int], compute: Compute) -> Group:
        overrides = [override for override, ids in self.covered if all(id(node) in ids for node in candidate.nodes)]
        chosen = group_settings(self.config, overrides, compute, self._dtypes(keys), is_root=candidate.is_root)
        reshard, reason = chosen["reshard_after_forward"], candidate.reason
        shard_axes, num_shards = self._shard_axes(of_experts=candidate.kind == "experts")
        runs_again = any(node.fqn in self.calls.repeated for node in candidate.nodes)
        if candidate.kept_unsharded:
            reshard = False
        elif not candidate.is_root and self.config.reshard_after_forward is None and runs_again:
            reshard, reason = False, f"{reason}; called several times a pass, so it is kept unsharded until backward"
        elif not isinstance(reshard, bool) and (reshard == num_shards or num_shards % reshard):
            reshard = True  # over as many ranks as before forward
        for name in ("forward_prefetch", "backward_prefetch"):
            chosen[name] = ("",) * chosen[name]  # placeholders for the names that add_prefetch sets
        unused = self.config.unused_parameters
        return Group(
            **chosen | {"reshard_after_forward": reshard},
            modules=tuple(node.fqn for node in candidate.nodes),
            kind=candidate.kind,
            parameters=tuple(self._parameter(key) for key in keys),
            shard_axes=shard_axes,
            entry_points=self._entry_points(candidate),
            held=candidate.kept_unsharded,
            reduce_unused=unused == "reduce" or (unused == "auto" and self._is_conditional(candidate)),
            reason=reason,
        )

    def _is_conditional(self, candidate: GroupCandidate) -> bool:
        """Whether the data may skip a module of the candidate that has parameters."""
        nodes = [self.tree.nodes.get(name) for name in self.calls.conditional]
        return any(node is not None and node.keys and candidate.contains(node) for node in nodes)

    def _entry_points(self, candidate: GroupCandidate) -> tuple[str, ...]:
        methods = self.calls.methods
        found = [f"{node.fqn}:{method}" for node in candidate.nodes for method in sorted(methods.get(node.fqn, ()))]
        if candidate.is_root:
            found += [f"{candidate.nodes[0].fqn}:{method}" for method in ("forward", *self.calls.public_methods)]
        names = {node.fqn for node in candidate.nodes}
        for entry in self.config.entry_points:
            module, _, method = entry.rpartition(":")
            self._check_entry_point(entry, module, method)
            is_inside = candidate.is_root and candidate.contains(self.tree.nodes[module])
            is_home = module in names or (is_inside and module not in self._group_modules)
            found += [f"{module}:{method}"] if is_home else []
        return tuple(dict.fromkeys(found))

    def _check_entry_point(self, entry: str, module: str, method: str) -> None:
        node = self.tree.nodes.get(module)
        if node is None or not callable(getattr(type(node.module), method, None)):
            raise PlanError(
                f"entry point {entry!r} does not exist",
                where=f"entry_points: {entry}",
                why="an entry point is module.fqn:method, or :method for the root",
                fix=f"check the spelling; the root's methods are reached as :{method or 'method'}",
            )

    def _parameter(
        self, key: int, placement: Literal["shard", "replicate", "ignore"] = "shard", reason: str = ""
    ) -> PlannedParameter:
        tensor, parameter, dim = self.tensors[key], self.tensors[key].parameter, 0
        notes = [reason]
        planned = PlannedParameter(
            fqn=tensor.names[0],
            aliases=tensor.names[1:],
            shape=tuple(parameter.shape),
            dtype=self.dtype_of[key],
            trainable=key in self.trainable,
            placement=placement,
            splits=self.splits.get(key, ()),
        )
        packed = packed_bytes(parameter)
        if packed is not None:
            notes.append(f"{type(parameter).__name__}: {8 * packed / parameter.numel():.3g} bits an element")
        elif placement == "shard" and self.config.shard_dim == "auto":
            _, num_shards = self._shard_axes(of_experts=any(axis == "expert" for axis, _, _ in planned.splits))
            dim, why = choose_shard_dim(planned.local_shape, num_shards)
            notes.append(why)
        if len(tensor.parameters) > 1:
            notes.append("tied by storage; becomes one parameter object under all its names")
        if rewritten := placement == "shard" and not parameter.is_contiguous():
            notes.append("rewritten row-major: FSDP2 splits contiguous storage only")
        if key in self.upcast:
            notes.append(f"stored in {self.dtype_of[key]} instead of {self.upcast[key]}, as asked")
        return replace(
            planned,
            shard_dim=dim,
            make_contiguous=rewritten,
            upcast_from=self.upcast.get(key),
            packed_bytes=packed,
            reason="; ".join(note for note in notes if note),
        )

    def _outer_modules(self, groups: list[Group]) -> tuple[str, ...]:
        """Return callable modules outside the groups that use the root's parameters."""
        names = {parameter.fqn for group in groups if group.kind == "root" for parameter in group.parameters}
        root_keys = {key for key, tensor in enumerate(self.tensors) if tensor.names[0] in names}
        found: list[str] = []

        def visit(node: Node) -> None:
            for child in node.children:
                if child.fqn in self._group_modules or not child.keys & root_keys:
                    continue
                if child.has_forward:
                    found.append(child.fqn)
                if not child.is_atom:
                    visit(child)

        for root in self.tree.roots:
            visit(root)
        return tuple(found)

    def _warnings(self, groups: list[Group]) -> list[str]:
        warnings = []
        short = [p for group in groups for p in group.parameters if p.trainable and p.dtype in settings.SIXTEEN_BIT]
        if short and not self.config.allow_16bit_storage:
            warnings.append(
                f"{len(short)} trainable parameters are stored in {short[0].dtype} (first: {short[0].fqn}): optimizer "
                "updates smaller than 1/256 of a weight are lost. Store float32 and compute in bfloat16 "
                "(model.float() before sharding), or set allow_16bit_storage=True"
            )
        if len(groups) == 1 and self.config.group_by != "root" and not groups[0].modules[0] and len(self.tensors) > 1:
            warnings.append("a single group: all parameters are unsharded at once. Name blocks with block_patterns")
        tied = [tuple(map(self.model.get_parameter, names)) for names in tied_by_config(self.model)]
        if any(first is not second and isinstance(first, DTensor) for first, second in tied):
            warnings.append(
                "parallelize_module has untied the output matrix from the embedding: each would get a part of the "
                "gradient. Tie them again before sharding: output.weight = embedding.weight"
            )
        return warnings
