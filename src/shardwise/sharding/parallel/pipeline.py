"""Pipeline parallelism: the blocks of a decoder split into stages, run by torch's schedules.

Every stage runs the model's own forward on the micro-batch, so that masks, positions and rotary tables are computed as
usual. Blocks of earlier stages return the received tensors, and the forward ends after the stage's last block.
Parameters keep their names in the full model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from shardwise.config.schema import ROOT_PATTERN, ExpertConfig, Float8Config, PipelineConfig, ShardConfig
from shardwise.distributed.agreement import agree_on, flag_device, gather_objects, run_on_all
from shardwise.distributed.mesh import axis_sizes, default_mesh, gradient_mesh, model_mesh, sub_mesh
from shardwise.errors import ConfigError
from shardwise.models.modes import trial_forward
from shardwise.models.nested_tensors import change_tensors, find_tensors
from shardwise.planning.groups import is_explicit, name_matcher, outermost_blocks
from shardwise.planning.plan import ParallelModule, Plan
from shardwise.planning.planner import device_capability, make_plan, plan
from shardwise.planning.stages import StagePlan, not_a_sequence, plan_stages, refuse_tensor_axis
from shardwise.sharding.apply import shard
from shardwise.sharding.full_params import reshard
from shardwise.sharding.inventory import local_tensor
from shardwise.sharding.parallel.context_parallel import context_of
from shardwise.sharding.parallel.pipeline_stage import Loss, Passing, StageForward, copy_with, make_stand_ins
from shardwise.sharding.registry import PipelineRanks, remember, sharded_state

Batch = Mapping[str, Tensor]


@dataclass(slots=True)
class Part:
    """One stage on this rank."""

    stage: StagePlan
    model: nn.Module
    passing: Passing
    forward: StageForward


class Pipeline:
    """A decoder split into stages, one or several on this rank. From `pipeline`.

    Args:
        parts: This rank's stages in order.
        model: The modules of these stages, with their names in the full model.
        mesh: Mesh of all ranks.
        config: Schedule and number of micro-batches.
        ties: Parameters of this rank that another rank of the pipeline also has: name, and that rank in the group.
    """

    def __init__(
        self,
        parts: list[Part],
        model: nn.Module,
        mesh: DeviceMesh,
        config: PipelineConfig,
        ties: list[tuple[str, int]],
    ) -> None:
        self.parts, self.model, self.mesh, self.config = parts, model, mesh, config
        axis = sub_mesh(mesh, ("pipeline",))
        assert axis is not None
        self.group, self.num_ranks, self.rank = axis.get_group(), axis.size(), axis.get_local_rank()
        self.num_microbatches = 0
        """Number of micro-batches of the last batch."""
        self._ties = ties
        self._schedule: Any = None
        self._shape: tuple[int | None, ...] | None = None

    @property
    def num_stages(self) -> int:
        """Number of stages over all ranks."""
        return self.parts[0].stage.num_stages

    @property
    def device(self) -> torch.device:
        """Device of the stages."""
        return torch.device(self.mesh.device_type)

    @property
    def models(self) -> list[tuple[int, nn.Module]]:
        """This rank's stages: number and model, for materialization or loading weights."""
        return [(part.stage.index, part.model) for part in self.parts]

    @property
    def plans(self) -> list[Plan]:
        """Plans of this rank's stages."""
        states = [sharded_state(part.model) for part in self.parts]
        return [state.plan for state in states if state is not None]

    def parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of this rank's stages, for its optimizer.

        Ranks:
            Local.
        """
        return self.model.parameters()

    def step(self, batch: Batch, *, num_tokens: int | Tensor | None = None) -> Tensor:
        """Run forward and backward of all micro-batches, for gradients of the mean loss over all tokens.

        Args:
            batch: This rank's rows, the same on every rank of a pipeline; their number is divisible into micro-batches.
            num_tokens: Number of tokens in the batch; by default of labels other than -100, or of rows without labels.

        Returns:
            The mean loss over the tokens of all ranks; the same on every rank.

        Raises:
            ConfigError: The rows are not divisible into micro-batches.
            ShardError: The blocks are not a sequence; on all ranks, in the first step.

        Ranks:
            Collective.
        """
        if num_tokens is None:
            labels, rows = batch.get("labels"), next(iter(batch.values())).shape[0]
            num_tokens = rows if labels is None else (labels != -100).sum()
        total = torch.as_tensor(num_tokens, device=self.device).to(torch.float32, copy=True)
        ranks = gradient_mesh(self.mesh)
        for axis in range(ranks.ndim):
            dist.all_reduce(total, group=ranks.get_group(axis))
        loss, _ = self.forward_and_backward(batch, ranks.size() / total.clamp(min=1))
        for axis in range(ranks.ndim):
            dist.all_reduce(loss, group=ranks.get_group(axis))
        return loss / ranks.size()

    def forward_and_backward(self, batch: Batch, scale: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
        """Compute gradients of the losses of all micro-batches, multiplied by `scale`.

        Returns:
            The sum of the losses, and the number of tokens if the loss returns it; the same on every rank of a
            pipeline.

        Ranks:
            Collective.
        """
        self._prepare(batch)
        for part in self.parts:
            part.forward.scale, part.forward.num_tokens = scale, []
        losses: list[Tensor] = []
        target = torch.zeros(self.num_microbatches, device=self.device)
        self._schedule.step(target=target, losses=losses, return_outputs=False, **batch)
        self._add_tied_gradients()
        return self._reduce_loss([loss.detach() for loss in losses])

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the summed loss of a batch without gradients, and the number of tokens if the loss returns it.

        Ranks:
            Collective. The same on every rank of a pipeline.
        """
        self._prepare(batch)
        return self._reduce_loss(self._forward(_split(batch, self.num_microbatches)))

    @torch.no_grad()
    def compute(self, batch: Batch, function: Callable[[nn.Module, Any], Tensor]) -> Tensor:
        """Return the result of `function(model, batch)` on the last stage, run in place of the loss.

        Args:
            batch: Run as one micro-batch; the same on every rank of a pipeline.
            function: Calls the model once.

        Ranks:
            Collective. The result is the same on every rank of a pipeline, in CPU memory.
        """
        before = self.parts[0].forward.loss
        for part in self.parts:
            part.forward.loss = function
        try:
            self._prepare(batch, 1)
            made = self._forward([dict(batch)])
        finally:
            for part in self.parts:
                part.forward.loss = before
        gathered = gather_objects(made[0].cpu() if made else None, group=self.group)
        return next(each for each in gathered if each is not None)

    def _forward(self, micro: list[dict[str, Tensor]]) -> list[Tensor]:
        """Run all stages on some micro-batches; return the results of the last stage, on its rank."""
        made: list[Tensor] = []
        sends: list[tuple[dist.Work | None, Tensor]] = []
        for part in self.parts:
            part.forward.scale, part.forward.num_tokens = 1.0, []
            index = part.stage.index
            for rows in micro:
                received = [torch.empty_like(shape, device=self.device) for shape in _inputs(part)]
                for tensor in received:
                    dist.recv(tensor, group=self.group, group_src=(index - 1) % self.num_ranks)
                sent = part.model(*received, **rows)
                if part.stage.is_last:
                    made.append(sent)
                    continue
                for tensor in sent:
                    peer = (index + 1) % self.num_ranks
                    sends.append((dist.isend(tensor, group=self.group, group_dst=peer), tensor))
        for work, _ in sends:
            if work is not None:
                work.wait()
        for part in self.parts:
            reshard(part.model)
        return made

    def _reduce_loss(self, losses: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the sum of the last stage's losses and tokens on every rank of the pipeline.

        Ranks:
            Collective over the stages.
        """
        both = torch.zeros(2, device=self.device)
        if losses:
            both[0] = torch.stack(losses).sum()
            both[1] = torch.stack([each.to(both) for each in self.parts[-1].forward.num_tokens]).sum()
        dist.all_reduce(both, group=self.group)
        return both[0], both[1]

    def _prepare(self, batch: Batch, count: int | None = None) -> None:
        """Find the tensors between stages and create the schedule, for the first batch of a shape.

        Args:
            batch: This rank's rows.
            count: Number of micro-batches to run without a schedule; None for a training step.

        Ranks:
            Collective.
        """
        num_rows, *rest = next(iter(batch.values())).shape
        shape = (count, num_rows, *rest)
        is_new = torch.tensor(int(shape != self._shape), device=flag_device(self.group))
        for axis in range(self.mesh.ndim):  # on any rank
            dist.all_reduce(is_new, dist.ReduceOp.MAX, group=self.mesh.get_group(axis))
        if not is_new:
            return
        is_step = count is None
        count = count or run_on_all(lambda: num_microbatches(self.config, self.num_ranks, num_rows), self.mesh)
        agree_on(str(count), "the number of micro-batches", fix="give every rank as many rows", group=self.mesh)
        self.num_microbatches = count
        rows = _split(batch, count)[0]
        first = self.parts[0]
        # Tracing communicates only within a stage: if one stage fails, all ranks raise.
        described = run_on_all(lambda: _trace_stage(first, rows, []) if first.stage.is_first else None, self.mesh)
        outputs = next(each for each in gather_objects(described, group=self.group) if each is not None)
        for part in self.parts:
            part.passing.block_output, part.passing.unit_outputs = outputs
        others = [part for part in self.parts if not part.stage.is_first]
        run_on_all(lambda: [_trace_stage(part, rows, self._received(part)) for part in others], self.mesh)
        self._send_tied_parameters()
        self._schedule, self._shape = self._make_schedule() if is_step else None, shape

    def _received(self, part: Part) -> list[Tensor]:
        """Return random inputs of a stage; they differ between ranks, as parts of a sequence do."""
        generator = torch.Generator().manual_seed(self.mesh.get_rank())
        shapes = _inputs(part)
        return [torch.randn(each.shape, generator=generator).to(each.dtype).to(self.device) for each in shapes]

    def _make_schedule(self) -> Any:
        stages: list[Any] = [
            PipelineStage(
                part.model,
                part.stage.index,
                self.num_stages,
                self.device,
                input_args=tuple(each.requires_grad_() for each in _inputs(part)),
                output_args=tuple(each.requires_grad_() for each in _outputs(part)),
                group=self.group,
            )
            for part in self.parts
        ]
        options: dict[str, Any] = {"loss_fn": lambda loss, _: loss, "scale_grads": False}
        if self.config.schedule == "interleaved":
            return ScheduleInterleaved1F1B(stages, self.num_microbatches, **options)
        kind = Schedule1F1B if self.config.schedule == "1f1b" else ScheduleGPipe
        return kind(stages[0], self.num_microbatches, **options)

    def _send_tied_parameters(self) -> None:
        """Send the values of tied parameters from the first stage to the last one."""
        with torch.no_grad():
            for name, peer in self._ties:
                memory = local_tensor(self.model.get_parameter(name))
                if self.rank < peer:
                    dist.send(memory.contiguous(), group=self.group, group_dst=peer)
                else:
                    received = torch.empty_like(memory)
                    dist.recv(received, group=self.group, group_src=peer)
                    memory.copy_(received)

    def _add_tied_gradients(self) -> None:
        """Add the other stage's gradients of tied parameters."""
        for name, peer in self._ties:
            parameter = self.model.get_parameter(name)
            if not parameter.requires_grad:
                continue
            assert parameter.grad is not None
            mine = local_tensor(parameter.grad)
            other = torch.empty_like(mine)
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, mine.clone(), group=self.group, group_peer=peer),
                    dist.P2POp(dist.irecv, other, group=self.group, group_peer=peer),
                ]
            )
            for work in works:
                work.wait()
            mine.add_(other)


