"""parity(): train a model sharded and in one process, and compare step by step."""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import AdamW, Optimizer

from shardwise.config.schema import ShardConfig
from shardwise.diagnosing import parity_criteria as criteria
from shardwise.diagnosing.parity_criteria import Deviation, Difference, Gap, Parity, Quantity, Tolerance, measure
from shardwise.distributed.agreement import agree_on, gather_over_mesh
from shardwise.distributed.mesh import data_parallel_mesh, data_parallel_rank, default_mesh, sub_mesh
from shardwise.errors import ConfigError
from shardwise.models.nested_tensors import cast_inputs, find_tensors
from shardwise.models.random_state import kept_random_state, seed_everything
from shardwise.planning.plan import Plan
from shardwise.sharding.apply import shard
from shardwise.sharding.inventory import fingerprint, local_part, local_tensor
from shardwise.sharding.materialize import materialize
from shardwise.sharding.parallel.context_attention import split_sequences
from shardwise.sharding.parallel.pipeline import num_microbatches, pipeline
from shardwise.sharding.registry import names_elsewhere, sharded_state

LossOf = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One training task; computes the loss of any rank and step on any copy of the model."""

    make_batch: Callable[[int, int, int], Any]
    """From `bind_batch`."""
    loss: LossOf
    """From `bind_loss`."""
    seed: int
    num_ranks: int
    device: torch.device

    def batch_of(self, rank: int, step: int) -> Any:
        """Return the batch of a rank and step, always the same; also seeds the generators, for equal dropout."""
        unique = self.seed + 1 + step * self.num_ranks + rank
        seed_everything(unique)
        batch = self.make_batch(rank, step, unique)
        seed_everything(unique)  # independent of the numbers drawn for the batch
        return batch if self.device.type == "cpu" else cast_inputs(batch, device=self.device)

    def loss_of(self, model: nn.Module, rank: int, step: int, batch: Any = None) -> Tensor:
        """Loss of `rank`'s batch of `step`, or of its part of that batch."""
        loss = self.loss(model, self.batch_of(rank, step) if batch is None else batch)
        if not loss.requires_grad:
            raise ConfigError(
                "the loss depends on no trainable parameter",
                where=f"parity(), step {step + 1}, batch of rank {rank}",
                why="without a gradient there is nothing to compare",
                fix="return the loss with its graph: no .item(), no torch.no_grad(), not all frozen",
            )
        return loss


def bind_batch(make_batch: Callable[..., Any]) -> Callable[[int, int, int], Any]:
    """Turn any accepted form of `make_batch` into `(rank, step, seed) -> batch`.

    Accepted are any of the keywords `rank`, `step` and `seed`; no parameters (the generators are seeded
    before the call); one parameter of another name, the seed; or two, rank and step.
    """
    required = _required_parameters(make_batch, "make_batch")
    known = {"rank", "step", "seed"} & set(inspect.signature(make_batch).parameters)
    if known:
        if unknown := [name for name in required if name not in known]:
            raise _wrong_signature("make_batch", unknown, "rank, step and seed are all that parity() can give")

        def by_name(rank: int, step: int, seed: int) -> Any:
            values = {"rank": rank, "step": step, "seed": seed}
            return make_batch(**{name: values[name] for name in known})

        return by_name
    if len(required) > 2:
        raise _wrong_signature("make_batch", required, "it takes nothing, a seed, or rank and step")
    return lambda rank, step, seed: make_batch(*((), (seed,), (rank, step))[len(required)])


def bind_loss(loss: Callable[..., Tensor] | None) -> LossOf:
    """Turn any accepted form of `loss` into `(model, batch) -> scalar`.

    Accepted are None (the output's own loss, else the mean of its squares), `loss(model, batch)` when the
    first parameter is called `model`, `loss(output)`, and `loss(output, batch)`.
    """
    if loss is None:
        return lambda model, batch: loss_of_output(call_model(model, batch))
    required = _required_parameters(loss, "loss")
    if required[:1] == ["model"]:
        return loss
    if len(required) == 1:
        return lambda model, batch: loss(call_model(model, batch))
    if len(required) == 2:
        return lambda model, batch: loss(call_model(model, batch), batch)
    raise _wrong_signature("loss", required, "it takes (output), (output, batch) or (model, batch)")


