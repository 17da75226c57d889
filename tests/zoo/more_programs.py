"""More programs: calls that a plan cannot foresee, and gradients and optimizers used in other ways."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.zoo.programs import STEPS, WIDTH, Block, Rows, Shard, Stack, adam, batch, program, sgd, train


@program
def conditional_by_step(shard: Shard, rows: Rows) -> Any:
    class Branching(Stack):
        count = 0

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            x = self.blocks[self.count % 3](self.inp(x))
            return self.out(x)

    return train(shard(Branching()), rows)


@program
def early_exit(shard: Shard, rows: Rows) -> Any:
    class Exiting(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.inp(x)
            for block in self.blocks:
                x = block(x)
                if float(self.out.weight.detach().abs().mean()) > 0.01:
                    break
            return self.out(x)

    return train(shard(Exiting()), rows)


@program
def unused_experts(shard: Shard, rows: Rows) -> Any:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.experts = nn.Linear(WIDTH, 4), nn.ModuleList(Block() for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            weights, chosen = self.router(x).softmax(-1).max(-1)
            out = torch.zeros_like(x)
            for index, expert in enumerate(self.experts):
                if (mask := chosen == index).any():
                    out[mask] = expert(x[mask])
            return x + out * weights[:, None]

    return train(shard(Stack(Routed)), rows, optimizer=None)


@program
def recursion(shard: Shard, rows: Rows) -> Any:
    class Tree(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.leaf, self.join = Block(), nn.Linear(2 * WIDTH, WIDTH)

        def forward(self, x: Tensor, depth: int = 2) -> Tensor:
            if depth == 0:
                return self.leaf(x)
            return self.join(torch.cat([self(x * 0.5, depth - 1), self(x + 1, depth - 1)], -1))

    return train(shard(Tree()), rows)


@program
def shared_block(shard: Shard, rows: Rows) -> Any:
    class Universal(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.inp(x)
            for block in [*self.blocks, *self.blocks, self.blocks[0]]:
                x = block(x)
            return self.out(x)

    return train(shard(Universal()), rows)


@program
def cells_over_time(shard: Shard, rows: Rows) -> Any:
    class Cells(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.LSTMCell(WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH)
            self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            h = c = g = torch.zeros(len(x), WIDTH)
            for time in range(x.shape[1]):
                h, c = self.first(x[:, time], (h, c))
                g = self.second(h, g)
            return self.lstm(torch.stack([h, c, g], 1))[0]

    return train(shard(Cells()), rows, shape=(8, 3, WIDTH))


@program
def nested_dicts(shard: Shard, rows: Rows) -> Any:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            inner = {side: nn.ModuleDict({"a": Block(), "b": nn.ModuleList([Block(), Block()])}) for side in "lr"}
            self.parts, self.scale = nn.ModuleDict(inner), nn.ParameterDict({"l": torch.ones(1), "r": torch.ones(1)})

        def forward(self, x: Tensor) -> Tensor:
            for side, part in self.parts.items():
                x = part["b"][1](part["b"][0](part["a"](x))) * self.scale[side]
            return x

    return train(shard(Nested()), rows)


@program
def lazy_modules(shard: Shard, rows: Rows) -> Any:
    model = nn.Sequential(nn.LazyLinear(WIDTH), nn.Tanh(), Block(), nn.LazyLinear(WIDTH))
    model(batch(0))
    return train(shard(model), rows)


@program
def lazy_modules_not_yet_built(shard: Shard, rows: Rows) -> Any:
    return train(shard(nn.Sequential(nn.LazyLinear(WIDTH), nn.Tanh(), Block(), nn.LazyLinear(WIDTH))), rows)


@program
def recomputed_inside(shard: Shard, rows: Rows) -> Any:
    class Recomputing(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.inp(x)
            for index, block in enumerate(self.blocks):
                x = checkpoint(block, x, use_reentrant=index == 1)
            return checkpoint(self.out, x, use_reentrant=False)

    return train(shard(Recomputing()), rows)


@program
def recomputed_and_run_again(shard: Shard, rows: Rows) -> Any:
    class Again(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = checkpoint(self.blocks[0], self.inp(x), use_reentrant=True)
            x = checkpoint(self.blocks[0], self.blocks[1](x), use_reentrant=True)
            return self.out(self.blocks[0](x) + self.blocks[2](x))

    return train(shard(Again()), rows)


class SavesWeight(torch.autograd.Function):
    """Saves a parameter, computes with it again in backward, and has a gradient for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradients[0] @ weight, gradients[0].T @ x


@program
def custom_function_on_parameters(shard: Shard, rows: Rows) -> Any:
    class Custom(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(SavesWeight.apply(self.norm(x), self.up.weight).tanh())

    return train(shard(Stack(Custom)), rows)


@program
def gradient_penalty(shard: Shard, rows: Rows) -> Any:
    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        out = model(x)
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.square().mean() + (gradient.norm(dim=1) - 1).square().mean()

    return train(shard(Stack()), rows, loss_of)


@program
def adversarial_inputs(shard: Shard, rows: Rows) -> Any:
    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).square().mean(), x)
        return model((x + 0.1 * gradient.sign()).detach()).square().mean()

    return train(shard(Stack()), rows, loss_of)


