"""Speech models of transformers."""

from typing import Any

import transformers
from torch import Tensor, nn

from tests.zoo.case import Case, normal, tokens

hf: Any = transformers  # its configs take more than their annotations say


def whisper() -> nn.Module:
    config = hf.WhisperConfig(
        vocab_size=96,
        num_mel_bins=8,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=16,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        apply_spec_augment=False,
    )
    return hf.WhisperForConditionalGeneration(config)


def whisper_batch(seed: int) -> dict[str, Tensor]:
    return {"input_features": normal(seed, 2, 8, 32), "labels": tokens(seed)}


def wav2vec2() -> nn.Module:
    config = hf.Wav2Vec2Config(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        conv_dim=(8, 8),
        conv_stride=(4, 2),
        conv_kernel=(8, 3),
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        num_feat_extract_layers=2,
        apply_spec_augment=False,
        layerdrop=0.0,  # transformers drops none under FSDP, and so differs from one process
        ctc_loss_reduction="mean",
    )
    return hf.Wav2Vec2ForCTC(config)


def wav2vec2_batch(seed: int) -> dict[str, Tensor]:
    return {"input_values": normal(seed, 2, 256), "labels": tokens(seed, vocab=32, length=4)}


CASES = [
    Case(name="whisper", build=whisper, make_batch=whisper_batch),
    Case(name="wav2vec2", build=wav2vec2, make_batch=wav2vec2_batch, slow=True),
]
