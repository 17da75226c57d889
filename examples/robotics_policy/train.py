"""A robot policy in the manner of openpi: two experts with joint attention, and all that makes it hard.

- The policy walks both experts itself and calls each layer's parts, never a layer: hooks on layers would not
  fire.
- Weights are bfloat16 but norms are float32, and both are trained: FSDP2 refuses that mixture in one group.
- Observations arrive in a frozen dataclass.
- The optimizer is built before the model is sharded, with a group of its own for the norms.

None of it needs a hint: the plan finds the calls, splits groups by dtype and re-points the optimizer.

    torchrun --nproc-per-node 2 examples/robotics_policy/train.py
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss, scaled_dot_product_attention, silu

import shardwise as sw

ACTION_DIM, HORIZON, NUM_HEADS, HEAD_DIM = 7, 4, 4, 16


@dataclass(frozen=True)
class Observation:
    """What the robot sees and is told."""

    image_tokens: Tensor
    instruction: Tensor
    state: Tensor


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * self.weight).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, NUM_HEADS * HEAD_DIM, bias=False) for _ in range(3))
        self.output = nn.Linear(NUM_HEADS * HEAD_DIM, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(attend(self.query(x), self.key(x), self.value(x)))


def attend(*projected: Tensor) -> Tensor:
    """Attention over all heads of query, key and value."""
    heads = (x.unflatten(-1, (NUM_HEADS, HEAD_DIM)).transpose(1, 2) for x in projected)
    return scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """An ordinary layer, whose `forward` serves an expert on its own. The policy never calls it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.feed_forward_norm = Norm(width), Norm(width)
        self.attention, self.feed_forward = Attention(width), FeedForward(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Policy(nn.Module):
    """Flow matching: predicts the direction from noise to actions, given an observation."""

    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.see, self.read = nn.Linear(24, 64), nn.Embedding(96, 64)
        self.feel, self.act = nn.Linear(8, 32), nn.Linear(ACTION_DIM + 1, 32)
        self.language = nn.ModuleList(Layer(64) for _ in range(num_layers))
        self.action = nn.ModuleList(Layer(32) for _ in range(num_layers))
        self.norm, self.direction = Norm(32), nn.Linear(32, ACTION_DIM)

    def forward(self, observation: Observation, actions: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        noisy = torch.cat([time * noise + (1 - time) * actions, time.expand(-1, HORIZON, 1)], -1)
        prefix = torch.cat([self.see(observation.image_tokens), self.read(observation.instruction)], 1)
        suffix = torch.cat([self.feel(observation.state).unsqueeze(1), self.act(noisy)], 1)
        for layers in zip(self.language, self.action, strict=True):
            prefix, suffix = self.joint_layer(layers, [prefix, suffix])
        return mse_loss(self.direction(self.norm(suffix[:, 1:])).float(), (noise - actions).float())

    def joint_layer(self, layers: tuple[Layer, ...], streams: list[Tensor]) -> list[Tensor]:
        """Each stream is projected by its own expert; attention sees both."""
        normed = [layer.attention_norm(stream) for layer, stream in zip(layers, streams, strict=True)]
        projected = [
            torch.cat([getattr(layer.attention, name)(x) for layer, x in zip(layers, normed, strict=True)], 1)
            for name in ("query", "key", "value")
        ]
        parts = attend(*projected).split([stream.shape[1] for stream in streams], 1)
        results = []
        for layer, stream, part in zip(layers, streams, parts, strict=True):
            x = stream + layer.attention.output(part)
            results.append(x + layer.feed_forward(layer.feed_forward_norm(x)))
        return results


def build() -> Policy:
    """bfloat16 weights with float32 norms, as the published checkpoints are stored."""
    torch.manual_seed(0)
    policy = Policy().bfloat16()
    for module in policy.modules():
        if isinstance(module, Norm):
            module.float()
    return policy


def sample(generator: torch.Generator) -> tuple[Observation, Tensor]:
    """Actions that can be read off the state."""
    state = torch.randn(8, 8, generator=generator)
    seen = torch.randn(8, 6, 24, generator=generator)
    words = torch.randint(0, 96, (8, 4), generator=generator)
    return Observation(seen, words, state), state[:, None, :ACTION_DIM].expand(-1, HORIZON, -1)


def main(num_steps: int = 30) -> list[float]:
    """Train; return the losses of this rank."""
    mesh = sw.init_distributed()
    policy = build()
    norms = [module.weight for module in policy.modules() if isinstance(module, Norm)]
    others = [parameter for parameter in policy.parameters() if all(parameter is not norm for norm in norms)]
    groups = [{"params": others}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=2e-3, weight_decay=0.01)

    config = sw.ShardConfig(allow_16bit_storage=True)  # a choice of the policy's authors, not an accident
    plan = sw.plan(policy, config, mesh=mesh)
    sw.shard(policy, mesh=mesh, plan=plan, optimizers=optimizer)
    average = sw.EMA(policy, decay=0.9)
    if dist.get_rank() == 0:
        print(plan)

    generator = torch.Generator().manual_seed(dist.get_rank())
    losses: list[float] = []
    for step in range(num_steps):
        observation, actions = sample(generator)
        noise = torch.randn(actions.shape, generator=generator)
        time = torch.rand(8, 1, 1, generator=generator)
        batch = sw.cast_inputs((observation, actions, noise, time), torch.bfloat16, mesh.device_type)
        loss = policy(*batch)
        loss.backward()
        sw.clip_grad_norm_(policy.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        average.update()
        losses.append(loss.item())
        if dist.get_rank() == 0:
            print(f"step {step:2} loss {losses[-1]:.4f}")
    with average.swap(), torch.no_grad():
        policy(*batch)
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