def call_model(model: nn.Module, batch: Any) -> Any:
    """`model(**batch)` for a mapping, `model(*batch)` for a tuple or list, else `model(batch)`."""
    if isinstance(batch, Mapping):
        return model(**batch)
    # A named tuple is a single argument, not a list of arguments.
    if isinstance(batch, (tuple, list)) and not hasattr(batch, "_fields"):
        return model(*batch)
    return model(batch)


def loss_of_output(output: Any) -> Tensor:
    """Return the model's own loss (`.loss`, or its only scalar), else the mean of squares of its outputs."""
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, Tensor) and own.ndim == 0:
        return own
    parts = output if isinstance(output, (tuple, list)) else [output]
    scalars = [part for part in parts if isinstance(part, Tensor) and part.ndim == 0 and part.is_floating_point()]
    if len(scalars) == 1:  # the model's loss, alone or as in `return logits, loss`
        return scalars[0]
    real = (torch.view_as_real(t) if t.is_complex() else t for t in find_tensors(output, objects=-1))
    squares = [tensor.float().square().mean() for tensor in real if tensor.is_floating_point()]
    if not squares:
        raise ConfigError(
            f"the model returned {type(output).__name__}, which contains no floating-point tensor",
            where="parity(loss=None)",
            why="the default loss is the output's own loss, or the mean of squares of its tensors",
            fix="pass loss=lambda output, batch: ...",
        )
    return torch.stack(squares).sum()


def _required_parameters(function: Callable[..., Any], what: str) -> list[str]:
    if not callable(function):
        raise ConfigError(
            f"{what} is a {type(function).__name__}",
            where=f"parity({what}=...)",
            why="it is called for every rank and step",
            fix=f"pass a function: {what}=lambda ...: ...",
        )
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters
    return [name for name, p in parameters.items() if p.kind not in variadic and p.default is inspect.Parameter.empty]


def _wrong_signature(what: str, names: list[str], rule: str) -> ConfigError:
    return ConfigError(
        f"{what} has parameters {', '.join(names)}",
        where=f"parity({what}=...)",
        why=rule,
        fix=f"wrap it: {what}=lambda {'seed' if what == 'make_batch' else 'output, batch'}: ...",
    )


Buffers = dict[str, Tensor | None]


class ReferenceStep(NamedTuple):
    """Results of one step in one process."""

    losses: list[float]
    """Loss of each rank."""
    gradients: dict[str, Tensor | None]
    """Gradients averaged over ranks; None if no rank has one."""
    own_gradients: dict[str, Tensor | None]
    """Gradients of the calling rank before averaging."""


@dataclass(slots=True)
class ReferenceRun:
    """The unsharded model with its optimizer, and each rank's own buffers.

    Batch statistics are per rank, as they are in training; weights are shared.
    """

    model: nn.Module
    optimizer: Optimizer
    task: Task
    rank: int
    """The rank of this process."""
    buffers: list[Buffers] = field(default_factory=list)
    parameter_order: dict[str, int] = field(default_factory=dict)
    """Index of each parameter in the order of forward; known after the first step."""

    def step(self, step: int) -> ReferenceStep:
        """Run every rank's batch of `step`, average the gradients and step the optimizer."""
        if not self.buffers:
            for _ in range(self.task.num_ranks):
                copies: dict[int, Tensor] = {}  # keeps tied buffers tied
                self.buffers.append(
                    {
                        name: None if buffer is None else copies.setdefault(id(buffer), buffer.clone())
                        for name, buffer in registered_buffers(self.model).items()
                    }
                )
        losses: list[float] = []
        by_rank: list[dict[str, Tensor | None]] = []
        for rank in range(self.task.num_ranks):
            for name, buffer in self.buffers[rank].items():
                owner, _, leaf = name.rpartition(".")
                self.model.get_submodule(owner)._buffers[leaf] = buffer
            self.model.zero_grad(set_to_none=True)
            with _noting_order(self.model, self.parameter_order):
                loss = self.task.loss_of(self.model, rank, step)
            loss.backward()
            losses.append(float(loss.detach()))
            by_rank.append({name: p.grad for name, p in self.model.named_parameters()})
            self.buffers[rank] = registered_buffers(self.model)
        gradients = {name: average([grads[name] for grads in by_rank]) for name in by_rank[0]}
        for name, parameter in self.model.named_parameters():
            parameter.grad = gradients[name]
        self.optimizer.step()
        return ReferenceStep(losses, gradients, by_rank[self.rank])