def _inputs(part: Part) -> list[Tensor]:
    """Return meta tensors of a stage's inputs."""
    if part.stage.is_first:
        return []
    hidden, *extras = part.passing.shapes()
    return [hidden, *extras * (len(part.forward.blocks) - len(part.stage.blocks))]


def _outputs(part: Part) -> list[Tensor]:
    """Return meta tensors of a stage's outputs, or of the loss."""
    if part.stage.is_last:
        return [torch.empty((), device="meta")]
    hidden, *extras = part.passing.shapes()
    return [hidden, *extras * len(part.forward.blocks)]


def _split(batch: Batch, number: int) -> list[dict[str, Tensor]]:
    parts = {name: value.chunk(number) for name, value in batch.items()}
    return [dict(zip(parts, each, strict=True)) for each in zip(*parts.values(), strict=True)]


def num_microbatches(config: PipelineConfig, num_ranks: int, num_rows: int) -> int:
    """Return the number of micro-batches of a rank's rows.

    By default the smallest number that divides the rows and is at least twice the number of stages, or else the largest
    that is at least the number of stages.

    Raises:
        ConfigError: There are fewer micro-batches than stages, or the rows are not divisible.
    """
    num_stages = num_ranks * config.stages_per_rank
    divisors = [number for number in range(num_stages, num_rows + 1) if num_rows % number == 0]
    if config.schedule == "interleaved":
        divisors = [number for number in divisors if number % num_ranks == 0]
    chosen = config.microbatches
    if chosen is None and divisors:
        chosen = next((number for number in divisors if number >= 2 * num_stages), divisors[-1])
    problem = fix = ""
    if (config.schedule == "interleaved") != (config.stages_per_rank > 1):
        problem = f"pipeline.stages_per_rank is {config.stages_per_rank} with the schedule {config.schedule}"
        fix = "set pipeline.schedule = interleaved and pipeline.stages_per_rank = 2, or 1f1b and 1"
    elif chosen is None or chosen not in divisors:
        problem = f"{num_rows} sequences on each rank cannot be divided into {chosen or num_stages} micro-batches"
        number = f"pipeline.microbatches to one of {divisors[:8]}" if divisors else f"at least {num_stages} of them"
        fix = f"set {number}" if divisors else f"use {number}: a larger batch, or fewer stages"
    if problem:
        raise ConfigError(
            problem,
            where="pipeline.microbatches",
            why=f"micro-batches have equal sizes, and each of {num_stages} stages works on one of them at a time",
            fix=fix,
        )
    assert chosen is not None
    return chosen


