"""One stage of a pipeline: stand-ins for modules of other stages, and the stage's forward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from shardwise.models.nested_tensors import change_tensors, find_tensors
from shardwise.planning.stages import StagePlan, not_a_sequence
from shardwise.sharding.blocks import ReplacedForward

Loss = Callable[[nn.Module, Any], Any]
"""Function of the model and a micro-batch; returns the loss summed over its tokens, or a pair with their number."""


@dataclass(slots=True)
class Passing:
    """Tensors passed between stages: hidden states and other outputs of blocks."""

    block_output: Any = None
    """Output of a block with meta tensors; hidden states come first."""
    unit_outputs: dict[str, Any] = field(default_factory=dict)
    """Outputs of the modules before the blocks, on meta."""
    hidden: Tensor | None = None
    """Hidden states received for the running micro-batch."""
    extras: dict[str, list[Tensor]] = field(default_factory=dict)
    """By block: tensors returned in addition to hidden states, such as a router's loss."""

    def shapes(self) -> list[Tensor]:
        """Return the meta tensors of a block's output."""
        return find_tensors(self.block_output)

    def returned(self, block: str) -> Any:
        """Return the output of a block of an earlier stage."""
        assert self.hidden is not None
        tensors = iter([self.hidden, *self.extras[block]])
        return change_tensors(self.block_output, lambda _: next(tensors))

    def _later_block(self, name: str) -> NoReturn:
        """End the forward of this stage at the first block of a later stage."""
        raise StageEnd(name)

    def _absent_unit(self, name: str) -> Any:
        """Return a placeholder for the output of an embedding, norm or head of another stage.

        Before the blocks these are zeros of the right shape, which use no memory and are ignored: the blocks of
        earlier stages return the received tensors.
        """
        if name not in self.unit_outputs:
            raise not_a_sequence(name, "runs on a stage that does not hold it")
        hidden = self.hidden
        assert hidden is not None
        zero, usual = hidden.new_zeros(()), self.shapes()[0].shape

        def zeros(tensor: Tensor) -> Tensor:
            is_like_hidden = tensor.shape[:2] == usual[:2]  # stages are traced with fewer rows and tokens
            shape = (*hidden.shape[:2], *tensor.shape[2:]) if is_like_hidden else tensor.shape
            return zero.to(tensor.dtype).expand(shape)

        return change_tensors(self.unit_outputs[name], zeros)


class StageEnd(Exception):
    """Raised after the last block of the stage."""


class StandIn(nn.Module):
    """Placeholder for a module of another stage.

    Args:
        name: Name of the module.
        returns: Function of the name that returns the output of the placeholder.
        module: The module; its plain attributes are copied, except a replaced forward.
    """

    def __init__(self, name: str, returns: Callable[[str], Any], module: nn.Module | None = None) -> None:
        super().__init__()
        attributes = {} if module is None else vars(module)
        vars(self).update({k: value for k, value in attributes.items() if not k.startswith("_") and k != "forward"})
        self.name, self.returns = name, returns

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the placeholder output."""
        return self.returns(self.name)


def make_stand_ins(
    model: nn.Module, stage: StagePlan, blocks: list[str], units: list[str], passing: Passing
) -> dict[str, nn.Module]:
    """Return placeholders for the modules of other stages, by name."""
    stand_ins: dict[str, nn.Module] = {}
    first = blocks.index(stage.blocks[0])
    for index, name in enumerate(blocks):
        if name not in stage.blocks:
            returns = passing.returned if index < first else passing._later_block
            stand_ins[name] = StandIn(name, returns, model.get_submodule(name))
    kept = [model.get_submodule(name) for name in (*stage.blocks, *stage.units)]
    held = {id(parameter) for module in kept for parameter in module.parameters()}
    for name in units:
        if name not in stage.units:
            stand_ins[name] = stand_in = StandIn(name, passing._absent_unit)
            for key, parameter in model.get_submodule(name).named_parameters(recurse=False):
                if id(parameter) in held:  # tied to a parameter of this stage: keep its first name
                    stand_in.register_parameter(key, parameter)
    return stand_ins


def copy_with(model: nn.Module, modules: Mapping[str, nn.Module]) -> nn.Module:
    """Return a copy of the model with these modules replaced."""
    return copy.deepcopy(model, {id(model.get_submodule(name)): module for name, module in modules.items()})


class StageForward(ReplacedForward):
    """A stage's forward, from received tensors to sent tensors or the loss.

    Args:
        model: The stage's part of the model, sharded.
        stage: Modules of the stage.
        passing: Passed tensors, shared with the stand-ins in the model.
        loss: Called with the model and the micro-batch on every stage; except on the last, ends after the last block.
    """

    def __init__(self, model: nn.Module, stage: StagePlan, passing: Passing, loss: Loss, blocks: list[str]) -> None:
        super().__init__(model.forward)
        self.model, self.stage, self.passing, self.loss = model, stage, passing, loss
        self.blocks = blocks
        """All blocks of the model up to the last one of this stage."""
        self.scale: Tensor | float = 1.0
        self.num_tokens: list[Tensor] = []
        """Number of tokens of each micro-batch, if the loss returns it."""
        self._is_running = False
        self._outputs: dict[str, list[Tensor]] = {}
        for name in stage.blocks:
            model.get_submodule(name).register_forward_hook(self._note(name))

    def _note(self, name: str) -> Callable[..., None]:
        def note(block: nn.Module, args: Any, output: Any) -> None:
            if self._is_running:
                self._outputs[name] = find_tensors(output)

        return note

    def __call__(self, *received: Tensor, **batch: Any) -> Any:
        """Run the stage; the model is called as without a pipeline."""
        if self._is_running:
            return self.__wrapped__(*received, **batch)
        self._receive(received)
        self._is_running = True
        try:
            loss = self.loss(self.model, batch)
        except StageEnd:
            return self._sent()
        finally:
            self._is_running, self.passing.hidden, self._outputs = False, None, {}
        loss, num_tokens = loss if isinstance(loss, tuple) else (loss, torch.zeros(()))
        self.num_tokens.append(torch.as_tensor(num_tokens))
        return loss * self.scale

    def _receive(self, received: tuple[Tensor, ...]) -> None:
        earlier = self.blocks[: -len(self.stage.blocks)]
        if earlier:
            self.passing.hidden, *extras = received
            num_extras = len(extras) // len(earlier)
            parts = [extras[at * num_extras : (at + 1) * num_extras] for at in range(len(earlier))]
            self.passing.extras = dict(zip(earlier, parts, strict=True))

    def _sent(self) -> tuple[Tensor, ...]:
        """Return hidden states of the last block, and the other outputs of all blocks so far."""
        extras = self.passing.extras | {name: tensors[1:] for name, tensors in self._outputs.items()}
        hidden = self._outputs[self.stage.blocks[-1]][0]
        shape = self.passing.shapes()[0] if self.passing.block_output is not None else hidden
        sent = [hidden.to(shape.dtype), *(tensor for name in self.blocks for tensor in extras[name])]
        return tuple(tensor.contiguous() for tensor in sent)
