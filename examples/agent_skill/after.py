"""The script of `before.py` put right by the skill `shardwise-fsdp2`: nothing is left for lint to find.

A small Transformer learns to add: "31+7=" is the prompt, "38." the answer, and only answers count. The losses do not
depend on the number of ranks. Stop it anywhere and start it again: it resumes, and ends as if never stopped.

    torchrun --nproc-per-node 2 examples/agent_skill/after.py
"""

import argparse
import itertools
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import shardwise as sw

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


def batches(start: int, end: int) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's batches of the steps from `start` to `end`; epoch and position follow from the step."""
    data = Sums(512)
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, BATCH_SIZE // dist.get_world_size(), sampler=sampler, collate_fn=collate, drop_last=True)
    for epoch in itertools.count(start // len(loader)):
        sampler.set_epoch(epoch)
        done = max(start - epoch * len(loader), 0)
        yield from itertools.islice(loader, done, end - epoch * len(loader))
        if end <= (epoch + 1) * len(loader):
            return


def main(num_steps: int = 60, folder: str = "runs/sums") -> list[float]:
    """Train, from the last checkpoint in `folder` where there is one; return the losses of the steps taken."""
    mesh = sw.init_distributed()
    torch.manual_seed(0)  # the same weights on every rank
    with torch.device("meta"):
        model = Model()
    sw.shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
    is_first = dist.get_rank() == 0
    losses: list[float] = []
    with sw.Checkpointer(folder, keep_last=2) as checkpointer:
        if checkpointer.latest() is None:
            start = 0
            sw.materialize(model)
        else:
            start = checkpointer.load(model=model, optimizers=optimizer, schedule=schedule)
            if is_first:
                print(f"resumed at step {start}", flush=True)
        for step, batch in enumerate(sw.lockstep(batches(start, num_steps)), start):
            tokens, targets = (part.to(mesh.device_type) for part in batch)
            logits = model(tokens).float()
            loss_sum = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PAD, reduction="sum")
            loss = sw.token_mean(loss_sum, (targets != PAD).sum(), mesh=mesh)
            loss.backward()
            norm = sw.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses.append(sw.mean_over_ranks(loss, mesh=mesh).item())  # of all tokens, the same on every rank
            if is_first:
                print(f"step {step:2} loss {losses[-1]!r} norm {norm.item():.3f}", flush=True)
            if (step + 1) % 5 == 0:
                checkpointer.save(step + 1, model=model, optimizers=optimizer, schedule=schedule)
    sw.save_weights(model, f"{folder}/weights-{num_steps}")
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--folder", default="runs/sums")
    arguments = parser.parse_args()
    main(arguments.steps, arguments.folder)