@torch.no_grad()
def _trace_stage(part: Part, rows: Batch, received: list[Tensor]) -> tuple[Any, dict[str, Any]]:
    """Run a stage without side effects; return outputs of its first block and of modules outside blocks, on meta.

    Raises:
        PlanError: A block returns no hidden states, or its input is not the output of the block before.

    Ranks:
        Collective over the ranks of the stage.
    """
    outputs: dict[str, Any] = {}
    hidden: list[Tensor] = []

    def enter(name: str, block: nn.Module, args: Any, kwargs: Any) -> None:
        expected = part.passing.hidden if name == part.stage.blocks[0] else hidden[-1]
        if expected is not None and not any(each is expected for each in find_tensors((args, kwargs))):
            raise not_a_sequence(name, "does not get the hidden states of the block before as they are")

    def leave(name: str, module: nn.Module, args: Any, output: Any) -> None:
        outputs[name] = change_tensors(
            output, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        )
        if name in part.stage.blocks:
            tensors = find_tensors(output)
            if not tensors or not all(tensor.is_floating_point() for tensor in tensors):
                raise not_a_sequence(name, "returns no hidden states, or tensors that have no gradients")
            hidden.append(tensors[0])

    with ExitStack() as stack:
        for name in (*part.stage.units, *part.stage.blocks):
            module = part.model.get_submodule(name)
            if name in part.stage.blocks:
                hook = module.register_forward_pre_hook(partial(enter, name), prepend=True, with_kwargs=True)
                stack.callback(hook.remove)
            stack.callback(module.register_forward_hook(partial(leave, name)).remove)
        with trial_forward(part.model):
            part.model(*received, **rows)
    reshard(part.model)
    return outputs[part.stage.blocks[0]], {name: outputs[name] for name in part.stage.units if name in outputs}


