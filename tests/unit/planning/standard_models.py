"""Tiny models of published architectures, with inputs for one training forward. Nothing is downloaded."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Built = tuple[nn.Module, dict[str, Any]]
MODELS: dict[str, Callable[[], Built]] = {}
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 99,
}
IMAGE = {"image_size": 32, "patch_size": 8, "num_channels": 3}


def model(function: Callable[[], Built]) -> Callable[[], Built]:
    """Add a builder under its own name."""
    MODELS[function.__name__] = function
    return function


def tokens(length: int = 8) -> torch.Tensor:
    return torch.arange(2 * length).reshape(2, length) % 90 + 3


def text(**more: Any) -> dict[str, Any]:
    return {"input_ids": tokens(), "labels": tokens(), **more}


def pixels(size: int = 32) -> torch.Tensor:
    return torch.linspace(-1, 1, 2 * 3 * size * size).reshape(2, 3, size, size)


def causal(prefix: str, **settings: Any) -> Built:
    """A causal language model of `transformers` by the common part of its class names."""
    import transformers

    config = getattr(transformers, f"{prefix}Config")(**{**SMALL, **settings})
    return getattr(transformers, f"{prefix}ForCausalLM")(config), text()


@model
def llama() -> Built:
    return causal("Llama", num_key_value_heads=2, tie_word_embeddings=True)


@model
def mistral() -> Built:
    return causal("Mistral", num_key_value_heads=2)


@model
def mixtral() -> Built:
    return causal("Mixtral", num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)


@model
def qwen2() -> Built:
    return causal("Qwen2", num_key_value_heads=2)


@model
def qwen2_moe() -> Built:
    return causal(
        "Qwen2Moe",
        num_key_value_heads=2,
        num_experts=4,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )


@model
def gemma2() -> Built:
    return causal("Gemma2", num_key_value_heads=2, head_dim=8)


@model
def phi() -> Built:
    return causal("Phi")


@model
def gpt2() -> Built:
    import transformers

    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=99, n_positions=64)
    return transformers.GPT2LMHeadModel(config), text()


@model
def gpt_neox() -> Built:
    return causal("GPTNeoX")


@model
def falcon() -> Built:
    return causal("Falcon", alibi=False)


@model
def opt() -> Built:
    return causal("OPT", ffn_dim=64, word_embed_proj_dim=32, pad_token_id=1)


@model
def bloom() -> Built:
    import transformers

    config = transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=99)
    return transformers.BloomForCausalLM(config), text()


@model
def mamba() -> Built:
    import transformers

    config = transformers.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=99, state_size=4)
    return transformers.MambaForCausalLM(config), text()


@model
def t5() -> Built:
    import transformers

    config = transformers.T5Config(
        d_model=32, d_ff=64, d_kv=8, num_layers=2, num_heads=4, vocab_size=99, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config), text()


@model
def bart() -> Built:
    import transformers

    config = transformers.BartConfig(
        d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=99, max_position_embeddings=64,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config), text()


@model
def bert() -> Built:
    import transformers

    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL)), text()


@model
def albert() -> Built:
    import transformers

    config = transformers.AlbertConfig(**{**SMALL, "num_hidden_layers": 4}, embedding_size=16, num_hidden_groups=2)
    return transformers.AlbertForMaskedLM(config), text()


@model
def deberta() -> Built:
    import transformers

    config = transformers.DebertaV2Config(
        **SMALL,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=8,
        pooler_hidden_size=32,
    )
    return transformers.DebertaV2ForSequenceClassification(config), {
        "input_ids": tokens(),
        "labels": torch.tensor([0, 1]),
    }


@model
def roberta() -> Built:
    import transformers

    return transformers.RobertaForMaskedLM(transformers.RobertaConfig(**SMALL, max_position_embeddings=64)), text()


@model
def vit() -> Built:
    import transformers

    config = transformers.ViTConfig(**SMALL, **IMAGE)
    return transformers.ViTForImageClassification(config), {
        "pixel_values": pixels(),
        "labels": torch.tensor([0, 1]),
    }


@model
def swin() -> Built:
    import transformers

    config = transformers.SwinConfig(
        image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 2], window_size=4
    )
    return transformers.SwinForImageClassification(config), {
        "pixel_values": pixels(),
        "labels": torch.tensor([0, 1]),
    }


@model
def resnet() -> Built:
    import transformers

    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2])
    return transformers.ResNetForImageClassification(config), {
        "pixel_values": pixels(),
        "labels": torch.tensor([0, 1]),
    }


@model
def convnext() -> Built:
    import transformers

    config = transformers.ConvNextConfig(hidden_sizes=[8, 16], depths=[2, 2], num_stages=2)
    return transformers.ConvNextForImageClassification(config), {
        "pixel_values": pixels(),
        "labels": torch.tensor([0, 1]),
    }


@model
def segformer() -> Built:
    import transformers

    config = transformers.SegformerConfig(
        num_encoder_blocks=2, depths=[2, 2], sr_ratios=[2, 1], hidden_sizes=[8, 16],
        patch_sizes=[3, 3], strides=[2, 2],
        num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=16, num_labels=3,
    )  # fmt: skip
    return transformers.SegformerForSemanticSegmentation(config), {
        "pixel_values": pixels(),
        "labels": torch.zeros(2, 32, 32, dtype=torch.long),
    }


@model
def clip() -> Built:
    import transformers

    config = transformers.CLIPConfig(
        text_config={**SMALL, "max_position_embeddings": 32},
        vision_config={**SMALL, **IMAGE},
        projection_dim=16,
    )
    return transformers.CLIPModel(config), {
        "input_ids": tokens(),
        "pixel_values": pixels(),
        "return_loss": True,
    }


@model
def whisper() -> Built:
    import transformers

    config = transformers.WhisperConfig(
        d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=99, num_mel_bins=8, max_source_positions=16,
        max_target_positions=32, pad_token_id=1, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config), {
        "input_features": torch.ones(2, 8, 32),
        "labels": tokens(),
    }


@model
def llava() -> Built:
    import transformers

    config = transformers.LlavaConfig(
        vision_config={"model_type": "clip_vision_model", **SMALL, **IMAGE},
        text_config={"model_type": "llama", **SMALL, "num_key_value_heads": 2},
        image_token_id=98, vision_feature_layer=-1, image_seq_length=16,
    )  # fmt: skip
    ids = torch.cat([torch.full((2, 16), 98), tokens()], dim=1)
    return transformers.LlavaForConditionalGeneration(config), {
        "input_ids": ids, "pixel_values": pixels(), "labels": ids, "attention_mask": torch.ones_like(ids)
    }  # fmt: skip


@model
def qwen2_vl() -> Built:
    import transformers

    config = transformers.Qwen2VLConfig(
        text_config={
            **SMALL, "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0},
        },
        vision_config={
            "embed_dim": 32, "depth": 2, "hidden_size": 32, "num_heads": 4, "patch_size": 8, "mlp_ratio": 2,
        },
        image_token_id=98, vision_start_token_id=97, vision_end_token_id=96, video_token_id=95,
    )  # fmt: skip
    ids = torch.cat([torch.full((2, 4), 98), tokens()], dim=1)
    return transformers.Qwen2VLForConditionalGeneration(config), {
        "input_ids": ids, "labels": ids, "pixel_values": torch.ones(32, 3 * 2 * 8 * 8),
        "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]]), "mm_token_type_ids": (ids == 98).int(),
    }  # fmt: skip


@model
def wav2vec2() -> Built:
    import transformers

    config = transformers.Wav2Vec2Config(
        **SMALL, conv_dim=[8, 8], conv_stride=[4, 2], conv_kernel=[8, 4], num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, num_feat_extract_layers=2, apply_spec_augment=False, layerdrop=0.0,
    )  # fmt: skip
    return transformers.Wav2Vec2ForSequenceClassification(config), {
        "input_values": torch.linspace(-1, 1, 800).reshape(2, 400),
        "labels": torch.tensor([0, 1]),
    }


@model
def dino() -> Built:
    import transformers

    return transformers.Dinov2Model(transformers.Dinov2Config(**SMALL, **IMAGE)), {"pixel_values": pixels()}


@model
def unet() -> Built:
    import diffusers

    net = diffusers.UNet2DConditionModel(
        sample_size=16, block_out_channels=(8, 16), layers_per_block=1, cross_attention_dim=16,
        norm_num_groups=4, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        attention_head_dim=4,
    )  # fmt: skip
    return net, {
        "sample": torch.ones(2, 4, 16, 16),
        "timestep": torch.tensor([3, 5]),
        "encoder_hidden_states": torch.ones(2, 5, 16),
    }


@model
def autoencoder_kl() -> Built:
    import diffusers

    net = diffusers.AutoencoderKL(
        block_out_channels=(8, 16), down_block_types=("DownEncoderBlock2D",) * 2, norm_num_groups=4,
        up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4, sample_size=32,
    )  # fmt: skip
    return net, {"sample": pixels()}


@model
def diffusion_transformer() -> Built:
    import diffusers

    net = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=2, sample_size=8, patch_size=2,
        num_embeds_ada_norm=10, norm_num_groups=4,
    )  # fmt: skip
    return net, {
        "hidden_states": torch.ones(2, 4, 8, 8),
        "timestep": torch.tensor([3, 5]),
        "class_labels": torch.tensor([1, 2]),
    }


@model
def torch_transformer() -> Built:
    net = nn.Transformer(32, 4, 2, 2, 64, batch_first=True)
    return net, {"src": torch.ones(2, 5, 32), "tgt": torch.ones(2, 5, 32)}