@contextmanager
def _noting_order(model: nn.Module, order: dict[str, int]) -> Iterator[None]:
    """Inside the block, record the order in which modules, and their parameters, are first used."""

    names = {module: prefix for prefix, module in model.named_modules()}

    def note(module: nn.Module, inputs: object = None) -> None:
        for name, _ in module.named_parameters(names[module], recurse=module is model and inputs is None):
            order.setdefault(name, len(order))

    handles = [module.register_forward_pre_hook(note) for module in names] if not order else []
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        note(model)  # parameters of modules that were not called come last


def average(gradients: list[Tensor | None]) -> Tensor | None:
    """Return the mean over ranks, where a missing gradient counts as zero; None if all are missing."""
    present = [gradient for gradient in gradients if gradient is not None]
    if not present:
        return None
    # Summed in at least float32, as shardwise reduces: 16-bit sums would hide the differences.
    wide = torch.promote_types(present[0].dtype, torch.float32)
    total = present[0].to(wide, copy=True)
    for gradient in present[1:]:
        total += gradient.to(wide)
    return total.div_(len(gradients)).to(present[0].dtype)


def registered_buffers(model: nn.Module) -> Buffers:
    """Return every buffer by FQN, not copied."""
    return {
        f"{prefix}.{name}".lstrip("."): buffer
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
    }


Tensors = Mapping[str, Tensor | None]


