"""Further encoders of transformers: each lays its blocks out in its own way."""

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.zoo.case import Case, token_batch, tokens

hf: Any = transformers  # its configs take more than their annotations say

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
}


def roberta() -> nn.Module:
    return hf.RobertaForMaskedLM(hf.RobertaConfig(**SIZES))


def distilbert() -> nn.Module:
    config = hf.DistilBertConfig(
        vocab_size=96, dim=32, hidden_dim=64, n_layers=2, n_heads=4, max_position_embeddings=32
    )
    return hf.DistilBertForMaskedLM(config)


def deberta() -> nn.Module:
    config = hf.DebertaV2Config(
        **SIZES,
        relative_attention=True,
        position_buckets=8,
        norm_rel_ebd="layer_norm",
        pos_att_type=["p2c", "c2p"],
    )
    return hf.DebertaV2ForMaskedLM(config)


def electra() -> nn.Module:
    return hf.ElectraForMaskedLM(hf.ElectraConfig(**SIZES, embedding_size=16))


def longformer() -> nn.Module:
    return hf.LongformerForMaskedLM(hf.LongformerConfig(**SIZES, attention_window=4))


def funnel() -> nn.Module:
    config = hf.FunnelConfig(
        vocab_size=96, block_sizes=[1, 1], num_decoder_layers=1, d_model=32, n_head=4, d_head=8, d_inner=64
    )
    return hf.FunnelForMaskedLM(config)


def xlnet() -> nn.Module:
    config = hf.XLNetConfig(vocab_size=96, d_model=32, n_layer=2, n_head=4, d_inner=64)
    return hf.XLNetLMHeadModel(config)


def perceiver() -> nn.Module:
    config = hf.PerceiverConfig(
        vocab_size=96,
        d_model=32,
        d_latents=32,
        num_latents=8,
        num_blocks=2,
        num_self_attends_per_block=2,
        num_self_attention_heads=4,
        num_cross_attention_heads=4,
        max_position_embeddings=16,
        qk_channels=32,
        v_channels=32,
    )
    return hf.PerceiverForMaskedLM(config)


def perceiver_batch(seed: int) -> dict[str, Tensor]:
    ids = tokens(seed, length=16)
    return {"inputs": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def next_sentence_batch(seed: int) -> dict[str, Any]:
    ids = tokens(seed)
    return {"input_ids": ids, "labels": ids.clone(), "next_sentence_label": torch.arange(ids.shape[0]) % 2}


def bert_pretraining() -> nn.Module:
    return hf.BertForPreTraining(hf.BertConfig(**SIZES))


CASES = [
    Case(name="roberta", build=roberta, make_batch=token_batch(), slow=True),
    Case(name="distilbert", build=distilbert, make_batch=token_batch(), slow=True),
    Case(name="deberta", build=deberta, make_batch=token_batch(), slow=True),
    Case(name="electra", build=electra, make_batch=token_batch(), slow=True),
    Case(name="longformer", build=longformer, make_batch=token_batch(), slow=True),
    Case(name="funnel", build=funnel, make_batch=token_batch(), slow=True),
    Case(name="xlnet", build=xlnet, make_batch=token_batch(), slow=True),
    Case(
        name="perceiver",
        build=perceiver,
        make_batch=perceiver_batch,
        runs_again=("perceiver.encoder.self_attends.*",),  # num_blocks passes over the same layers
        slow=True,
    ),
    Case(name="bert_pretraining", build=bert_pretraining, make_batch=next_sentence_batch, slow=True),
]
