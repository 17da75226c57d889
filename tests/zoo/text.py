"""Language models of transformers: decoders, an encoder-decoder, tied and shared ones."""

from typing import Any

import transformers
from torch import nn

from tests.zoo.case import Case, token_batch

hf: Any = transformers  # its configs take more than their annotations say

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def llama() -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES))


def gpt2() -> nn.Module:
    config = hf.GPT2Config(
        vocab_size=96, n_positions=32, n_embd=32, n_layer=3, n_head=4, bos_token_id=1, eos_token_id=2
    )
    return hf.GPT2LMHeadModel(config)


def t5() -> nn.Module:
    config = hf.T5Config(
        vocab_size=96,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )
    return hf.T5ForConditionalGeneration(config)


def albert() -> nn.Module:
    config = hf.AlbertConfig(
        vocab_size=96,
        embedding_size=16,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=32,
    )
    return hf.AlbertForMaskedLM(config)


def bert() -> nn.Module:
    config = hf.BertConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=32,
    )
    return hf.BertForMaskedLM(config)


def mixtral() -> nn.Module:
    return hf.MixtralForCausalLM(hf.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2))


CASES = [
    Case(name="llama", build=llama, make_batch=token_batch(), four_ranks=True),
    Case(name="gpt2", build=gpt2, make_batch=token_batch(), four_ranks=True),
    Case(name="t5", build=t5, make_batch=token_batch(), four_ranks=True),
    Case(name="bert", build=bert, make_batch=token_batch()),
    Case(
        name="albert",
        build=albert,
        make_batch=token_batch(),
        runs_again=("albert.encoder.albert_layer_groups.*",),  # one layer group, run num_hidden_layers times
        four_ranks=True,
    ),
    Case(name="mixtral", build=mixtral, make_batch=token_batch(), four_ranks=True),
]
