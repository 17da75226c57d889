"""The runs that parity() compares: one process and the sharded ranks, on the same batches."""

import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.errors import ConfigError
from shardwise.sharding.nested_tensors import cast_inputs, find_tensors

LossOf = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One training task, able to compute the loss of any rank and step on any copy of the model."""

    make_batch: Callable[[int, int, int], Any]
    """From `bind_batch`."""
    loss: LossOf
    """From `bind_loss`."""
    seed: int
    num_ranks: int
    device: torch.device

    def loss_of(self, model: nn.Module, rank: int, step: int) -> Tensor:
        """Loss of `rank`'s batch of `step`, drawing the same random numbers each time it is asked.

        Ranks:
            Collective when `model` is sharded, local otherwise.
        """
        unique = self.seed + 1 + step * self.num_ranks + rank
        seed_everything(unique)
        batch = self.make_batch(rank, step, unique)
        if self.device.type != "cpu":
            batch = cast_inputs(batch, device=self.device)
        seed_everything(unique)  # however much the batch drew, dropout starts from the same state
        loss = self.loss(model, batch)
        if not loss.requires_grad:
            raise ConfigError(
                "the loss depends on no trainable parameter",
                where=f"parity(), step {step + 1}, batch of rank {rank}",
                why="without a gradient there is nothing to compare",
                fix="return the loss with its graph: no .item(), no torch.no_grad(), not all frozen",
            )
        return loss


def seed_everything(seed: int) -> None:
    """Seed torch's generators and Python's."""
    torch.manual_seed(seed)
    random.seed(seed)


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Give the process its random state back afterwards."""
    python_state = random.getstate()
    with torch.random.fork_rng():
        yield
    random.setstate(python_state)


def bind_batch(make_batch: Callable[..., Any]) -> Callable[[int, int, int], Any]:
    """Turn any accepted form of `make_batch` into `(rank, step, seed) -> batch`.

    Accepted are the keywords `rank`, `step` and `seed` in any combination; nothing at all (the generators
    are seeded for it); one other parameter, the seed; or two, rank and step.
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
    match len(required):
        case 0:
            return lambda rank, step, seed: make_batch()
        case 1:
            return lambda rank, step, seed: make_batch(seed)
        case 2:
            return lambda rank, step, seed: make_batch(rank, step)
        case _:
            raise _wrong_signature("make_batch", required, "it takes nothing, a seed, or rank and step")


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
    # A named tuple is one argument with a type of its own, not a list of arguments.
    if isinstance(batch, (tuple, list)) and not hasattr(batch, "_fields"):
        return model(*batch)
    return model(batch)


def loss_of_output(output: Any) -> Tensor:
    """The loss a model computed itself (`.loss`, or its only scalar), or the mean of squares of what it returned."""
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, Tensor) and own.ndim == 0:
        return own
    parts = output if isinstance(output, (tuple, list)) else [output]
    scalars = [part for part in parts if isinstance(part, Tensor) and part.ndim == 0 and part.is_floating_point()]
    if len(scalars) == 1:  # the model's loss, alone or as in `return logits, loss`
        return scalars[0]
    squares = [tensor.float().square().mean() for tensor in floating_tensors(output)]
    if not squares:
        raise ConfigError(
            f"the model returned {type(output).__name__}, in which there is no floating-point tensor",
            where="parity(loss=None)",
            why="the default loss is the output's own loss, or the mean of squares of its tensors",
            fix="pass loss=lambda output, batch: ...",
        )
    return torch.stack(squares).sum()


def floating_tensors(value: Any) -> Iterator[Tensor]:
    """Every floating-point or complex tensor in nested containers and objects, in a fixed order."""
    for tensor in find_tensors(value, objects=-1):
        if tensor.is_floating_point() or tensor.is_complex():
            yield torch.view_as_real(tensor) if tensor.is_complex() else tensor


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


@dataclass(slots=True)
class ReferenceStep:
    """What one process saw in a step."""

    losses: list[float]
    """One a rank."""
    gradients: dict[str, Tensor | None]
    """Averaged over ranks; None where no rank has one."""
    own_gradients: dict[str, Tensor | None]
    """Before averaging, of the rank that asks."""


@dataclass(slots=True)
class ReferenceRun:
    """The unsharded model with its optimizer, and each rank's own buffers.

    Batch statistics are per rank, as they are in training; weights are shared.
    """

    model: nn.Module
    optimizer: Optimizer
    task: Task
    rank: int
    """The rank that runs this."""
    buffers: list[Buffers] = field(default_factory=list)
    parameter_order: dict[str, int] = field(default_factory=dict)
    """Parameter FQN to its place in the order of forward, known after the first step."""

    def step(self, step: int) -> ReferenceStep:
        """Run every rank's batch of `step`, average the gradients and let the optimizer step.

        Ranks:
            Local, whatever the number of ranks it stands for.
        """
        if not self.buffers:
            self.buffers = [clone_buffers(self.model) for _ in range(self.task.num_ranks)]
        losses: list[float] = []
        by_rank: list[dict[str, Tensor | None]] = []
        for rank in range(self.task.num_ranks):
            put_buffers(self.model, self.buffers[rank])
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
    """Within the block, note in which order modules are first called, and with them their parameters."""

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
        note(model)  # parameters that were never used through a module come after the others


def average(gradients: list[Tensor | None]) -> Tensor | None:
    """Mean over ranks, a rank without a gradient counting as zero; None when none has one."""
    present = [gradient for gradient in gradients if gradient is not None]
    if not present:
        return None
    # Summed in at least float32, as shardwise reduces: 16-bit sums would lose what is being compared.
    wide = torch.promote_types(present[0].dtype, torch.float32)
    total = present[0].to(wide, copy=True)
    for gradient in present[1:]:
        total += gradient.to(wide)
    return total.div_(len(gradients)).to(present[0].dtype)


def _owners(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    for prefix, module in model.named_modules():
        for name in module._buffers:
            yield (f"{prefix}.{name}" if prefix else name), module, name


def registered_buffers(model: nn.Module) -> Buffers:
    """Every buffer by FQN, as it stands: not a copy."""
    return {fqn: module._buffers[name] for fqn, module, name in _owners(model)}


def clone_buffers(model: nn.Module) -> Buffers:
    """A copy of every buffer; two names of one tensor stay one tensor."""
    copies: dict[int, Tensor] = {}
    return {
        fqn: None if buffer is None else copies.setdefault(id(buffer), buffer.clone())
        for fqn, buffer in registered_buffers(model).items()
    }


def put_buffers(model: nn.Module, buffers: Buffers) -> None:
    """Register `buffers` in place of the model's own."""
    for fqn, module, name in _owners(model):
        if fqn in buffers:
            module._buffers[name] = buffers[fqn]
