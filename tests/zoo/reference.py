"""The product's own reference models, small; also built on meta, as large ones are."""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.models import moe, multimodal
from shardwise.models.llama import Llama, LlamaConfig
from shardwise.models.transformer import Transformer, TransformerConfig
from tests.zoo.case import Case, normal, tokens

LLAMA = LlamaConfig(
    hidden_size=32,
    intermediate_size=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    vocab_size=96,
    max_sequence_length=32,
)
TIED_LLAMA = replace(LLAMA, tie_embeddings=True)


def tutorial() -> nn.Module:
    return Transformer(
        TransformerConfig(vocab_size=96, max_sequence_length=32, width=32, num_layers=3, num_heads=4, dropout=0.1)
    )


def llama() -> nn.Module:
    model = Llama(LLAMA)
    for module in model.modules():
        getattr(module, "reset_parameters", bool)()
    return model


def tied_llama_on_meta() -> nn.Module:
    with torch.device("meta"):
        return Llama(TIED_LLAMA)


def next_token_loss(logits: Tensor, batch: Tensor) -> Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def documents(seed: int) -> dict[str, Tensor]:
    """Two rows, each of two documents of other lengths."""
    first = torch.arange(8) < torch.tensor([[3], [6]])
    positions = torch.where(first, torch.arange(8), torch.arange(8) - torch.tensor([[3], [6]]))
    return {"input_ids": tokens(seed), "position_ids": positions, "document_ids": (~first).int()}


def experts() -> nn.Module:
    """Many experts for few tokens: on every rank some have none."""
    with torch.device("meta"):
        return moe.Moe(replace(moe.SHAPES["moe-debug"], hidden_size=32, vocab_size=96, num_experts=8))


def experts_loss(model: nn.Module, batch: Tensor) -> Tensor:
    loss, num_tokens = moe.next_token_and_balance(model, {"input_ids": batch[:, :-1], "labels": batch[:, 1:]})
    return loss / num_tokens


def few_tokens(seed: int) -> Tensor:
    return tokens(seed, batch=1, length=4)


def reads_sees_draws() -> nn.Module:
    return multimodal.Multimodal(multimodal.SHAPES["multimodal-debug"])


def multimodal_batch(seed: int) -> dict[str, Tensor]:
    pictures = normal(seed, 2, 2, 3, 16, 16)
    return {"input_ids": tokens(seed, length=6), "pixel_values": pictures[0], "target_pixels": pictures[1]}


def multimodal_samples(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Training, with a picture drawn before and after the forward, as when samples are logged."""
    model.generate_image(batch["input_ids"], batch["pixel_values"], num_steps=2)  # pyrefly: ignore[not-callable]
    loss = model(**batch)["loss"]
    model.generate_image(batch["input_ids"], num_steps=2)  # pyrefly: ignore[not-callable]
    return loss


CASES = [
    Case(name="packed_llama", build=llama, make_batch=documents),
    Case(name="reference_experts", build=experts, make_batch=few_tokens, loss=experts_loss, four_ranks=True),
    Case(name="reference_multimodal", build=reads_sees_draws, make_batch=multimodal_batch),
    Case(
        name="multimodal_samples",
        build=reads_sees_draws,
        make_batch=multimodal_batch,
        loss=multimodal_samples,
        runs_again=("**",),
        slow=True,
    ),
    Case(name="tutorial", build=tutorial, make_batch=tokens, loss=next_token_loss, four_ranks=True),
    Case(name="reference_llama", build=llama, make_batch=tokens, loss=next_token_loss),
    Case(name="meta_llama", build=tied_llama_on_meta, make_batch=tokens, loss=next_token_loss, four_ranks=True),
]
