"""Small decoder-only models and a training loop, to compare parallel runs with one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.models.llama import Llama, LlamaConfig
from shardwise.models.moe import Moe, MoeConfig

LENGTH, VOCAB = 32, 96
_SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "num_kv_heads": 2, "vocab_size": VOCAB,
    "max_sequence_length": 64, "num_layers": 4,
}  # fmt: skip


_DEEPSEEK: dict[str, Any] = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 2, "topk_group": 1,
    "n_shared_experts": 1, "first_k_dense_replace": 2, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4, "v_head_dim": 8, "num_key_value_heads": 4, "head_dim": 4,
}  # fmt: skip


def _transformers(name: str, **options: Any) -> nn.Module:
    import transformers

    sizes = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCAB, "max_position_embeddings": 64, "use_cache": False,
    }  # fmt: skip
    config = getattr(transformers, f"{name}Config")(**sizes | options)
    return getattr(transformers, f"{name}ForCausalLM")(config)


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: Llama(LlamaConfig(**_SIZES)),
    "tied": lambda: Llama(LlamaConfig(**_SIZES, tie_embeddings=True)),
    "moe": lambda: Moe(MoeConfig(**_SIZES, num_experts=4)),
    "hf_llama": lambda: _transformers("Llama"),
    "hf_qwen3": lambda: _transformers("Qwen3"),
    "hf_mixtral": lambda: _transformers("Mixtral", num_local_experts=4),
    "hf_deepseek": lambda: _transformers("DeepseekV3", **_DEEPSEEK),
    "hf_mistral": lambda: _transformers("Mistral", sliding_window=12),
}


def build(name: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return BUILDERS[name]()


def make_batch(step: int, num_rows: int, *, documents: str = "") -> dict[str, Tensor]:
    """Tokens and their next tokens, some of which do not count; `documents` is "ids" or "positions"."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(1, VOCAB, (num_rows, LENGTH + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
    batch = {"input_ids": tokens[:, :-1].contiguous(), "labels": labels}
    if documents:
        starts = torch.rand(num_rows, LENGTH, generator=generator) < 0.15
        starts[:, 0] = True
        ids = starts.cumsum(1) - 1
        places = torch.arange(LENGTH).expand(num_rows, -1)
        batch["position_ids"] = places - torch.where(starts, places, 0).cummax(1).values
        if documents == "ids":
            batch["document_ids"] = ids
    return batch


def summed_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    output = model(**inputs)
    logits = output if isinstance(output, Tensor) else output.logits
    labels = batch["labels"]
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction="sum")


def num_tokens(batch: Mapping[str, Tensor]) -> Tensor:
    return (batch["labels"] != -100).sum()


def train_alone(
    name: str, batches: list[dict[str, Tensor]], *, max_norm: float = 1.0
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, gradient norms and final parameters of one process on whole batches."""
    model = build(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    losses, norms = [], []
    for batch in batches:
        loss = summed_loss(model, batch) / num_tokens(batch)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, {name: parameter.detach() for name, parameter in model.named_parameters()}
