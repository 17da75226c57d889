"""How `parity` calls what the user gives it: the batch maker, the model and the loss. No communication."""

import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ConfigError
from shardwise.sharding.precision import cast_inputs

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
    known = {"rank", "step", "seed"} & set(_parameters(make_batch))
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
    """The loss a model computed itself, or the mean of squares of everything floating-point it returned."""
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, Tensor) and own.ndim == 0:
        return own
    if isinstance(output, Tensor) and output.ndim == 0:
        return output
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
    if isinstance(value, Tensor):
        if value.is_complex():
            yield torch.view_as_real(value)
        elif value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from floating_tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from floating_tensors(item)
    elif hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type)):
        for item in vars(value).values():
            yield from floating_tensors(item)


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


def _required_parameters(function: Callable[..., Any], what: str) -> list[str]:
    if not callable(function):
        raise ConfigError(
            f"{what} is a {type(function).__name__}",
            where=f"parity({what}=...)",
            why="it is called for every rank and step",
            fix=f"pass a function: {what}=lambda ...: ...",
        )
    kinds = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    )
    return [
        name for name, p in _parameters(function).items() if p.kind in kinds and p.default is inspect.Parameter.empty
    ]


def _wrong_signature(what: str, names: list[str], rule: str) -> ConfigError:
    return ConfigError(
        f"{what} has parameters {', '.join(names)}",
        where=f"parity({what}=...)",
        why=rule,
        fix=f"wrap it: {what}=lambda {'seed' if what == 'make_batch' else 'output, batch'}: ...",
    )
