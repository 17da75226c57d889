"""What `benchmarks.gpu` compares with: transformers' Trainer with accelerate's FSDP2, Lightning, a tutorial-style port.

Each at its best as far as its documentation goes: layers compiled, scaled dot product attention, bfloat16 compute over
float32 parameters, fused AdamW, clipping; recomputed where the row says so. Nothing is logged or saved.
"""

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, Dataset

from benchmarks.train_overhead import RandomTokens
from shardwise.config.run import DataConfig
from shardwise.models import llama, multimodal
from shardwise.models.load import load_model


class TokenRows(Dataset[dict[str, Tensor]]):
    """Random tokens as transformers' models take them: labels are the tokens themselves."""

    def __init__(self, tokens: RandomTokens) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.tokens[index]["input_ids"]
        return {"input_ids": row, "labels": row}


def transformers_llama(name: str) -> Any:
    """Transformers' Llama of the same shape, float32, on the GPU, each layer compiled."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = llama.SHAPES[name]
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=shape.max_sequence_length,
        tie_word_embeddings=shape.tie_embeddings,
        attn_implementation="sdpa",
        use_cache=False,
    )
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        layer.compile()
    return model


def run_trainer(row: Any, tokens: RandomTokens, folder: str) -> nn.Module:
    """`transformers.Trainer` with `fsdp=True`, which is accelerate's FSDP2."""
    from transformers import Trainer, TrainingArguments

    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}.items():
        os.environ[name] = value
    os.environ.setdefault("MASTER_PORT", "29533")
    model = transformers_llama(row.model)
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=row.batch,
        max_steps=row.num_steps,
        learning_rate=3e-4,
        bf16=True,
        optim="adamw_torch_fused",
        max_grad_norm=1.0,
        fsdp=True,  # pyrefly: ignore[bad-argument-type]
        fsdp_config={"version": 2, "reshard_after_forward": row.recompute, "activation_checkpointing": row.recompute},
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_num_workers=2,
        use_cpu=not torch.cuda.is_available(),
    )
    Trainer(model=model, args=arguments, train_dataset=TokenRows(tokens)).train()
    return model


def run_lightning(row: Any, tokens: RandomTokens, folder: str) -> nn.Module:
    """`lightning.Trainer` with `ModelParallelStrategy` and `fully_shard` in `configure_model`."""
    import pytorch_lightning as lightning
    from pytorch_lightning.strategies import ModelParallelStrategy

    class Module(lightning.LightningModule):
        def configure_model(self) -> None:
            self.model = transformers_llama(row.model)
            mesh = self.device_mesh["data_parallel"]  # pyrefly: ignore[unsupported-operation]
            shard_by_layer(self.model, [self.model.model.layers], mesh, recompute=row.recompute)

        def training_step(self, batch: dict[str, Tensor]) -> Tensor:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=3e-4, fused=torch.cuda.is_available())

    module = Module()
    trainer = lightning.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=1,
        strategy=ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1),
        max_steps=row.num_steps,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    rows = DataLoader(TokenRows(tokens), batch_size=row.batch, num_workers=2, pin_memory=torch.cuda.is_available())
    trainer.fit(module, rows)
    return module.model


def shard_by_layer(model: nn.Module, stacks: Iterable[nn.ModuleList], mesh: Any, *, recompute: bool = False) -> None:
    """`fully_shard` on every layer and on the root, as torch's tutorial does."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layers in stacks:
        for index, layer in enumerate(layers):
            layers[index] = checkpoint_wrapper(layer) if recompute else layer
            fully_shard(layers[index], mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def seeing_model() -> nn.Module:
    """The multimodal model in about 3B parameters, its vision transformer frozen; on the meta device."""
    small = not torch.cuda.is_available()
    model = load_model("multimodal-debug" if small else "multimodal-14b", options={} if small else {"num_layers": 4})
    assert isinstance(model, multimodal.Multimodal)
    model.vit_model.requires_grad_(False)
    return model


class Pictures:
    """Random pictures with random texts, made once.

    Args:
        length: Of a text.
    """

    def __init__(self, length: int) -> None:
        shape = multimodal.SHAPES["multimodal-14b" if torch.cuda.is_available() else "multimodal-debug"]
        generator, size = torch.Generator().manual_seed(0), shape.vision_config.image_size
        self._ids = torch.randint(0, shape.vocab_size, (64, length), generator=generator)
        self._pictures = torch.randn(64, 3, size, size, generator=generator)

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        at = index % len(self._ids)
        picture = self._pictures[at]
        return {"input_ids": self._ids[at], "pixel_values": picture, "target_pixels": picture}


def pictures(config: DataConfig) -> Pictures:
    """For `data.source`."""
    return Pictures(config.sequence_length)


def run_tutorial(row: Any, tokens: RandomTokens, folder: str) -> nn.Module:
    """The multimodal model as torch's FSDP2 tutorial shards and trains: every layer, the root, Adam, no compiler."""
    import shardwise as sw

    mesh = sw.init_distributed()
    device = mesh.device_type
    model: Any = sw.materialize(seeing_model(), device=device)
    shard_by_layer(model, [model.vit_model.layers, model.language_model.model.layers], mesh, recompute=row.recompute)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=3e-4)
    data = Pictures(row.length)
    rows = DataLoader(data, batch_size=row.batch, num_workers=2, pin_memory=device == "cuda")  # pyrefly: ignore
    for batch, _ in zip(rows, range(row.num_steps), strict=False):
        with torch.autocast(
            device, torch.bfloat16
        ):  # without it the waves of the times, float32, meet bfloat16 weights
            loss = model(**{name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()})["loss"]
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


RUNS: dict[str, Callable[[Any, RandomTokens, str], nn.Module]] = {
    "trainer": run_trainer,
    "lightning": run_lightning,
    "tutorial": run_tutorial,
}


def finish() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()