def pipeline(
    model: nn.Module,
    config: ShardConfig | None = None,
    *,
    mesh: DeviceMesh | None = None,
    loss: Loss,
    example_inputs: Batch,
) -> Pipeline:
    """Split a decoder into stages over the mesh axis `pipeline`, and shard this rank's stages.

    The blocks of the model must be a sequence: the input of each is the output of the one before. Build it on the
    meta device, so that no rank allocates all of it; then call `materialize(pipeline.model)` or load weights. The first
    and the last stage both have an output matrix that is tied to the embedding, and their gradients are added.

    Args:
        model: The full model; do not use it afterwards.
        config: Sharding settings of the stages, and in `config.pipeline` their schedule.
        mesh: From `init_distributed(MeshConfig(pipeline=...))`.
        loss: Function of the model and a micro-batch; returns the loss summed over its tokens.
        example_inputs: A batch as passed to `step`.

    Raises:
        ConfigError: The mesh has no pipeline axis, or there are fewer micro-batches than stages.
        PlanError: There are fewer blocks than stages, or the model cannot be split; nothing has been changed.

    Ranks:
        Collective. Call on every rank of `mesh`.
    """
    config, mesh = config or ShardConfig(), mesh or default_mesh()
    refuse_tensor_axis(axis_sizes(mesh))
    axis = sub_mesh(mesh, ("pipeline",))
    num_ranks = 1 if axis is None else axis.size()
    stages, whole = run_on_all(lambda: _plan(model, config, mesh, num_ranks, loss, example_inputs), mesh)
    assert axis is not None
    rank, group = axis.get_local_rank(), axis.get_group()
    blocks = [name for stage in stages for name in stage.blocks]
    units = [name for stage in stages for name in stage.units]
    ties = find_ties(model, stages)
    parts: list[Part] = []
    present: dict[str, nn.Module] = {}
    mine = stages[rank::num_ranks]
    passing = {stage: Passing() for stage in mine}
    stand_ins = {stage: make_stand_ins(model, stage, blocks, units, passing[stage]) for stage in mine}
    kept = {stage: {name: model.get_submodule(name) for name in (*stage.blocks, *stage.units)} for stage in mine}
    models = [copy_with(model, stand_ins[stage] | kept[stage]) for stage in mine]
    # Compute all plans before sharding: an error in one stage is raised on all ranks.
    plans = run_on_all(
        lambda: [_plan_of_part(*each, config, mesh, whole) for each in zip(models, mine, strict=True)], mesh
    )
    for stage, part, planned in zip(mine, models, plans, strict=True):
        shard(part, config, mesh=model_mesh(mesh), plan=planned)
        if (context := context_of(part)) is not None:
            context.passing = passing[stage]
        upto = blocks[: blocks.index(stage.blocks[-1]) + 1]
        forward = part.forward = StageForward(part, stage, passing[stage], loss, upto)
        parts.append(Part(stage, part, passing[stage], forward))
        tied = {name: each for name, each in stand_ins[stage].items() if next(each.parameters(), None) is not None}
        present = stand_ins[stage] | present | tied | kept[stage]
    peers = [
        (name, (last if stage == first else first) % num_ranks)
        for name, (first, last) in ties.items()
        for stage in (part.stage.index for part in parts)
        if stage in (first, last)
    ]
    merged = parts[0].model
    if len(parts) > 1:  # each stage has its own copy of modules such as rotary tables
        own = {name for name, module in model.named_modules() if next(module.children(), None) is None}
        own = {name for name in own if not any(f"{name}.".startswith(f"{held}.") for held in present)}
        merged = copy_with(model, {name: parts[0].model.get_submodule(name) for name in own} | present)
    indices = [part.stage.index for part in parts]
    repeated = frozenset(name for name, (_, last) in ties.items() if last in indices)
    names = frozenset(_names(model))
    for part in parts:
        state = sharded_state(part.model)
        assert state is not None
        state.pipeline = PipelineRanks(group, repeated, names - frozenset(_names(part.model)))
        if part.model is not merged:
            ranks = PipelineRanks(group, repeated, names - frozenset(_names(merged)))
            remember(merged, replace(state, pipeline=ranks), is_root=False)
    return Pipeline(parts, merged, mesh, config.pipeline, peers)


