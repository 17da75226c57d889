"""`generate`: generate tokens with a sharded model. All ranks run every step on the same tokens."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardwise import compat
from shardwise.distributed.agreement import on_rank_zero
from shardwise.errors import ConfigError
from shardwise.models.configs import max_length
from shardwise.models.modes import evaluation_mode
from shardwise.sharding.full_params import reshard
from shardwise.sharding.parallel.context_parallel import whole_sequences
from shardwise.sharding.parallel.pipeline import Pipeline
from shardwise.training.objective import logits_of

_NO_LIMIT = 1 << 30


@torch.no_grad()
def generate(
    model: nn.Module | Pipeline,
    prompt_ids: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 0.7,
    seed: int = 0,
    end_id: int | None = None,
    window: int | None = None,
) -> Tensor:
    """Continue a prompt token by token.

    Args:
        model: Takes token ids (rows, length), returns logits or an output with `logits`. Sharded or not, or a
            pipeline.
        prompt_ids: One prompt (length), or several of the same length (rows, length). Rank 0's prompts are used.
        max_new_tokens: Maximum number of new tokens.
        temperature: Below 1 prefers likely tokens; 0 always takes the likeliest.
        seed: The same seed draws the same tokens, on any number of ranks.
        end_id: Stop when every row has drawn this token; a row that has ended is padded with `end_id`.
        window: Number of most recent tokens to pass to the model; None: the model's maximum length. Contexts longer
            than the training sequences give poor text.

    Returns:
        Prompt and continuation, shaped like the prompt, on the model's device; the same on every rank.

    Raises:
        ConfigError: The prompt is empty or the temperature negative; or the model does not return logits.

    Ranks:
        Collective. Afterward every parameter is sharded again, and the modes of the modules and the random state of
        training are unchanged.
    """
    _check(prompt_ids, temperature)
    pipe, model = (model, model.model) if isinstance(model, Pipeline) else (None, model)
    device = _device(model)
    prompt = on_rank_zero(lambda: prompt_ids.detach().cpu())
    ids = prompt.reshape(-1, prompt.shape[-1])
    generator = torch.Generator().manual_seed(seed)
    ended = torch.zeros(len(ids), dtype=torch.bool)
    window = min(max_length(model) or _NO_LIMIT, window or _NO_LIMIT)
    if pipe is not None:
        window = min(window, prompt.shape[-1] + max_new_tokens)
    with evaluation_mode(model), contextlib.ExitStack() as leaving:
        for part in [model] if pipe is None else [part.model for part in pipe.parts]:
            leaving.enter_context(whole_sequences(part))
        leaving.callback(reshard, model)
        for _ in range(max_new_tokens):
            seen = ids[:, -window:].to(device)
            logits = _last_logits(model, seen) if pipe is None else _piped_logits(pipe, seen, window)
            logits = logits.float().cpu()
            if temperature == 0:
                drawn = logits.argmax(-1)
            else:
                drawn = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]
            # Rounding may differ between ranks, and one different token would make the ranks diverge.
            drawn = on_rank_zero(lambda drawn=drawn: drawn)
            if end_id is not None:
                drawn[ended] = end_id
                ended |= drawn == end_id
            ids = torch.cat([ids, drawn[:, None]], 1)
            if ended.all():
                break
    return ids.reshape(*prompt.shape[:-1], -1).to(device)


def _last_logits(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the logits of the last token. Collective over the model's ranks."""
    logits = logits_of(model(ids), where="generate(model)")
    return (logits.full_tensor() if isinstance(logits, DTensor) else logits)[:, -1]


def _piped_logits(pipe: Pipeline, ids: Tensor, window: int) -> Tensor:
    """Return the logits of the last token; sequences are padded to one length, which a causal model ignores."""
    last = ids.shape[1] - 1
    padded = nn.functional.pad(ids, (0, window - ids.shape[1]))
    return pipe.compute({"ids": padded}, lambda model, batch: logits_of(model(batch["ids"]))[:, last].float())


def _device(model: nn.Module) -> torch.device:
    """Return the compute device, which with offloading differs from the parameters' device."""
    if isinstance(model, FSDPModule):
        return compat.compute_device(model)
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _check(prompt_ids: Tensor, temperature: float) -> None:
    if prompt_ids.ndim not in (1, 2) or prompt_ids.numel() == 0:
        raise ConfigError(
            f"the prompt has shape {tuple(prompt_ids.shape)}",
            where="generate(prompt_ids)",
            why="generation needs at least one prompt token",
            fix="pass (length) or (rows, length) token ids with a length of 1 or more",
        )
    if not temperature >= 0:
        raise ConfigError(
            f"temperature is {temperature}",
            where="generate(temperature)",
            why="logits are divided by it",
            fix="pass 0 for the most likely token, or a positive number",
        )
