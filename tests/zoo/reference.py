"""The product's own reference models, small; also built on meta, as large ones are."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.models.llama import Llama, LlamaConfig
from shardwise.models.transformer import Transformer, TransformerConfig
from tests.zoo.case import Case, tokens

LLAMA = LlamaConfig(
    hidden_size=32,
    intermediate_size=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    vocab_size=96,
    max_sequence_length=32,
)
TIED_LLAMA = LlamaConfig(
    hidden_size=32,
    intermediate_size=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    vocab_size=96,
    max_sequence_length=32,
    tie_embeddings=True,
)


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


CASES = [
    Case(name="tutorial", build=tutorial, make_batch=tokens, loss=next_token_loss, four_ranks=True),
    Case(name="reference_llama", build=llama, make_batch=tokens, loss=next_token_loss),
    Case(name="meta_llama", build=tied_llama_on_meta, make_batch=tokens, loss=next_token_loss, four_ranks=True),
]
