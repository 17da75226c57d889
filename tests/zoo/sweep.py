"""Every text and image model of transformers that can be built small, without looking at any of them."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto

from tests.zoo.case import Case, pixel_batch, token_batch

MAX_PARAMETERS = 3_000_000
_MAPPINGS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
}
# What configs call their sizes; a config takes those it knows.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size",), 96),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "word_embed_proj_dim", "emb_dim"), 32),
    **dict.fromkeys(("intermediate_size", "d_ff", "n_inner", "ffn_dim", "hidden_dim"), 64),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("n_layer", "n_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 64),
    **dict.fromkeys(("max_encoder_position_embeddings", "max_decoder_position_embeddings"), 64),
    **dict.fromkeys(("head_dim", "d_kv", "kv_lora_rank", "q_lora_rank", "v_head_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "mamba_d_head", "mamba_n_heads"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "state_size", "mamba_d_state"), 4),
    **dict.fromkeys(("rotary_dim", "sliding_window", "attention_window", "num_labels"), 4),
    **dict.fromkeys(("moe_intermediate_size", "embedding_size", "image_size"), 16),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"), 1),
    **dict.fromkeys(("encoder_layerdrop", "decoder_layerdrop", "layerdrop"), 0.0),
    **dict.fromkeys(("pad_token_id",), 0),
    **dict.fromkeys(("bos_token_id", "decoder_start_token_id"), 1),
    "shared_expert_intermediate_size": 32,
    "eos_token_id": 2,
    "patch_size": 4,
}
_RUNS_AGAIN = {
    "AlbertForMaskedLM": ("albert.encoder.albert_layer_groups.*",),  # all layers are one
    "HrmTextForCausalLM": ("model.?_module.layers.*",),  # reasons in cycles over the same layers
    "LayoutLMForMaskedLM": ("layoutlm.embeddings.*",),  # left and right, top and bottom share a table
}
LEFT_OUT = {
    "BigBirdForCausalLM": "replaces its attention modules in the first forward, drawing random numbers",
    "BigBirdForMaskedLM": "as BigBirdForCausalLM",
    "BigBirdPegasusForConditionalGeneration": "as BigBirdForCausalLM",
    "BigBirdPegasusForCausalLM": "as BigBirdForCausalLM",
    "RwkvForCausalLM": "rescales the weights of its blocks from outside in evaluation, so they are held",
}
# Classes whose plain model cannot be built or run as the others are. Any other that fails makes its test fail.
_DOES_NOT_RUN = {
    "the sizes above do not go together": (
        "AXK1ForCausalLM", "AXK2ForCausalLM", "BailingHybridForCausalLM", "BambaForCausalLM",
        "BitForImageClassification", "CohereCompassForCausalLM", "CvtForImageClassification", "DbrxForCausalLM",
        "DeepseekV2ForCausalLM", "DeepseekV32ForCausalLM", "DeepseekV3ForCausalLM", "DinatForImageClassification",
        "DonutSwinForImageClassification", "EsmcForMaskedLM", "FalconForCausalLM", "FalconH1ForCausalLM",
        "FunnelForMaskedLM", "GPTNeoForCausalLM", "Gemma3nForCausalLM", "Gemma4AssistantForCausalLM",
        "Gemma4ForCausalLM", "Gemma4UnifiedForCausalLM", "Glm4MoeLiteForCausalLM", "GlmMoeDsaForCausalLM",
        "GraniteMoeHybridForCausalLM", "HieraForImageClassification", "JambaForCausalLM",
        "LevitForImageClassification", "Lfm2MoeForCausalLM", "LongT5ForConditionalGeneration",
        "LongcatFlashForCausalLM", "Mamba2ForCausalLM", "MiniCPM3ForCausalLM", "NeoMMEForMaskedLM",
        "ProphetNetForCausalLM", "ProphetNetForConditionalGeneration", "PvtForImageClassification",
        "PvtV2ForImageClassification", "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM",
        "Qwen4ExpForCausalLM", "ReformerForMaskedLM", "ReformerModelWithLMHead", "SegformerForImageClassification",
        "SqueezeBertForMaskedLM", "SwinForImageClassification", "Swinv2ForImageClassification",
        "SwitchTransformersForConditionalGeneration", "T5ForConditionalGeneration", "XLNetLMHeadModel",
        "YoutuForCausalLM", "Zamba2ForCausalLM", "ZambaForCausalLM", "ZayaForCausalLM", "xLSTMForCausalLM",
    ),
    "needs other inputs or an option": (
        "ImageGPTForImageClassification", "MusicgenForCausalLM", "MusicgenMelodyForCausalLM",
        "PPLCNetForImageClassification", "XmodForCausalLM", "XmodForMaskedLM",
    ),
    "needs the package timm": (
        "Gemma3nForConditionalGeneration", "TimmWrapperForImageClassification",
    ),
}  # fmt: skip
# How many models the sweep trained when it was last looked at (transformers 5.22).
NUM_MODELS = 184


def names() -> list[str]:
    """`kind-Class` for every class that is expected to run, without importing one."""
    found: dict[str, str] = {}
    for kind, mapping in _MAPPINGS.items():
        for entry in getattr(modeling_auto, mapping).values():
            found.setdefault(entry if isinstance(entry, str) else entry[0], kind)
    left_out = {*LEFT_OUT, *(name for classes in _DOES_NOT_RUN.values() for name in classes)}
    return [f"{kind}-{name}" for name, kind in found.items() if name not in left_out]


def case_of(name: str) -> Case | None:
    """A case for the class; None when it stays large with the sizes above."""
    kind, _, class_name = name.partition("-")
    build = _builder(getattr(transformers, class_name))
    with torch.device("meta"):
        size = sum(p.numel() for p in build().parameters())
    if size > MAX_PARAMETERS:
        return None
    make_batch = pixel_batch(labels=2) if kind == "image" else token_batch()
    return Case(name=name, build=build, make_batch=make_batch, runs_again=_RUNS_AGAIN.get(class_name, ()))


def _builder(model_class: Any) -> Callable[[], nn.Module]:
    config_class = model_class.config_class
    known = config_class()
    sizes = {name: value for name, value in _SIZES.items() if hasattr(known, name)}
    return lambda: model_class(config_class(**sizes))