@program
def inputs_only(shard: Shard, rows: Rows) -> Any:
    model = shard(Stack())
    model.requires_grad_(False)
    x = nn.Parameter(torch.zeros(WIDTH))
    optimizer = torch.optim.SGD([x], lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(step) + x).square().mean().backward()  # all rows: the parameter is no part of the model
        optimizer.step()
    holder = nn.Module()
    holder.x = x
    return model, holder


@program
def two_losses_retained(shard: Shard, rows: Rows) -> Any:
    model = shard(Stack())
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        out = model(rows(batch(step)))
        out.square().mean().backward(retain_graph=True)
        out.abs().mean().backward()
        optimizer.step()
    return model


@program
def two_heads_backward_in_turn(shard: Shard, rows: Rows) -> Any:
    class Heads(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x: Tensor) -> Any:
            h = super().forward(x)
            return [head(h) for head in self.heads]

    model = shard(Heads())
    optimizer = adam(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        first, second = model(rows(batch(step)))
        torch.autograd.backward([first.square().mean(), second.abs().mean()])
        optimizer.step()
    return model


@program
def several_optimizers(shard: Shard, rows: Rows) -> Any:
    model = shard(Stack())
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizers = [torch.optim.SGD(matrices, lr=0.1), torch.optim.Adam(vectors, lr=0.01)]
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(rows(batch(step))).square().mean().backward()
        for optimizer in optimizers[: 1 + step % 2]:
            optimizer.step()
    return model


@program
def lbfgs(shard: Shard, rows: Rows) -> Any:
    model = shard(Stack())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    for step in range(2):
        x = rows(batch(step))

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    return model


@program
def parameter_group_added(shard: Shard, rows: Rows) -> Any:
    model = shard(Stack())
    model.blocks[0].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(STEPS):
        if step == 1:
            model.blocks[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model.blocks[0].parameters()), "lr": 0.05})
        optimizer.zero_grad()
        model(rows(batch(step))).square().mean().backward()
        optimizer.step()
    return model


@program
def gradients_changed_by_hand(shard: Shard, rows: Rows) -> Any:
    model = shard(Stack())
    optimizer = sgd(model)
    for step in range(STEPS):
        for parameter in model.parameters():
            parameter.grad = None
        model(rows(batch(step))).square().mean().backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5).add_(parameter.detach(), alpha=0.01)
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.02)
        optimizer.step()
    return model


@program
def hooks_on_parameters(shard: Shard, rows: Rows) -> Any:
    model = shard(Stack())
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 0.5)
    return train(model, rows)


@program
def hooks_on_parameters_before(shard: Shard, rows: Rows) -> Any:
    model = Stack()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 0.5)
    return train(shard(model), rows)


@program
def masks_and_sums_from_hooks(shard: Shard, rows: Rows) -> Any:
    """A mask on the rows of a matrix, a norm that depends on all of a gradient, and two backwards a step."""
    model = Stack()
    mask = torch.arange(WIDTH)[:, None] % 2
    model.inp.weight.register_hook(lambda gradient: gradient * mask)
    model.blocks[1].up.weight.register_post_accumulate_grad_hook(lambda p: [None, p.grad.mul_(0.5)][0])
    model = shard(model)
    model.blocks[0].up.weight.register_hook(lambda gradient: gradient / (gradient.norm() + 1))
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(rows(batch(step))).square().mean().backward()
        model(rows(batch(step + 10))).square().mean().backward()
        optimizer.step()
    return model


@program
def attributes_of_parameters(shard: Shard, rows: Rows) -> Any:
    model = Stack()
    for name, parameter in model.named_parameters():
        parameter.rate = 0.1 if "norm" in name else 0.01
    model = shard(model)
    groups = [{"params": [p], "lr": p.rate} for p in model.parameters()]
    return train(model, rows, optimizer=torch.optim.SGD(groups, lr=0.0))


@program
def adaptive_weight(shard: Shard, rows: Rows) -> Any:
    """As VQGAN weighs its losses, by the gradients of its last layer."""

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        out = model(x)
        first, second = out.square().mean(), out.abs().mean()
        last = model.out.weight
        norms = [torch.autograd.grad(loss, last, retain_graph=True)[0].norm() for loss in (first, second)]
        return first + (norms[0] / (norms[1] + 1)).detach() * second

    return train(shard(Stack()), rows, loss_of)


@program
def regulariser_after_forward(shard: Shard, rows: Rows) -> Any:
    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean() + 0.01 * sum(p.square().sum() for p in model.parameters())

    return train(shard(Stack()), rows, loss_of)


