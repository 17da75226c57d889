"""One process that stands for all ranks: it runs each rank's batch in turn and averages the gradients."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.comparing.calling import Task

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
class Reference:
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
            with self._watching_order():
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

    def _watching_order(self) -> "_CallOrder":
        return _CallOrder(self.model, self.parameter_order)


class _CallOrder:
    """While open, notes in which order modules are first called, and with them their parameters."""

    def __init__(self, model: nn.Module, order: dict[str, int]) -> None:
        self.model, self.order, self.handles = model, order, []

    def __enter__(self) -> None:
        if self.order:
            return
        for prefix, module in self.model.named_modules():
            own = [f"{prefix}.{name}" if prefix else name for name, _ in module.named_parameters(recurse=False)]
            if own:
                self.handles.append(module.register_forward_pre_hook(self._note(own)))

    def __exit__(self, *error: object) -> None:
        for handle in self.handles:
            handle.remove()
        for name, _ in self.model.named_parameters():  # never called through a module: after the others
            self.order.setdefault(name, len(self.order))

    def _note(self, names: list[str]) -> Callable[..., None]:
        def hook(*call: object) -> None:
            for name in names:
                self.order.setdefault(name, len(self.order))

        return hook


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
