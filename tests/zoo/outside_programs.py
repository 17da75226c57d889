"""Programs that use the parameters of a model outside of it: in losses, averages, initialisers, by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.programs import STEPS, WIDTH, Block, Rows, Shard, Stack, batch, program, sgd, train


@program
def momentum_encoder_between_forward_and_backward(shard: Shard, rows: Rows) -> Any:
    """As MoCo's, which updates the keys' encoder after the queries' forward."""
    queries, keys = shard(Stack()), shard(Stack())
    keys.requires_grad_(False)

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        out = model(x)
        with torch.no_grad():
            for slow, fast in zip(keys.parameters(), queries.parameters(), strict=True):
                slow.data = slow.data * 0.9 + fast.data * 0.1
            for slow, fast in zip(keys.parameters(), queries.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
        return (out - keys(x)).square().mean()

    return train(queries, rows, loss_of), keys


@program
def gradients_cleared_between_forward_and_backward(shard: Shard, rows: Rows) -> Any:
    model = shard(Stack())
    optimizer = sgd(model)
    for step in range(2 * STEPS):
        loss = model(rows(batch(step))).square().mean()
        for parameter in model.parameters():
            if step < STEPS:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()
        loss.backward()
        optimizer.step()
    return model


class Weighted(Stack):
    """Two outputs, and the weights of their losses as parameters: a vector of the root and one of a block, scalars."""

    def __init__(self) -> None:
        super().__init__()
        self.of_root, self.scalar = nn.Parameter(torch.tensor([0.1, 0.2])), nn.Parameter(torch.tensor(0.3))
        self.blocks[1].of_block = nn.Parameter(torch.tensor([0.3, 0.4]))


@program
def weights_of_losses(shard: Shard, rows: Rows) -> Any:
    def loss_of(model: Any, x: Tensor) -> Tensor:
        out = model(x)
        losses = [out.square().mean(), (out - 1).abs().mean()]
        weights = [*zip(model.of_root, losses, strict=True), *zip(model.blocks[1].of_block, losses, strict=True)]
        total = sum(torch.exp(-weight) * loss + weight for weight, loss in weights)
        return total + (model.scalar * out).sum(1).square().mean()

    return train(shard(Weighted()), rows, loss_of)


@program
def weights_of_losses_read_before(shard: Shard, rows: Rows) -> Any:
    def loss_of(model: Any, x: Tensor) -> Tensor:
        weight = model.of_root[0].exp()
        return weight * model(x).square().mean()

    return train(shard(Weighted()), rows, loss_of)


@program
def matrices_in_losses(shard: Shard, rows: Rows) -> Any:
    """Products with activations, an identity, a class index; a penalty weighed by this batch's loss."""

    def loss_of(model: Any, x: Tensor) -> Tensor:
        out = model(x)
        logits = (
            F.linear(F.normalize(out), F.normalize(model.out.weight)) + out @ model.blocks[0].down.weight[:, :WIDTH]
        )
        chosen = (out - model.blocks[2].up.weight[torch.arange(len(x)) % 2]).square().mean()
        squares = [block.up.weight.T @ block.up.weight - torch.eye(WIDTH) for block in model.blocks]
        loss = logits.square().mean() + chosen
        return loss + 0.01 * loss.detach() * sum(square.square().sum() for square in squares)

    return train(shard(Stack()), rows, loss_of)


@program
def parameter_after_a_recorded_gradient(shard: Shard, rows: Rows) -> Any:
    """As an inverse problem has it: a coefficient of the equation is a parameter."""

    def loss_of(model: Any, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return (slope[:, 1] - model.scalar * slope[:, 0] - model.of_root[1]).square().mean()

    return train(shard(Weighted()), rows, loss_of)


@program
def optimizer_after_a_forward(shard: Shard, rows: Rows) -> Any:
    model = shard(Stack())
    out = model(rows(batch(9)))
    return train(model, rows, lambda model, x: model(x).square().mean() + 0 * out.mean().detach())


@program
def weights_written_between_forwards(shard: Shard, rows: Rows) -> Any:
    model = shard(Stack())
    halved = {name: value * 0.5 for name, value in model.state_dict().items()}

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        first = model(x).mean().detach()
        with torch.no_grad():
            torch._foreach_mul_([*model.parameters()], 0.9)
        second = model(x).mean().detach()
        if bool(x.shape[0]):
            model.load_state_dict({name: halved[name] + 0.5 * value for name, value in model.state_dict().items()})
        return model(x).square().mean() * (1 + 0 * (first + second))

    return train(model, rows, loss_of)


@program
def norm_of_gradients_by_item(shard: Shard, rows: Rows) -> Any:
    model = shard(Stack())
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(rows(batch(step))).square().mean().backward()
        norm = sum(p.grad.data.norm(2).item() ** 2 for p in model.parameters() if p.grad is not None) ** 0.5
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.data.mul_(min(1.0, 0.01 / norm))
        optimizer.step()
    return model


@program
def initialised_after_sharding(shard: Shard, rows: Rows) -> Any:
    model = shard(Stack())
    torch.manual_seed(3)
    nn.init.trunc_normal_(model.inp.weight, std=0.1)
    nn.init.eye_(model.out.weight)
    nn.init.orthogonal_(model.blocks[0].up.weight)
    nn.init.kaiming_uniform_(model.blocks[0].down.weight)
    model.blocks[1].up.reset_parameters()
    with torch.no_grad():
        for parameter in model.blocks[2].parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1 + torch.rand_like(parameter) * 0.1)
            parameter[parameter > 0.2] = 0.2
    return train(model, rows)


@program
def optimizers_that_trace_stage_whole_matrices(shard: Shard, rows: Rows) -> Any:
    model = shard(Stack())
    optimizers = [torch.optim.Adafactor(model.blocks[0].parameters()), torch.optim.Rprop(model.blocks[1].parameters())]
    for step in range(STEPS):
        model(rows(batch(step))).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model


@program
def backward_inside_forward(shard: Shard, rows: Rows) -> Any:
    class Local(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x.detach())
                self.out(x).square().mean().backward()
            return x

    model = shard(Local())
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(rows(batch(step)))
        optimizer.step()
    return model


@program
def modules_that_return_parameters(shard: Shard, rows: Rows) -> Any:
    """As learned queries and latents are kept: freed with their group, if they were not copied."""

    class Queries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(32, WIDTH))

        def forward(self, size: int) -> Tensor:
            return self.table[None, 3].expand(size, -1)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.blocks = Queries(), Queries(), nn.ModuleList([Block(), Block()])

        def forward(self, x: Tensor) -> Tensor:
            first = self.first(len(x))
            return self.blocks[1](self.blocks[0](x * first) * self.second(len(x)))

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = model(x)
        with torch.inference_mode():
            wanted = wanted + float(model(x).square().mean()) * 0
        return (model(x) - wanted * 0.5).square().mean()

    return train(shard(Model()), rows, loss_of)


@program
def rows_of_weights_in_losses(shard: Shard, rows: Rows) -> Any:
    def loss_of(model: Any, x: Tensor) -> Tensor:
        return model(x).square().mean() + (model.out.weight[2] * x).square().mean() + model.inp.weight[1:3].abs().sum()

    return train(shard(Stack()), rows, loss_of)


@program
def references_from_before_sharding(shard: Shard, rows: Rows) -> Any:
    """A list of parameters that is clipped, clamped and penalized; a closure and a hook that read weights."""
    whole = Stack()
    listed, weight, first = list(whole.parameters()), whole.blocks[0].down.weight, whole.inp.weight
    whole.blocks[1].register_forward_hook(lambda module, args, output: output + args[0] @ first)
    model = shard(whole)
    optimizer = sgd(model)
    for step in range(STEPS):
        x = rows(batch(step))
        loss = model(x).square().mean() + (x @ weight).square().mean() + sum(each.square().sum() for each in listed)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(listed, 0.1)
        optimizer.step()
        for parameter in listed:
            parameter.data.clamp_(-0.3, 0.3)
    return model
