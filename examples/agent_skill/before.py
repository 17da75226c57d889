"""A training script for one GPU, changed by hand to run on several: twelve mistakes that people make with FSDP2.

A small Transformer learns to add: "31+7=" is the prompt, "38." the answer, and only answers count. Each mistake is
marked by the code of the lint rule that finds it. Most raise no error. `after.py` is the same script put right.

    shardwise lint examples/agent_skill/before.py
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy, pad
from torch.utils.data import DataLoader, Dataset, DistributedSampler

VOCABULARY = "0123456789+=."
PAD, MAX_LENGTH, BATCH_SIZE = len(VOCABULARY), 16, 32


class Sums(Dataset[tuple[Tensor, Tensor]]):
    """Prompts and answers as tokens, and the next token to predict for each; PAD where nothing is to be predicted."""

    def __init__(self, size: int) -> None:
        numbers = torch.randint(0, 3, (size, 2), generator=torch.Generator().manual_seed(0))
        self.pairs = [(7 ** int(a) + i % 11, 5 ** int(b) * (i % 17)) for i, (a, b) in enumerate(numbers)]

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        a, b = self.pairs[index]
        prompt = f"{a}+{b}="
        text = torch.tensor([VOCABULARY.index(letter) for letter in f"{prompt}{a + b}."])
        targets = text[1:].clone()
        targets[: len(prompt) - 1] = PAD
        return text[:-1], targets


def collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    inputs, targets = zip(*samples, strict=True)
    longest = max(len(one) for one in inputs)
    return tuple(torch.stack([pad(x, (0, longest - len(x)), value=PAD) for x in part]) for part in (inputs, targets))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, bias=False, batch_first=True)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device, dtype=x.dtype)
        y = self.attention_norm(x)
        x = x + self.attention(y, y, y, attn_mask=mask, is_causal=True, need_weights=False)[0]
        return x + self.feed_forward(self.norm(x))


class Model(nn.Module):
    def __init__(self, width: int = 64, num_blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(VOCABULARY) + 1, width)
        self.positions = nn.Embedding(MAX_LENGTH, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, len(VOCABULARY))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main(num_steps: int = 60, path: str = "sums.pt") -> None:
    dist.init_process_group("nccl")  # planted: SW235
    rank = dist.get_rank()
    with torch.device("meta"):
        model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # planted: SW201
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)  # planted: SW211
    fully_shard(model, mp_policy=policy)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)  # planted: SW203
    model.to_empty(device="cuda")  # planted: SW209
    resume = os.path.exists(path)
    if resume:
        model.load_state_dict(torch.load(path))  # planted: SW223

    data = Sums(512)
    loader = DataLoader(data, BATCH_SIZE, sampler=DistributedSampler(data), collate_fn=collate)
    for step, (tokens, targets) in zip(range(num_steps), loader, strict=False):
        logits = model.forward(tokens.cuda())  # planted: SW229
        loss = cross_entropy(logits.flatten(0, 1), targets.cuda().flatten(), ignore_index=PAD)  # planted: SW239
        model.zero_grad()  # planted: SW240
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f} norm {norm.item():.4f}")  # planted: SW233
            if step % 20 == 19:
                torch.save(model.state_dict(), path)  # planted: SW221
    if rank == 0:
        print(f"largest weight {model.head.weight.full_tensor().abs().max():.3f}")  # planted: SW222


if __name__ == "__main__":
    main()