@program
def regulariser_before_forward(shard: Shard, rows: Rows) -> Any:
    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        penalty = 0.01 * sum(p.abs().sum() for p in model.parameters())
        return model(x).square().mean() + penalty

    return train(shard(Stack()), rows, loss_of)


@program
def regulariser_of_norms(shard: Shard, rows: Rows) -> Any:
    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        out = model(x)
        norms = torch.stack([p.norm() for p in model.parameters()])
        return out.square().mean() + 0.01 * norms.sum()

    return train(shard(Stack()), rows, loss_of)


@program
def distance_to_start(shard: Shard, rows: Rows) -> Any:
    model = shard(Stack())
    start = {name: p.detach().clone() for name, p in model.named_parameters()}

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        near = sum((p - start[name]).square().sum() for name, p in model.named_parameters())
        return model(x).square().mean() + 0.1 * near

    return train(model, rows, loss_of)


@program
def gradients_by_parameters(shard: Shard, rows: Rows) -> Any:
    model = shard(Stack())
    for step in range(STEPS):
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(model(rows(batch(step))).square().mean(), parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.sub_(gradient, alpha=0.1)
    return model


@program
def functional_call(shard: Shard, rows: Rows) -> Any:
    model = shard(Stack())

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        return torch.func.functional_call(model, dict(model.named_parameters()), (x,)).square().mean()

    return train(model, rows, loss_of)


@program
def functional_call_inside(shard: Shard, rows: Rows) -> Any:
    class Inner(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.inp(x)
            for block in self.blocks:
                scaled = {name: p * 0.9 for name, p in block.named_parameters()}
                x = torch.func.functional_call(block, scaled, (x,))
            return self.out(x)

    return train(shard(Inner()), rows)


@program
def vmap_over_inputs(shard: Shard, rows: Rows) -> Any:
    class Mapped(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return self.out(torch.vmap(self.blocks[0])(self.inp(x)))

    return train(shard(Mapped()), rows)


@program
def vmap_outside(shard: Shard, rows: Rows) -> Any:
    return train(shard(Stack()), rows, lambda model, x: torch.vmap(model)(x).square().mean())


@program
def forward_mode(shard: Shard, rows: Rows) -> Any:
    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        out, slope, *_ = torch.func.jvp(model, (x,), (torch.ones_like(x),))
        return out.square().mean() + slope.square().mean()

    return train(shard(Stack()), rows, loss_of)


@program
def inner_gradient(shard: Shard, rows: Rows) -> Any:
    """Energy model: the output is the gradient of a scalar, as force fields have it."""

    class Force(Stack):
        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                energy = super().forward(x).sum()
                return torch.autograd.grad(energy, x, create_graph=True)[0]

    return train(shard(Force()), rows)


@program
def vectors_of_parameters(shard: Shard, rows: Rows) -> Any:
    model = shard(Stack())

    def shrink(step: int) -> None:
        vector = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters(vector * 0.9, model.parameters())

    return train(model, rows, after=shrink)


@program
def deep_copy(shard: Shard, rows: Rows) -> Any:
    model = train(shard(Stack()), rows)
    other = copy.deepcopy(model)
    return train(other, rows), model


@program
def modes_switched(shard: Shard, rows: Rows) -> Any:
    model = shard(Stack())
    optimizer = adam(model)
    for step in range(STEPS):
        model.eval()
        with torch.no_grad():
            wanted = model(rows(batch(step + 10)))
        model.train()
        with torch.inference_mode():
            model(rows(batch(step + 20)))
        optimizer.zero_grad()
        (model(rows(batch(step))) - wanted).square().mean().backward()
        optimizer.step()
    return model


@program
def steps_that_do_nothing(shard: Shard, rows: Rows) -> Any:
    """A forward without backward, a loss that is not finite and is left out, a step without gradients."""
    model = shard(Stack())
    optimizer = adam(model)
    for step in range(STEPS):
        out = model(rows(batch(step)))
        if step == 1:
            optimizer.zero_grad()
            continue
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()
    return model


@program
def gan_of_one_dict(shard: Shard, rows: Rows) -> Any:
    networks = shard(nn.ModuleDict({"generator": Stack(), "critic": Stack()}))
    generator, critic = networks["generator"], networks["critic"]
    of_generator, of_critic = adam(generator), adam(critic)
    for step in range(STEPS):
        noise, real = rows(batch(step)), rows(batch(step + 10))
        of_critic.zero_grad()
        (critic(real).mean() - critic(generator(noise).detach()).mean()).backward()
        of_critic.step()
        of_generator.zero_grad()
        critic.requires_grad_(False)
        critic(generator(noise)).mean().backward()
        critic.requires_grad_(True)
        of_generator.step()
    return networks


@program
def tied_heads(shard: Shard, rows: Rows) -> Any:
    class Tied(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.out.weight = self.inp.weight
            self.blocks[2].up.weight = self.blocks[0].up.weight

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(super().forward(x), self.inp.weight.T)

    return train(shard(Tied()), rows)