def _plan(
    model: nn.Module, config: ShardConfig, mesh: DeviceMesh, num_ranks: int, loss: Loss, batch: Batch
) -> tuple[list[StagePlan], Plan]:
    """Return the stages and the plan of the full model, which finds all errors."""
    if num_ranks == 1:
        raise ConfigError(
            "the mesh has no pipeline axis",
            where="mesh.pipeline",
            why="its ranks run the stages",
            fix="init_distributed(MeshConfig(pipeline=2)), or shard(model)",
        )
    num_stages = num_ranks * config.pipeline.stages_per_rank
    num_parts = num_microbatches(config.pipeline, num_ranks, next(iter(batch.values())).shape[0])
    whole = plan(model, config, mesh=model_mesh(mesh))
    blocks = outermost_blocks(model, whole.groups)
    micro = _split(batch, num_parts)[0]
    return plan_stages(model, blocks, num_stages, lambda fake: loss(model, fake), micro), whole


def _plan_of_part(part: nn.Module, stage: StagePlan, config: ShardConfig, mesh: DeviceMesh, whole: Plan) -> Plan:
    """Return the plan of one stage, with the groups of the full model's plan."""
    modules = dict(part.named_modules())
    classes = {type(module).__name__ for module in modules.values()}
    names = [*modules, *(name for name, _ in part.named_parameters(remove_duplicate=False)), ROOT_PATTERN]

    def present(patterns: tuple[str, ...]) -> tuple[str, ...]:
        """Remove patterns that only match modules of other stages; the full plan has checked them."""
        return tuple(each for each in patterns if each in classes or any(map(name_matcher(each), names)))

    if not is_explicit(config):
        single = [group.modules[0] for group in whole.groups if len(group.modules) == 1]
        named = [name for name in single if name and name in modules and any(True for _ in modules[name].parameters())]
        config = replace(config, block_patterns=tuple(named))
    experts = tuple(each.fqn for each in whole.expert_parallel if each.how and each.fqn in modules)
    config = replace(
        config,
        block_patterns=present(config.block_patterns),
        block_classes=present(config.block_classes),
        ignored=present(config.ignored),
        overrides=tuple(each for each in config.overrides if present((each.pattern,))),
        expert=ExpertConfig(modules=experts),
        float8=Float8Config(),  # decided by the full plan
    )
    planned = make_plan(part, config, model_mesh(mesh), None, capability=device_capability())
    how = f"stage {stage.index} of {stage.num_stages}, {config.pipeline.schedule}"
    reason = "blocks are divided evenly; what runs before and after them is on the first and the last stage"
    entries = tuple(ParallelModule(fqn=name, how=how, reason=reason) for name in (*stage.blocks, *stage.units))
    return replace(planned, pipeline=entries, float8=tuple(each for each in whole.float8 if each.fqn in modules))


def find_ties(model: nn.Module, stages: list[StagePlan]) -> dict[str, tuple[int, int]]:
    """Return parameters of two stages by their first name: the embedding, and the output matrix tied to it.

    Raises:
        PlanError: More than two stages have the same parameter.
    """
    holders: dict[int, tuple[str, list[int]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        _, held = holders.setdefault(id(parameter), (name, []))
        held += [
            stage.index for stage in stages for unit in (*stage.blocks, *stage.units) if name.startswith(f"{unit}.")
        ]
    ties: dict[str, tuple[int, int]] = {}
    for name, held in holders.values():
        if len(different := sorted(set(held))) > 1:
            if len(different) > 2:
                raise not_a_sequence(name, f"is tied between {len(different)} stages")
            ties[name] = (different[0], different[1])
    return ties


def _names(model: nn.Module) -> list[str]:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return [name for name, _ in named]