@dataclass(slots=True)
class RunComparison:
    """The sharded run and the single-process run, and this rank's differences."""

    reference: ReferenceRun
    model: nn.Module
    optimizer: Optimizer
    train: Callable[[int], float]
    """Runs forward and backward of a step; returns the loss of this rank's batch."""
    tolerance: Tolerance
    mesh: DeviceMesh
    worst: dict[Quantity, Deviation] = field(default_factory=dict)
    first: Difference | None = None
    losses: list[float] = field(default_factory=list)
    reference_losses: list[float] = field(default_factory=list)
    slack: dict[str, Tensor] = field(default_factory=dict)
    """Allowed difference of each element after the optimizer steps so far."""
    drift: float = 0.0
    """Difference of a parameter due to rounding in the optimizer."""

    def compare_start(self) -> None:
        """Compare weights and ties before the first step."""
        theirs = dict(self.reference.model.named_parameters())
        self._compare("weight", 0, self._parameters(), theirs)
        tied, ours, others = ties(self.reference.model), ties(self.model), names_elsewhere(self.model)
        here = {name: tuple(each for each in tied[name] if each not in others) for name in tied if name not in others}
        wrong = [name for name, names in here.items() if names != ours.get(name, (name,))]
        broken = {name: Gap(math.inf, math.inf, None, None) for name in wrong}
        self._judge("tie", 0, broken, len(tied))

    def step(self, step: int) -> None:
        """One step of both runs. Collective."""
        before = {name: p.detach().clone() for name, p in self.reference.model.named_parameters()}
        expected = self.reference.step(step)
        self.losses.append(self.train(step))
        self.reference_losses.append(sum(expected.losses) / len(expected.losses))
        ours, theirs = torch.tensor([self.losses[-1], expected.losses[self.reference.rank]], dtype=torch.float64)
        scale = max(abs(value) for value in expected.losses)
        self._judge("loss", step + 1, {"": measure(ours, theirs, self.tolerance.at(step + 1), floor=scale)}, 1)
        self._compare_gradients(expected, before, step + 1)
        self.optimizer.step()
        trained = dict(self.reference.model.named_parameters())
        gaps = self._compare("parameter", step + 1, self._parameters(), trained, mistaken=before)
        self.drift = max([self.drift, *(gap.furthest for gap in gaps.values() if gap.within)])
        buffers = self.reference.buffers[self.reference.rank]
        self._compare("buffer", step + 1, registered_buffers(self.model), buffers)
        self.optimizer.zero_grad(set_to_none=True)

    def _compare_gradients(self, expected: ReferenceStep, before: dict[str, Tensor], step: int) -> None:
        """Compare gradients, and update the allowed difference of parameters after the optimizer step."""
        ours = {name: parameter.grad for name, parameter in self._parameters().items()}
        floor = criteria.GRADIENT_FLOOR * max(map(criteria.largest, expected.gradients.values()), default=0.0)
        mistaken = expected.own_gradients
        self._compare("gradient", step, ours, expected.gradients, floor=floor, mistaken=mistaken)
        changes = (criteria.largest(p.detach() - before[name]) for name, p in self.reference.model.named_parameters())
        update = max(changes, default=0.0)
        for name, theirs in expected.gradients.items():
            mine, part = own_part(ours.get(name), theirs)
            if mine is not None and part is not None and mine.shape == part.shape:
                self.slack[name] = self.slack.get(name, 0.0) + criteria.step_slack(mine, part, update)

    def _compare(
        self,
        quantity: Quantity,
        step: int,
        ours: Tensors,
        theirs: Tensors,
        *,
        floor: float = 0.0,
        mistaken: Tensors | None = None,
    ) -> dict[str, Gap]:
        """Compare this rank's part of every pair, relative to the full tensor.

        `mistaken` are the values that the usual mistake would give in the sharded run.
        """
        gaps, slack = {}, self.slack if quantity == "parameter" else {}
        # Running statistics depend on the parameters, so they may deviate as much.
        usual_slack = torch.tensor(self.drift) if quantity == "buffer" else None
        others = names_elsewhere(self.model)
        for name, value in theirs.items():
            if name in others:
                continue
            scale = max(floor, criteria.largest(value))
            mine, part = own_part(ours.get(name), value)
            gaps[name] = measure(mine, part, self.tolerance.at(step), floor=scale, slack=slack.get(name, usual_slack))
        wrong = [name for name, gap in gaps.items() if not gap.within]
        usual = mistaken is not None and all(
            measure(*own_part(ours[name], mistaken[name]), 1e-6).within for name in wrong
        )
        self._judge(quantity, step, gaps, len(theirs), usual_mistake=usual)
        return gaps

    def _judge(
        self,
        quantity: Quantity,
        step: int,
        gaps: dict[str, Gap],
        num_compared: int,
        *,
        usual_mistake: bool = False,
    ) -> None:
        """Record the largest deviation, and the first difference: by time, then in the order of forward."""
        order, fields = self.reference.parameter_order, ("sharded", "reference", "relative", "within")
        same = {"quantity": quantity, "step": step, "rank": self.reference.rank}
        deviations = [
            Deviation(name=name, **same, **{field: getattr(gaps[name], field) for field in fields})
            for name in sorted(gaps, key=lambda name: order.get(name, 0))
        ]
        ranked = [*filter(None, [self.worst.get(quantity)]), *deviations]
        if ranked:
            self.worst[quantity] = max(ranked, key=lambda deviation: deviation.relative)
        wrong = [deviation for deviation in deviations if not deviation.within]
        if wrong and self.first is None:
            cause = criteria.likely_cause(
                wrong,
                num_compared=num_compared,
                world_size=self.reference.task.num_ranks,
                tied=frozenset(ties(self.reference.model)),
                low_precision=self.tolerance.low_precision,
                usual_mistake=usual_mistake,
            )
            owner = wrong[0].name.rpartition(".")[0]
            kind = type(self.reference.model.get_submodule(owner)).__name__
            module = f"{owner or '(root)'} ({kind})" if wrong[0].name else ""
            self.first = Difference(deviation=wrong[0], module=module, num_others=len(wrong) - 1, cause=cause)

    def _parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters(remove_duplicate=False))


