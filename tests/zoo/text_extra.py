"""Further language models of transformers: other attention, state-space layers, fused and routed experts."""

from typing import Any

import transformers
from torch import nn

from tests.zoo.case import Case, token_batch
from tests.zoo.text import SIZES

hf: Any = transformers  # its configs take more than their annotations say


def qwen2() -> nn.Module:
    return hf.Qwen2ForCausalLM(hf.Qwen2Config(**SIZES, tie_word_embeddings=True))


def qwen3() -> nn.Module:
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**SIZES, head_dim=8))


def gemma2() -> nn.Module:
    return hf.Gemma2ForCausalLM(hf.Gemma2Config(**SIZES, head_dim=8, query_pre_attn_scalar=8, sliding_window=4))


def phi3() -> nn.Module:
    return hf.Phi3ForCausalLM(hf.Phi3Config(**SIZES))


def opt() -> nn.Module:
    config = hf.OPTConfig(
        vocab_size=96,
        hidden_size=32,
        word_embed_proj_dim=16,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return hf.OPTForCausalLM(config)


def bloom() -> nn.Module:
    return hf.BloomForCausalLM(hf.BloomConfig(vocab_size=96, hidden_size=32, n_layer=2, n_head=4))


def falcon() -> nn.Module:
    config = hf.FalconConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=False)
    return hf.FalconForCausalLM(config)


def gpt_neox() -> nn.Module:
    config = hf.GPTNeoXConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
    )
    return hf.GPTNeoXForCausalLM(config)


def bart() -> nn.Module:
    config = hf.BartConfig(
        vocab_size=96,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=32,
    )
    return hf.BartForConditionalGeneration(config)


def mamba() -> nn.Module:
    return hf.MambaForCausalLM(hf.MambaConfig(vocab_size=96, hidden_size=32, state_size=4, num_hidden_layers=2))


def qwen2_moe() -> nn.Module:
    config = hf.Qwen2MoeConfig(
        **SIZES,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
    )
    return hf.Qwen2MoeForCausalLM(config)


def switch_transformers() -> nn.Module:
    config = hf.SwitchTransformersConfig(
        vocab_size=96,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        num_experts=4,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        expert_capacity=8,
        decoder_start_token_id=0,
    )
    return hf.SwitchTransformersForConditionalGeneration(config)


def dbrx() -> nn.Module:
    config = hf.DbrxConfig(
        d_model=32,
        n_heads=4,
        n_layers=2,
        max_seq_len=32,
        vocab_size=96,
        attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        ffn_config={"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    )
    return hf.DbrxForCausalLM(config)


def deepseek_v3() -> nn.Module:
    config = hf.DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4},
        moe_intermediate_size=16,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=1,
    )
    return hf.DeepseekV3ForCausalLM(config)


CASES = [
    Case(name=build.__name__, build=build, make_batch=token_batch(), slow=True)
    for build in (
        qwen2,
        qwen3,
        gemma2,
        phi3,
        opt,
        bloom,
        falcon,
        gpt_neox,
        bart,
        mamba,
        qwen2_moe,
        switch_transformers,
        dbrx,
        deepseek_v3,
    )
]
