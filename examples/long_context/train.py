"""Sequences longer than one rank can hold: context parallelism for a transformers model.

Each sequence is divided over two ranks. Attention gathers the keys and values of both; everything else works on the
tokens of the rank. The model learns to repeat what it saw half a sequence ago, on the other rank.

    torchrun --nproc-per-node 2 examples/long_context/train.py
"""

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

import shardwise as sw

LENGTH, VOCAB = 64, 16


def main(num_steps: int = 60) -> list[float]:
    """Train; return the losses of this rank's tokens."""
    mesh = sw.init_distributed(sw.MeshConfig(shard=1, context=2))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    plan = sw.plan(model, mesh=mesh)
    sw.shard(model, mesh=mesh, plan=plan)
    if dist.get_rank() == 0:
        print(plan)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)  # the ranks of a context group get the same batch
    losses: list[float] = []
    for step in range(num_steps):
        half = torch.randint(0, VOCAB, (8, LENGTH // 2 + 1), generator=generator)
        tokens = torch.cat([half, half[:, 1:]], dim=1)
        whole = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:].clone()}
        whole["labels"][:, : LENGTH // 2] = -100  # the first half cannot be known
        batch = sw.split_sequences(whole, mesh=mesh)

        logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
        loss_sum = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
        loss = sw.token_mean(loss_sum, (batch["labels"] != -100).sum(), mesh=mesh)
        loss.backward()
        sw.clip_grad_norm_(model, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        mean = sw.mean_over_ranks(loss, mesh=mesh).item()
        if dist.get_rank() == 0:
            print(f"step {step:2} loss {mean:.4f}")
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