def own_part(ours: Tensor | None, theirs: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return this rank's part of a tensor, and the same part of the single-process tensor.

    Together the ranks compare all elements, including replicas, without communication.
    """
    if ours is None or theirs is None or ours.shape != theirs.shape:
        return ours, theirs
    mine = local_tensor(ours)
    return mine, local_part(theirs.detach(), ours).to(mine.device)


def ties(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Map each name of a tied parameter to all of its names."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: tuple(same) for same in names.values() if len(same) > 1 for name in same}


OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]


def parity(
    build_model: Callable[[], nn.Module],
    make_batch: Callable[..., Any],
    loss: Callable[..., Tensor] | None = None,
    config: ShardConfig | None = None,
    steps: int = 3,
    *,
    optimizer: OptimizerFactory | None = None,
    mesh: DeviceMesh | None = None,
    seed: int = 0,
    tolerance: float | None = None,
    device: torch.device | str | None = None,
) -> Parity:
    """Train a model sharded and in one process, and compare losses, gradients, parameters and buffers.

    The single process runs each rank's batch in turn, with that rank's buffers and random numbers, averages
    the gradients and steps the same optimizer. Batch statistics and losses over a batch are therefore per
    rank, as in training, and dropout may stay on. Other state of modules, outside parameters and buffers,
    is shared between the batches in the single process, and must not affect the results.

    On a mesh with a context or a pipeline axis a batch must be a mapping. Ranks run a part of each sequence, or
    micro-batches of rows: the loss must be the mean of the losses of such parts, and dropout must be off.

    Args:
        build_model: Called twice with the same seeds; may build on the meta device.
        make_batch: Takes parameters named `rank`, `step`, `seed`; or none; or one seed; or rank and step.
            A tuple or list is passed as the model's positional arguments, a mapping as keywords.
        loss: `loss(output)`, `loss(output, batch)` or `loss(model, batch)`; by default the output's own loss,
            else the mean of squares of the model's outputs.
        config: How to shard.
        steps: Optimizer steps.
        optimizer: Takes parameters, returns an optimizer; AdamW with lr=1e-3 by default.
        mesh: From `init_distributed`; by default all ranks of the process group.
        seed: Of weights and batches.
        tolerance: Allowed difference relative to a tensor's largest value. By default 1e-5 in float32 (1e-4
            after the first step), because ranks sum in another order and an adaptive optimizer magnifies the
            rounding; larger if the plan computes or stores in 16 bits.
        device: Device of both runs; the mesh's by default.

    Returns:
        The verdict, the same on every rank. A difference is a result, not an error.

    Raises:
        ConfigError: `build_model`, `make_batch` or `loss` cannot be used.
        ShardError: `build_model` returns different weights on different ranks.

    Ranks:
        Collective. Each rank also holds the full model, for the single-process run.
    """
    if steps < 1:
        raise ConfigError(
            f"steps is {steps}", where="parity(steps=...)", why="at least one step must run", fix="steps=1 or more"
        )
    make_batch, loss_of = bind_batch(make_batch), bind_loss(loss)
    mesh, config = mesh or default_mesh(), config or ShardConfig()
    ranks, rank = data_parallel_mesh(mesh), data_parallel_rank(mesh)
    target = torch.device(device or mesh.device_type)
    task = Task(make_batch=make_batch, loss=loss_of, seed=seed, num_ranks=ranks.size(), device=target)
    make_optimizer = optimizer or (lambda parameters: AdamW(parameters, lr=1e-3))
    with kept_random_state(target):
        unsharded, model = _build_twice(build_model, seed, target)
        model, train = _sharded(model, config, mesh, task, rank)
        state = sharded_state(model)
        assert state is not None
        _upcast(unsharded, state.plan)
        reference = ReferenceRun(unsharded, make_optimizer(unsharded.parameters()), task, rank)
        accuracy = criteria.tolerance_for(state.plan, tolerance)
        comparison = RunComparison(reference, model, make_optimizer(model.parameters()), train, accuracy, mesh)
        comparison.compare_start()
        for step in range(steps):
            comparison.step(step)
    return _verdict(comparison, state.plan)


def _sharded(
    model: nn.Module, config: ShardConfig, mesh: DeviceMesh, task: Task, rank: int
) -> tuple[nn.Module, Callable[[int], float]]:
    """Return the sharded model, or this rank's stages of it, and a function for forward and backward of a step.

    Ranks:
        Collective.
    """
    context, is_piped = sub_mesh(mesh, ("context",)), sub_mesh(mesh, ("pipeline",)) is not None

    def batch_of(step: int) -> Any:
        batch = task.batch_of(rank, step)
        if (context is not None or is_piped) and not isinstance(batch, Mapping):
            raise ConfigError(
                f"make_batch returns a {type(batch).__name__}",
                where="parity(make_batch=...)",
                why="sequences are split over the context axis, and rows over pipeline stages, by name",
                fix="return a dict of the model's keyword arguments",
            )
        return batch if context is None else split_sequences(batch, mesh=mesh, balanced=config.context.balanced)

    if is_piped:
        whole, first = _materialized(model, task.seed), batch_of(0)
        pipe = pipeline(whole, config, mesh=mesh, loss=task.loss, example_inputs=first)
        number = num_microbatches(config.pipeline, pipe.num_ranks, next(iter(first.values())).shape[0])
        model = pipe.model

        def backward(step: int) -> Tensor:
            return pipe.forward_and_backward(batch_of(step), 1 / number)[0]

    else:
        model = _materialized(shard(model, config, mesh=mesh), task.seed)

        def backward(step: int) -> Tensor:
            loss = task.loss_of(model, rank, step, batch_of(step))
            loss.backward()
            return loss.detach()

    def train(step: int) -> float:
        loss = backward(step).clone()
        if context is not None:
            dist.all_reduce(loss, group=context.get_group())
            loss /= context.size()
        return float(loss)

    return model, train


def _build_twice(build_model: Callable[[], nn.Module], seed: int, device: torch.device) -> tuple[nn.Module, nn.Module]:
    """Build the reference model and the model to shard from the same random numbers; ranks compare the weights.

    Ranks:
        Collective.
    """
    built = []
    for _ in range(2):
        seed_everything(seed)
        model = build_model()
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"build_model returned a {type(model).__name__}",
                where="parity(build_model=...)",
                why="it is called twice and must build a new model each time",
                fix="build_model=lambda: MyModel(...)",
            )
        built.append(model if _has_meta(model) else model.to(device))
    if built[0] is built[1]:
        raise ConfigError(
            "build_model returned the same module twice",
            where="parity(build_model=...)",
            why="one copy is sharded, the other is not",
            fix="build the model inside the function",
        )
    weights = [_checksums(model) for model in built]
    if weights[0] != weights[1]:
        raise ConfigError(
            "build_model returns different weights each time",
            where="parity(build_model=...)",
            why="only torch's, Python's and NumPy's generators are seeded before each call",
            fix="initialize weights with torch's generator, or load the same ones in both calls",
        )
    agree_on(weights[0], "the weights that build_model makes")
    return _materialized(built[0], seed), built[1]


def _materialized(model: nn.Module, seed: int) -> nn.Module:
    """Return the model with real tensors; meta tensors are initialized from the same seed in both runs."""
    if _has_meta(model):
        seed_everything(seed)
        materialize(model)
    return model


def _upcast(model: nn.Module, plan: Plan) -> None:
    """Upcast the parameters of the single process that the plan upcasts; this changes no value."""
    for planned in plan.parameters:
        if planned.upcast_from:
            parameter = model.get_parameter(planned.fqn)
            parameter.data = parameter.data.to(getattr(torch, planned.dtype))


def _has_meta(model: nn.Module) -> bool:
    return any(tensor.is_meta for tensors in (model.parameters(), model.buffers()) for tensor in tensors)


def _checksums(model: nn.Module) -> str:
    """Return a line for each parameter and buffer, with a fingerprint of its values."""
    return "\n".join(
        f"{name} {tuple(tensor.shape)} {tensor.dtype} {'meta' if tensor.is_meta else int(fingerprint(tensor))}"
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    )


def _verdict(comparison: RunComparison, plan: Plan) -> Parity:
    """Combine the results of all ranks. Collective."""
    seen = gather_over_mesh(comparison.mesh, (comparison.first, comparison.worst, comparison.losses))
    differences, worst_by_rank, losses = zip(*seen, strict=True)

    def moment(difference: Difference) -> tuple[int, int, int]:
        seen, order = difference.deviation, comparison.reference.parameter_order
        return seen.step, criteria.ORDER.index(seen.quantity), order.get(seen.name, 0)

    first = min(filter(None, differences), key=moment, default=None)
    worst = [[rank[quantity] for rank in worst_by_rank if quantity in rank] for quantity in criteria.ORDER]
    mesh = " x ".join(f"{name} {size}" for name, size in plan.axes) or "one rank"
    return Parity(
        equal=first is None,
        steps=len(comparison.reference_losses),
        world_size=comparison.reference.task.num_ranks,
        losses=tuple(sum(column) / len(column) for column in zip(*losses, strict=True)),
        reference_losses=tuple(comparison.reference_losses),
        tolerance=comparison.tolerance.relative,
        tolerance_reason=comparison.tolerance.reason,
        worst=tuple(max(found, key=lambda deviation: deviation.relative) for found in worst if found),
        first_difference=first,
        plan=f"{plan.model} in {len(plan.groups)} groups over {mesh}",
    )
