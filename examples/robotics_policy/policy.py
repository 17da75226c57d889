"""What the three scripts share: a small PI0, observations in a dataclass, pretrained weights, data."""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_model
from torch import Tensor, nn
from transformers import PI0Config, PI0ForConditionalGeneration

HORIZON, DIM, BATCH = 5, 6, 8


@dataclass(frozen=True)
class Observation:
    """What the robot sees, is told and feels."""

    images: Tensor
    tokens: Tensor
    state: Tensor


class Policy(nn.Module):
    """PI0 as openpi calls it: an observation and actions in, the loss of flow matching out."""

    def __init__(self) -> None:
        super().__init__()
        gemma = {"model_type": "gemma", "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}
        gemma |= {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 8}
        vision = {"model_type": "siglip_vision_model", "hidden_size": 32, "num_hidden_layers": 2}
        vision |= {"intermediate_size": 64, "num_attention_heads": 4, "image_size": 8, "patch_size": 4}
        tower = {"model_type": "paligemma", "image_token_id": 95, "projection_dim": 32}
        tower |= {"text_config": {**gemma, "vocab_size": 96}, "vision_config": {**vision, "vision_use_head": False}}
        config = PI0Config(
            vlm_config=tower, dit_config=gemma, chunk_size=HORIZON, max_state_dim=DIM, max_action_dim=DIM
        )
        self.pi0 = PI0ForConditionalGeneration(config)

    def forward(self, observation: Observation, actions: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        images = observation.images
        return self.pi0(
            state=observation.state,
            actions=actions,
            noise=noise,
            timestep=time,
            input_ids=observation.tokens,
            attention_mask=torch.ones_like(observation.tokens),
            pixel_values=images,
            pixel_attention_mask=torch.ones(images.shape[:2], dtype=torch.bool, device=images.device),
        ).loss


def build(seed: int, *, bfloat16: bool = False) -> Policy:
    """A policy with random weights; `bfloat16` stores all but the norms in it, as published checkpoints do."""
    torch.manual_seed(seed)
    policy = Policy()
    if bfloat16:
        policy.bfloat16()
        for name, module in policy.named_modules():
            if "norm" in name.rpartition(".")[2]:
                module.float()
    return policy


def write_pretrained(file: Path, *, bfloat16: bool = False) -> None:
    """The weights that one would download."""
    save_model(build(seed=1, bfloat16=bfloat16), str(file))


def sample(step: int, rank: int, num_ranks: int) -> tuple[Observation, Tensor, Tensor, Tensor]:
    """This rank's part of the batch of a step: actions that can be read off the state."""
    generator = torch.Generator().manual_seed(step % 2)  # a small data set
    state = torch.randn(BATCH, DIM, generator=generator)
    images = torch.randn(BATCH, 1, 3, 8, 8, generator=generator)
    tokens = torch.randint(0, 90, (BATCH, 8), generator=generator)
    tokens[:, :4] = 95  # where the image's patches go
    noise = torch.randn(BATCH, HORIZON, DIM, generator=generator)
    time = torch.rand(BATCH, generator=generator)
    part = slice(rank * BATCH // num_ranks, (rank + 1) * BATCH // num_ranks)
    observation = Observation(images[part], tokens[part], state[part])
    return observation, state[part, None].expand(-1, HORIZON, -1), noise[part], time[part]
